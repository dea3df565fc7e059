"""Drives a `LinkMachine` in a simulated world: streams, looks at other lighthouses, one timer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from tools.sim.network import Network, Reason, Stream, StreamEnd
from tools.sim.world import Process
from torchft_svc.core.link import Close, Connect, LinkMachine, LinkState, Log, Probe
from torchft_svc.core.timer import DeadlineTimer
from torchft_svc.errors import TorchFTError, Unreachable

Machine = TypeVar("Machine", bound=LinkMachine[Any])


class Host(Protocol):
    """A lighthouse that may be connected to."""

    process: Process

    def accept(self, stream: Stream) -> StreamEnd | None:
        """The server's end of a new stream, if somebody listens."""

    def accepts_clients(self) -> bool:
        """Whether it would accept a client that asks now."""


class SimulatedLink(ABC, Generic[Machine]):
    """One life of a link."""

    def __init__(
        self, process: Process, network: Network, hosts: Mapping[str, Host], machine: Machine
    ) -> None:
        self.machine = machine
        self._process = process
        self._network = network
        self._hosts = hosts
        self._streams: dict[int, Stream] = {}  # by connection
        self._number = 0  # of the connection that messages go over
        self._host = ""  # that it is connected to
        self._timer = DeadlineTimer(process.after, lambda: self.feed(_tick))
        self._is_closed = False

    # -- what a kind of link decides -------------------------------------------------------------

    @abstractmethod
    def _introduce(self, connection: Connect, stream: Stream) -> None:
        """Send the hello."""

    @abstractmethod
    def _receive(self, number: int, news: Any) -> None:
        """Pass on what has come over connection ``number``, which may be over."""

    @abstractmethod
    def _execute_own(self, order: Any) -> None:
        """Execute an order that is not that of all links."""

    def _state_changed(self, before: LinkState) -> None:
        """The machine's state may have changed since ``before``."""

    # -- the machine's shell ---------------------------------------------------------------------

    def feed(self, input_: Callable[[Machine, float], object]) -> None:
        """Pass an input to the machine, execute its orders, and set the timer."""
        if self._is_closed:
            return
        now, before = self._process.world.now, self.machine.state
        input_(self.machine, now)
        self._state_changed(before)
        for order in self.machine.take_orders():
            self._execute(order)
        self._timer.set(self.machine.next_deadline(now), now)

    def send(self, message: object) -> None:
        """Send ``message`` over the present connection, if there is one."""
        if self._number in self._streams:
            self._streams[self._number].to_server(message)

    def close(self) -> None:
        """End without a word."""
        self._is_closed = True
        for stream in self._streams.values():
            stream.cancel()
        self._streams.clear()

    def _execute(self, order: Any) -> None:
        if isinstance(order, Connect):
            self._connect(order)
        elif isinstance(order, Close):
            stream = self._streams.pop(order.connection, None)
            if stream is not None:
                stream.cancel()
        elif isinstance(order, Probe):
            self._probe(order)
        elif not isinstance(order, Log):
            self._execute_own(order)

    def _connect(self, order: Connect) -> None:
        self._number, self._host = order.connection, order.address
        receive = partial(self._receive, order.connection)
        end = StreamEnd(self._process, receive, partial(self._ended, order))
        stream = self._network.connect(end, self._hosts[order.address].accept)
        if stream is not None:
            self._streams[order.connection] = stream
            self._introduce(order, stream)

    def _probe(self, order: Probe) -> None:
        """A lighthouse that is frozen, or cut off from this client, does not answer."""
        answers: dict[str, bool] = {}

        def receive(address: str, accepts: bool) -> None:
            if address in answers:
                return
            answers[address] = accepts
            if len(answers) == len(order.addresses):
                accepting = [each for each, accepts in answers.items() if accepts]
                self.feed(lambda machine, now: machine.probed(order.connection, accepting, now))

        def ask(address: str, host: Host) -> None:
            back_s = self._network.latency(self._process)
            self._process.after(back_s, receive, address, host.accepts_clients())

        for address in order.addresses:
            host = self._hosts[address]
            way_s = self._network.latency(self._process)
            self._process.after(order.timeout_s, receive, address, False)
            if self._network.is_cut(self._process.name):
                continue
            if host.process.is_dead:
                self._process.after(way_s, receive, address, False)
            else:
                host.process.after(way_s, ask, address, host)

    def _ended(self, order: Connect, reason: Reason) -> None:
        """The stream is over, by the lighthouse or because of the network."""
        if isinstance(reason, TorchFTError):
            error = reason
        else:
            error = Unreachable("lighthouse", order.address, reason)
        self.feed(lambda machine, now: machine.closed(order.connection, error, now))


def _tick(machine: LinkMachine[Any], now: float) -> None:
    machine.tick(now)
