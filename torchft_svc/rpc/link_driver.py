"""Drives a `LinkMachine`: connections, looks at other lighthouses, and one timer."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from torchft_svc.core.link import Close, Connect, LinkMachine, Log, Probe
from torchft_svc.core.timer import DeadlineTimer
from torchft_svc.errors import TorchFTError, Unreachable
from torchft_svc.host.tasks import Tasks, call_later
from torchft_svc.rpc.channel import keepalive_of_beating_ms, open_aio_channel
from torchft_svc.rpc.probing import accepts_client
from torchft_svc.rpc.security import Security

log = logging.getLogger(__name__)

Machine = TypeVar("Machine", bound=LinkMachine[Any])


class Transport(Protocol):
    """The way of messages to one lighthouse."""

    async def run(self) -> TorchFTError | None:
        """Receive until the connection is over, and return why; None: the lighthouse ended it."""

    def send(self, message: Any) -> None:
        """Send ``message`` soon; what is lost with the connection, `run` returns."""


class LinkDriver(ABC, Generic[Machine]):
    """Executes the orders of ``machine``; to be used on one event loop.

    ``tasks`` owns the connections. `on_change` is called when a session has begun (True), or is
    over, or could not begin (False).
    """

    def __init__(
        self,
        machine: Machine,
        job_id: str,
        security: Security,
        tasks: Tasks,
    ) -> None:
        self.machine = machine
        self.on_change: Callable[[bool], None] = lambda is_open: None
        self._job_id = job_id
        self._security = security
        self._patience_ms = keepalive_of_beating_ms(len(machine.config.lighthouses))
        self._tasks = tasks
        self._number = 0  # of the connection that messages go over
        self._transports: dict[int, Transport] = {}
        self._holding: dict[int, asyncio.Task[None]] = {}
        self._timer = DeadlineTimer(call_later, self._tick)
        self._is_stopped = False

    @abstractmethod
    async def _talk(self, connection: Connect, channel: grpc.aio.Channel) -> TorchFTError | None:
        """Use a connection until it is over, with a `Transport` in `_transports`."""

    @abstractmethod
    def _execute_own(self, order: Any) -> None:
        """Execute an order that only this kind of link has; messages go to `send`."""

    def feed(self, input_: Callable[[Machine, float], object]) -> None:
        """Pass an input to the machine, execute its orders, and set the timer."""
        if self._is_stopped:
            return
        before = self.machine.state
        input_(self.machine, time.monotonic())
        is_open = self.machine.state.session_change(before)
        if is_open is not None:
            self.on_change(is_open)
        for order in self.machine.take_orders():
            self._execute(order)
        now = time.monotonic()
        self._timer.set(self.machine.next_deadline(now), now)

    def feed_soon(self, input_: Callable[[Machine, float], object]) -> None:
        """Pass an input to the machine when this has returned: what follows may call the caller."""
        asyncio.get_running_loop().call_soon(self.feed, input_)

    def send(self, message: Any) -> None:
        """Send a message over the present connection; it is dropped if that is over."""
        if self._number in self._transports:
            self._transports[self._number].send(message)

    def stop(self) -> None:
        """Accept no more inputs; ``tasks`` ends the connections."""
        self._is_stopped = True
        self._timer.stop()

    def _tick(self) -> None:
        self.feed(lambda machine, now: machine.tick(now))

    def _execute(self, order: Any) -> None:
        if isinstance(order, Connect):
            self._number = order.connection
            self._holding[order.connection] = self._tasks.start(
                self._use_connection(order), "connection to the lighthouse"
            )
        elif isinstance(order, Close):
            self._transports.pop(order.connection, None)
            if order.connection in self._holding:
                self._holding.pop(order.connection).cancel()
        elif isinstance(order, Probe):
            self._tasks.start(self._probe(order), "look at other lighthouses")
        elif isinstance(order, Log):
            log.log(logging.INFO if order.level == "info" else logging.WARNING, order.text)
        else:
            self._execute_own(order)

    async def _use_connection(self, order: Connect) -> None:
        """Use one connection, to its end."""
        number = order.connection
        channel = open_aio_channel(order.address, self._security, self._patience_ms)
        broken: TorchFTError | None
        try:
            broken = await self._talk(order, channel)
        except Exception as error:
            log.exception("the connection to %s failed", order.address)
            broken = Unreachable("lighthouse", order.address, f"this process failed: {error!r}")
        finally:
            self._holding.pop(number, None)  # it is over: there is nothing to cancel any more
            await channel.close(grace=None)
        self.feed(lambda machine, now: machine.closed(number, broken, now))

    async def _probe(self, order: Probe) -> None:
        """Find out which of the lighthouses would accept this client."""
        addresses = order.addresses
        probes = (
            accepts_client(at, self._job_id, self._security, order.timeout_s) for at in addresses
        )
        answers = await asyncio.gather(*probes)
        accepting = [at for at, accepts in zip(addresses, answers, strict=True) if accepts]
        self.feed(lambda machine, now: machine.probed(order.connection, accepting, now))
