"""Drives the manager's link to its lighthouses: `ManagerLink`, over sessions (or calls)."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable

import grpc

from torchft_svc.core.link import ConfirmLeft, Connect, SendBeat
from torchft_svc.core.quorum.manager.lighthouse_link import (
    AnswerAsker,
    ManagerLink,
    ManagerLinkConfig,
    Message,
    Order,
)
from torchft_svc.core.quorum.session_messages import Beat, Leave, Question, Withdrawal
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Quorum
from torchft_svc.errors import DeadlineExceeded, QuorumFailed, TorchFTError, Unreachable
from torchft_svc.host.tasks import Tasks
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.job_members import members_of_job
from torchft_svc.manager_server.unary_transport import UnaryTransport
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import JOB_KEY, fit_for_logs, quorum_from_wire
from torchft_svc.rpc.codec_session import session_message_to_wire
from torchft_svc.rpc.lighthouse_stream import LighthouseStream
from torchft_svc.rpc.link_driver import LinkDriver
from torchft_svc.rpc.status import error_from_wire

# Python's own random numbers belong to the program in whose process a manager may be.
_DICE = random.SystemRandom()
_CONNECTION_ENDED = "the connection has ended"


class LighthouseLink(LinkDriver[ManagerLink]):
    """A manager's way to its lighthouses; to be used on one event loop.

    ``on_news`` receives losses, newcomers and commands, ``on_term`` that the term of a quorum has
    to end, ``on_outcome`` the outcome of each question, by its round; ``beat`` returns what the
    group does, and ``reached`` how far its workers are. They and ``machine.address`` are set before
    `start`. ``draw`` is for pauses and beats.
    """

    on_news: Callable[[pb.SessionNews], None]
    on_term: Callable[[TermEnds], None]
    on_outcome: Callable[[int, Quorum | TorchFTError], None]
    beat: Callable[[], Beat]
    reached: Callable[[], int] = int

    def __init__(
        self, config: ManagerConfig, tasks: Tasks, draw: Callable[[], float] = _DICE.random
    ) -> None:
        settings = ManagerLinkConfig(
            lighthouses=config.lighthouses,
            store_address=config.store_address,
            group_world_size=config.group_world_size,
            heartbeat_interval_s=config.heartbeat_interval_s,
            connect_timeout_s=config.connect_timeout_s,
            quorum_retries=config.quorum_retries,
            min_replicas=config.min_replicas,
            is_spare=config.is_spare,
            resumed=config.resumed,
            wall_offset_s=time.time() - time.monotonic(),
        )
        self._config = config
        #: The job and the token, for each stream and call.
        self.metadata = ((JOB_KEY, config.job_id), *config.security.metadata)
        machine = ManagerLink(settings, self._new_replica_id, draw, lambda: self.reached())
        super().__init__(machine, config.job_id, config.security, tasks)
        self._left = asyncio.Event()
        # Of the present connection, with the address of its lighthouse.
        self._channel: tuple[grpc.aio.Channel, str] | None = None
        self._has_channel = asyncio.Event()

    def _new_replica_id(self) -> str:
        return f"{self._config.replica_name}:{uuid.uuid4()}"

    def start(self) -> None:
        """Begin to prove that the group is alive, unless it has begun."""
        if not self._number:
            self.feed(lambda machine, now: machine.start(now))

    async def leave(self, leave: Leave) -> None:
        """See `ManagerLink.leave`; returns when the group has left. Never raises."""
        self._left.clear()
        self.feed(lambda machine, now: machine.leave(leave, now))
        await self._left.wait()

    async def list_members(self, timeout_s: float) -> pb.JobMembersResponse:
        """The members of the job's last quorum; waits for a connection.

        Raises:
            PeerError: there is none within ``timeout_s``, or the lighthouse does not answer.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while (present := self._channel) is None:  # it may be over again when this wakes up
                await asyncio.wait_for(self._has_channel.wait(), deadline - time.monotonic())
            left_s = max(deadline - time.monotonic(), 0.001)
            channel, address = present
            asking = asyncio.ensure_future(members_of_job(channel, address, self._config, left_s))
            try:
                await asyncio.wait({asking})
            finally:
                asking.cancel()
            if asking.cancelled():  # by the end of the connection, and not by our caller
                raise Unreachable("lighthouse", address, _CONNECTION_ENDED)
            return asking.result()
        except asyncio.TimeoutError:  # before Python 3.11, this is not the built-in one
            raise DeadlineExceeded("connecting with the lighthouse", timeout_s) from None

    def _execute_own(self, order: Order) -> None:
        if isinstance(order, AnswerAsker):
            self.on_outcome(order.round, order.outcome)
        elif isinstance(order, TermEnds):
            self.on_term(order)
        elif isinstance(order, ConfirmLeft):
            self._left.set()
        else:
            self.send(order)

    async def _talk(self, connection: Connect, channel: grpc.aio.Channel) -> TorchFTError | None:
        number = connection.connection
        session = self._transports[number] = SessionTransport(self, connection, channel)
        present = self._channel = channel, connection.address
        self._has_channel.set()
        try:
            return await session.run()
        except NotSupported:
            calls = self._transports[number] = UnaryTransport(
                connection, channel, self.metadata, self.machine.replica_id, self.feed
            )
            self.feed(lambda machine, now: machine.refuse_spare(number, now))
            self.feed(lambda machine, now: machine.not_supported(number, now))
            return await calls.run()
        finally:
            if self._channel is present:
                self._channel = None
                self._has_channel.clear()


