"""Drives the manager's link to its lighthouses: streams, calls and one timer for `LinkMachine`."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable

from torchft_svc.core.quorum.manager.lighthouse_link import LinkMachine
from torchft_svc.core.quorum.manager.link_types import (
    AnswerAsker,
    Close,
    ConfirmLeft,
    Connect,
    LinkConfig,
    Log,
    Order,
    Probe,
)
from torchft_svc.core.quorum.session_messages import Beat, Leave
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import GroupRequest, Quorum
from torchft_svc.core.timer import DeadlineTimer
from torchft_svc.errors import TorchFTError, Unreachable
from torchft_svc.host.tasks import Tasks, call_later
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.session_transport import SessionTransport
from torchft_svc.manager_server.transport import Contact, NotSupported, Transport
from torchft_svc.manager_server.unary_transport import UnaryTransport
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import keepalive_of_beating_ms, open_aio_channel
from torchft_svc.rpc.probing import would_take

log = logging.getLogger(__name__)

Input = Callable[[LinkMachine, float], object]


class LighthouseLink:
    """To be used on one event loop.

    ``on_news`` receives losses, newcomers and commands, ``on_term`` that the term of a quorum has
    to end, ``on_outcome`` the outcome of each question, by its round; ``beat`` tells what the group
    does, and ``reached`` how far its workers are; ``on_change`` is told when a session has begun
    (True), or is over, or could not begin (False). They and ``machine.address`` are set before
    `start`. ``draw`` is for pauses.
    """

    on_news: Callable[[pb.SessionNews], None]
    on_term: Callable[[TermEnds], None]
    on_outcome: Callable[[int, Quorum | TorchFTError], None]
    beat: Callable[[], Beat]
    reached: Callable[[], int] = int

    def __init__(
        self, config: ManagerConfig, tasks: Tasks, draw: Callable[[], float] = random.random
    ) -> None:
        self._config = config
        self._tasks = tasks
        settings = LinkConfig(
            lighthouses=config.lighthouses,
            store_address=config.store_address,
            group_world_size=config.group_world_size,
            heartbeat_interval_s=config.heartbeat_interval_s,
            connect_timeout_s=config.connect_timeout_s,
            quorum_retries=config.quorum_retries,
            min_replicas=config.min_replicas,
            resumed=config.resumed,
            wall_offset_s=time.time() - time.monotonic(),
        )
        self.machine = LinkMachine(settings, self._new_replica_id, draw, lambda: self.reached())
        self.on_change: Callable[[bool], None] = lambda is_open: None
        self._number = 0  # of the connection that messages go over
        self._transports: dict[int, Transport] = {}
        self._holding: dict[int, asyncio.Task[None]] = {}
        self._left = asyncio.Event()
        self._timer = DeadlineTimer(call_later, lambda: self._tell(LinkMachine.tick))

    def _new_replica_id(self) -> str:
        return f"{self._config.replica_name}:{uuid.uuid4()}"

    def start(self) -> None:
        """Begin to prove that the group is alive, unless it has begun."""
        if not self._number:
            self._tell(lambda machine, now: machine.start(now))

    def ask(self, question: GroupRequest, timeout_s: float) -> None:
        """See `LinkMachine.ask`; ``on_outcome`` hears of the outcome, after this has returned."""
        self._tell_soon(lambda machine, now: machine.ask(question, timeout_s, now))

    def withdraw(self, round_: int) -> None:
        """Nobody waits for the outcome of ``round_`` any more."""
        self._tell_soon(lambda machine, now: machine.withdraw(round_, now))

    def beat_at_once(self) -> None:
        """See `LinkMachine.beat_at_once`."""
        self._tell(lambda machine, now: machine.beat_at_once(now))

    async def leave(self, leave: Leave) -> None:
        """See `LinkMachine.leave`; returns when the group has left. Never raises."""
        self._left.clear()
        self._tell(lambda machine, now: machine.leave(leave, now))
        await self._left.wait()

    # -- the machine's shell ---------------------------------------------------------------------

    def _tell_soon(self, tell: Input) -> None:
        asyncio.get_running_loop().call_soon(self._tell, tell)

    def _tell(self, tell: Input) -> None:
        """Pass an input on, carry out what it orders, and set the timer."""
        before = self.machine.state
        tell(self.machine, time.monotonic())
        is_open = self.machine.state.session_change(before)
        if is_open is not None:
            self.on_change(is_open)
        for order in self.machine.take_orders():
            self._carry_out(order)
        now = time.monotonic()
        self._timer.set(self.machine.next_deadline(now), now)

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Connect):
            self._number = order.connection
            self._holding[order.connection] = self._tasks.start(
                self._hold(order), "connection to the lighthouse"
            )
        elif isinstance(order, Close):
            self._transports.pop(order.connection, None)
            if order.connection in self._holding:
                self._holding.pop(order.connection).cancel()
        elif isinstance(order, Probe):
            self._tasks.start(self._probe(order), "look at other lighthouses")
        elif isinstance(order, AnswerAsker):
            self.on_outcome(order.round, order.outcome)
        elif isinstance(order, TermEnds):
            self.on_term(order)
        elif isinstance(order, ConfirmLeft):
            self._left.set()
        elif isinstance(order, Log):
            log.log(logging.INFO if order.level == "info" else logging.WARNING, order.text)
        elif self._number in self._transports:
            self._transports[self._number].send(order)

    async def _hold(self, order: Connect) -> None:
        """One connection, to its end."""
        number = order.connection
        patience_ms = keepalive_of_beating_ms(len(self._config.lighthouses))
        channel = open_aio_channel(order.address, self._config.security, patience_ms)
        contact = Contact(
            number, order.address, channel, self._config, self._tell, self._hear, self.beat
        )
        broken: TorchFTError
        try:
            session = self._transports[number] = SessionTransport(contact, order.hello)
            try:
                broken = await session.run()
            except NotSupported:
                calls = self._transports[number] = UnaryTransport(contact, order.hello.replica_id)
                self._tell(lambda machine, now: machine.not_supported(number, now))
                broken = await calls.run()
        except Exception as error:
            log.exception("the connection to %s failed", order.address)
            broken = Unreachable("lighthouse", order.address, f"the manager failed: {error!r}")
        finally:
            self._holding.pop(number, None)  # it is over: there is nothing to cancel any more
            await channel.close(grace=None)
        self._tell(lambda machine, now: machine.closed(number, broken, now))

    async def _probe(self, order: Probe) -> None:
        """Tell which of the lighthouses would take this group."""
        config, addresses = self._config, order.addresses
        probes = (
            would_take(at, config.job_id, config.security, order.timeout_s) for at in addresses
        )
        takes = await asyncio.gather(*probes)
        takers = [at for at, is_taken in zip(addresses, takes, strict=True) if is_taken]
        self._tell(lambda machine, now: machine.probed(order.connection, takers, now))

    def _hear(self, number: int, news: pb.SessionNews) -> None:
        why = news.no_quorum_yet.reason if news.WhichOneof("kind") == "no_quorum_yet" else ""
        if self.machine.news(number, why):
            self.on_news(news)
