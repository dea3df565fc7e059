"""Drives the manager's link to its lighthouses: `ManagerLink`, over sessions or calls."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable

import grpc

from torchft_svc.core.link import ConfirmLeft, Connect
from torchft_svc.core.quorum.manager.lighthouse_link import (
    AnswerAsker,
    ManagerLink,
    ManagerLinkConfig,
    Order,
)
from torchft_svc.core.quorum.session_messages import Beat, Leave
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Quorum
from torchft_svc.errors import DeadlineExceeded, TorchFTError, Unreachable
from torchft_svc.host.tasks import Tasks
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.job_members import members_of_job
from torchft_svc.manager_server.session_transport import SessionTransport
from torchft_svc.manager_server.transport import Contact, NotSupported
from torchft_svc.manager_server.unary_transport import UnaryTransport
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.link_driver import LinkDriver

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
        contact = Contact(
            number,
            connection.address,
            channel,
            self._config,
            self.feed,
            self.machine.hello,
            self.beat,
            self._receive_news,
        )
        session = self._transports[number] = SessionTransport(contact)
        present = self._channel = channel, connection.address
        self._has_channel.set()
        try:
            return await session.run()
        except NotSupported:
            calls = self._transports[number] = UnaryTransport(contact, self.machine.replica_id)
            self.feed(lambda machine, now: machine.refuse_spare(number, now))
            self.feed(lambda machine, now: machine.not_supported(number, now))
            return await calls.run()
        finally:
            if self._channel is present:
                self._channel = None
                self._has_channel.clear()

    def _receive_news(self, number: int, news: pb.SessionNews) -> None:
        why = news.no_quorum_yet.reason if news.WhichOneof("kind") == "no_quorum_yet" else ""
        if self.machine.accepts_news(number, why):
            self.on_news(news)
