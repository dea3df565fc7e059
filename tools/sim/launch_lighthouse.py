"""The lighthouses of simulated launched runs: the service's own machine, behind streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tools.sim.launch_checks import LaunchChecks, Maker
from tools.sim.network import Reason, Stream, StreamEnd
from tools.sim.trace import Trace
from tools.sim.world import VirtualWorld
from torchft_svc.core.launch.launched_run import Order, Orders, ReportWorld, SendNews
from torchft_svc.core.launch.rendezvous import Rendezvous, RendezvousRules
from torchft_svc.core.launch.world import AgentHello, AgentMessage, AgentState
from torchft_svc.core.streams import EndStream
from torchft_svc.core.timer import DeadlineTimer
from torchft_svc.errors import NotLeader, RequestRefused

RUN = "run"
IN_GOOD_ORDER = "it has left"  # why a stream ended, if the lighthouse has no error


class LaunchLighthouse:
    """One lighthouse host; the process on it comes and goes.

    ``leads``: it accepts agents. Where one is elected, only that one does.
    """

    def __init__(
        self,
        name: str,
        leads: bool,
        world: VirtualWorld,
        timeout_s: float,
        checks: LaunchChecks,
        trace: Trace,
    ) -> None:
        self.name = name
        self.leads = leads
        self.leader = ""  # as it knows
        self._world = world
        self._config = RendezvousRules(heartbeat_timeout_s=timeout_s)
        self._checks = checks
        self._trace = trace
        self._numbers = itertools.count(1)
        self._num_lives = 0
        self._start_life()

    def _start_life(self) -> None:
        self._num_lives += 1
        self.process = self._world.process(f"{self.name}.{self._num_lives}")
        self.core = Rendezvous(self._config, self._world.now)
        self.met: set[str] = set()  # nodes
        self._connections: dict[int, _Connection] = {}
        self._timer = DeadlineTimer(self.process.after, lambda: self.feed(self.core.tick))

    def crash(self, down_s: float) -> None:
        """Send it SIGKILL, and start a new one after ``down_s``."""
        if self.process.is_dead:
            return
        self.process.thaw()
        self.process.kill()
        self._checks.forget_lighthouse()
        self._world.process("nature").after(down_s, self._come_back)

    def _come_back(self) -> None:
        self._start_life()
        self._trace.record(self.name, "is back")

    def end_lead(self, leader: str) -> None:
        """Let another one lead."""
        self.leads, self.leader = False, leader
        if not self.process.is_dead:
            self._checks.forget_lighthouse()
            over = NotLeader(leader)
            self.process.after(
                0.0, self.feed, lambda now: () if self.leads else self.core.lead_ended(over, now)
            )

    def accepts_clients(self) -> bool:
        """Whether it accepts agents, if it is asked now."""
        return self.leads and not (self.process.is_dead or self.process.is_frozen)

    def accept(self, stream: Stream) -> StreamEnd | None:
        """The server's end of a new stream, if somebody listens."""
        if self.process.is_dead:
            return None
        if not self.leads:
            refusal = NotLeader(self.leader)
            return StreamEnd(self.process, lambda *_: stream.end(refusal), lambda reason: None)
        connection = _Connection(self, stream, next(self._numbers))
        self._connections[connection.number] = connection
        return connection.end

    # -- the driver ------------------------------------------------------------------------------

    def feed(self, input_: Callable[[float], Orders]) -> None:
        """Hand an input to the core, execute its orders, and set the timer."""
        now = self._world.now
        for order in input_(now):
            self._execute(order)
        self._timer.set(self.core.next_deadline(), now)

    def closed(self, number: int) -> None:
        if self._connections.pop(number, None) is not None:
            self.feed(lambda now: self.core.closed(number, now))

    def _execute(self, order: Order) -> None:
        if isinstance(order, SendNews):
            for number in order.streams:
                self._connections[number].stream.to_client(order.news)
        elif isinstance(order, EndStream):
            connection = self._connections.pop(order.stream, None)
            if connection is not None:
                connection.finish(order.error or IN_GOOD_ORDER)
        else:
            self._trace.record(self.name, shown(order))
            rounds = [each.round for each in self._connections.values()]
            maker = Maker(self.process.name, self.met, max(rounds, default=0))
            self._checks.check_report(order, maker)


class _Connection:
    """The lighthouse's end of an agent's stream."""

    def __init__(self, lighthouse: LaunchLighthouse, stream: Stream, number: int) -> None:
        self._lighthouse = lighthouse
        self.stream = stream
        self.number = number
        self.round = 0  # the highest that its agent has reported
        self.end = StreamEnd(lighthouse.process, self._receive, self._on_end)

    def finish(self, reason: Reason) -> None:
        """End the stream behind all that was sent; what else was on its way is not read."""
        if self.end.is_open:
            self.end.is_open = False
            self.stream.end(reason)

    def _on_end(self, reason: Reason) -> None:
        self._lighthouse.closed(self.number)

    def _receive(self, message: AgentHello | AgentMessage) -> None:
        core = self._lighthouse.core
        if not self._lighthouse.leads:
            self.finish(NotLeader(self._lighthouse.leader))
            return
        self._record(message)
        try:
            if isinstance(message, AgentHello):
                self._lighthouse.feed(lambda now: core.opened(self.number, RUN, message, now))
            else:
                self._lighthouse.feed(lambda now: core.received(self.number, message, now))
        except RequestRefused as error:
            self.finish(error)
            self._lighthouse.closed(self.number)

    def _record(self, message: AgentHello | AgentMessage) -> None:
        if isinstance(message, AgentState):
            self.round = max(self.round, message.round)
        elif isinstance(message, AgentHello):
            self.round = message.state.round
            self._lighthouse.met.add(message.node.node_id)


def shown(report: Order) -> str:
    """A report as a line of a trace."""
    if isinstance(report, ReportWorld):
        world = report.world
        return f"world {world.round} {world.node_ids}: {report.cause.name}, lost {report.lost}"
    return str(report)