class SessionTransport(LighthouseStream[Question | Withdrawal | Leave]):
    """The stream of a session: while it is open the group is alive, and news come over it."""

    def __init__(
        self, link: LighthouseLink, connection: Connect, channel: grpc.aio.Channel
    ) -> None:
        kinds = pb.SessionRequest, pb.SessionNews
        super().__init__(channel, connection.address, "Session", kinds, link.metadata)
        self._link = link
        self._number = connection.connection
        self._timeout_s = 0.0  # of the last question

    def send(self, message: Message) -> None:
        """Send ``message`` soon; a question that is withdrawn before is not sent at all."""
        if isinstance(message, Question):
            self._timeout_s = message.timeout_s
        elif isinstance(message, Withdrawal):
            for each in self._unsent:
                if isinstance(each, Question) and each.number == message.number:
                    self._unsent.remove(each)
                    return
        super().send(message)

    def _make_hello(self) -> pb.SessionRequest:
        return session_message_to_wire(self._link.machine.hello())

    def _introduced(self) -> None:
        self._link.feed(lambda machine, now: machine.introduced(self._number, now))

    def _encode(self, message: Message) -> pb.SessionRequest:
        if isinstance(message, SendBeat):
            return session_message_to_wire(self._link.beat())
        return session_message_to_wire(message)

    def _receive(self, news: pb.SessionNews, *, is_first: bool) -> None:
        kind = "welcome" if is_first else news.WhichOneof("kind")
        fit_for_logs(news)
        if kind == "welcome":
            self._receive_welcome(news.welcome)
        elif kind == "refusal":
            refusal = news.refusal
            error = error_from_wire(refusal.error, refusal.reason, "quorum", self._timeout_s)
            self._receive_outcome(refusal.number, error)
        elif kind == "quorum":
            try:
                self._receive_outcome(news.answers, quorum_from_wire(news.quorum))
            except QuorumFailed as error:
                self._receive_outcome(news.answers, error)
        elif kind is not None:  # else only a newer version knows it
            why = news.no_quorum_yet.reason if kind == "no_quorum_yet" else ""
            if self._link.machine.accepts_news(self._number, why):
                self._link.on_news(news)

    def _receive_welcome(self, welcome: pb.SessionWelcome) -> None:
        interval_s = welcome.min_interval_ms / 1000
        if not welcome.knows_prepared_spares:
            self._link.feed(lambda machine, now: machine.refuse_spare(self._number, now))
        self._link.feed(lambda machine, now: machine.welcomed(self._number, interval_s, now))

    def _receive_outcome(self, question: int, outcome: Quorum | TorchFTError) -> None:
        self._link.feed(lambda machine, now: machine.answered(self._number, question, outcome, now))

    def _to_error(self, error: grpc.aio.AioRpcError) -> TorchFTError:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise NotSupported from None
        return super()._to_error(error)


class NotSupported(Exception):
    """The lighthouse does not know sessions."""
