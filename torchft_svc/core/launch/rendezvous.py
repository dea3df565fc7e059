"""The launched runs of a lighthouse: streams of agents in, orders out; one `LaunchedRun` each.

Inputs are method calls with ``now``, the instant of a monotonic clock; each returns orders for the
service. Streams are numbers of the service's choice, each used once. Runs do not affect each other.

    rendezvous = Rendezvous(RendezvousRules(), now)
    rendezvous.opened(stream, run, hello, now)     # RequestRefused: end the stream with it
    rendezvous.received(stream, message, now)      # an AgentMessage; the same
    rendezvous.closed(stream, now, error)          # also after EndStream, then nothing happens
    rendezvous.tick(now)                           # at next_deadline()
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torchft_svc.core.launch.launched_run import (
    LaunchedRun,
    Order,
    Orders,
    RunStatus,
    SendNews,
)
from torchft_svc.core.launch.world import (
    AgentHello,
    AgentLeave,
    AgentMessage,
    AgentWelcome,
    RunMove,
    World,
)
from torchft_svc.core.limits import check_name
from torchft_svc.core.pausable_clock import PausableClock, usual_look_s
from torchft_svc.core.streams import EndStream, ReportStandstill
from torchft_svc.errors import ConfigError, RequestRefused, TorchFTError

# How many beats fit into a heartbeat timeout: some may be late.
BEATS_PER_TIMEOUT = 5
SETTLE_IN_S = 1.0
# How long a run without agents is kept: agents that were cut off when it was closed come back and
# receive that; those that were cut off when all others went find that rounds have grown.
EMPTY_RUN_KEPT_S = 60.0
# In the worlds of all runs: an agent may report any world, and a thousand nodes take 0.4 MB.
MAX_NODES_OF_ALL_RUNS = 200_000
# Agents that have a list of lighthouses stay with a silent one for longer.
STANDSTILL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousRules:
    """The timeouts and limits of all runs of a lighthouse.

    ``heartbeat_timeout_s``: how long an agent may be silent before it is lost. ``settle_in_s``: how
    long after its first stream a lighthouse begins no run anew: agents that wait may find it before
    those whose workers run.
    """

    heartbeat_timeout_s: float = 5.0
    settle_in_s: float = SETTLE_IN_S
    max_runs: int = 1000
    max_nodes_per_run: int = 10_000

    def __post_init__(self) -> None:
        for field in ("heartbeat_timeout_s", "max_runs", "max_nodes_per_run"):
            if getattr(self, field) <= 0:
                raise ConfigError(field, getattr(self, field), "it has to be above 0")
        if self.settle_in_s < 0:
            raise ConfigError("settle_in_s", self.settle_in_s, "it has to be 0 or more")


class Rendezvous:
    """All launched runs of one lighthouse."""

    def __init__(self, config: RendezvousRules, now: float) -> None:
        self.config = config
        self.clock = PausableClock(usual_look_s(config.heartbeat_timeout_s), now)
        self._reported_missed_s = 0.0
        self._runs: dict[str, LaunchedRun] = {}
        self._before: dict[str, LaunchedRun] = {}  # closed ones, whose names other runs have now
        self._streams: dict[int, tuple[str, str]] = {}  # run and node id
        self._begins_at = math.inf  # when runs may begin anew
        # When to look at the runs; may be too early, never too late.
        self._due_at = math.inf

    # -- inputs ----------------------------------------------------------------------------------

    def opened(self, stream: int, name: str, hello: AgentHello, now: float) -> Orders:
        """Accept a stream that begins with ``hello``, for the run called ``name``.

        Raises:
            RequestRefused: this agent cannot take part; the stream has to end.
        """
        at = self._advance_clock(now)
        check_name("run", name)
        hello.node.check()
        hello.settings.check()
        hello.state.check()
        if hello.world is not None:
            hello.world.check()
            if hello.node.node_id not in hello.world.node_ids:
                raise RequestRefused(
                    f"node {hello.node.node_id!r} is not in the world that it reports"
                )
            self._check_room_for(name, hello.world)
        run = self._runs.get(name)
        if run is not None and self._is_history(run, hello.node.node_id):
            self._before[name] = self._runs.pop(name)
            run = None
        self._check_was_open(name, hello.node.node_id, at)
        if run is None:
            if len(self._runs) >= self.config.max_runs:
                raise RequestRefused(f"{len(self._runs)} runs are going on, no more are allowed")
            if self._begins_at == math.inf:
                self._begins_at = at + self.config.settle_in_s
            timeout_s, max_nodes = self.config.heartbeat_timeout_s, self.config.max_nodes_per_run
            begins_at = max(at, self._begins_at)
            run = LaunchedRun(name, hello.settings, timeout_s, max_nodes, begins_at)
        decided = run.opened(stream, hello, at)
        self._runs[name] = run
        self._streams[stream] = (name, hello.node.node_id)
        welcome = AgentWelcome(self.config.heartbeat_timeout_s / BEATS_PER_TIMEOUT)
        return self._conclude_input(run, [SendNews((stream,), welcome), *decided])

    def received(self, stream: int, message: AgentMessage, now: float) -> Orders:
        """Accept a message of ``stream``; ignore it if that has ended.

        Raises:
            RequestRefused: it breaks the protocol; the stream has to end.
        """
        known = self._streams.get(stream)
        if known is None:
            return ()
        at = self._advance_clock(now)
        message.check()
        name, node_id = known
        run = self._runs[name]
        if isinstance(message, RunMove):
            return self._conclude_input(run, run.moved(message, at))
        if isinstance(message, AgentLeave):
            return self._conclude_input(run, run.left(node_id, message, at))
        return self._conclude_input(run, run.state_received(node_id, message, at))

    def closed(self, stream: int, now: float, error: TorchFTError | None = None) -> Orders:
        """Record that a stream has ended, maybe with ``error``: its agent has not left."""
        known = self._streams.pop(stream, None)
        if known is None:
            return ()
        name, node_id = known
        run = self._runs[name]
        reason = "its stream ended" if error is None else f"its stream ended: {error}"
        return self._conclude_input(
            run, run.stream_ended(node_id, reason, self._advance_clock(now))
        )

    def drain(
        self, name: str, node: str, reason: str, now: float, within_s: float | None = None
    ) -> Orders:
        """Drain a node of the run called ``name``, or those of a host, for an operator.

        ``within_s``: how long its workers may take to end (None: as long as usual).

        Raises:
            RequestRefused: there is no such run or node.
        """
        at = self._advance_clock(now)
        if name not in self._runs:
            raise RequestRefused(f"there is no run {name!r}")
        run = self._runs[name]
        return self._conclude_input(run, run.drain(node, reason, within_s, at))

    def lead_ended(self, error: TorchFTError, now: float) -> Orders:
        """End all streams, and forget all runs: another lighthouse leads."""
        self._advance_clock(now)
        orders = tuple(EndStream(stream, error) for stream in self._streams)
        self._runs.clear()
        self._before.clear()
        self._streams.clear()
        self._due_at = self._begins_at = math.inf
        return orders

    def tick(self, now: float) -> Orders:
        """Act on the time that has passed; call it at `next_deadline`, or more often."""
        at = self._advance_clock(now)
        orders: list[Order] = []
        if at >= self._due_at:
            for name, run in list(self._runs.items()):
                if run.next_deadline() <= at:
                    orders += self._without_ended(run.tick(at))
                if self._is_forgotten(run, at):
                    del self._runs[name]
                    self._before.pop(name, None)
            self._due_at = min((self._due(run) for run in self._runs.values()), default=math.inf)
        return self._with_standstill(orders)

    # -- questions -------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """The time to `tick`, on the clock of ``now``; may be too early, never too late."""
        return None if self._due_at == math.inf else self.clock.look_by(self._due_at)

    def status(self, name: str, now: float) -> list[RunStatus]:
        """What people want to know of the run called ``name``, or of all (empty).

        Raises:
            RequestRefused: there is no such run.
        """
        at = self._advance_clock(now)
        if not name:
            return [run.status(at) for run in self._runs.values()]
        if name not in self._runs:
            raise RequestRefused(f"there is no run {name!r}")
        return [self._runs[name].status(at)]

    # -- the rules -------------------------------------------------------------------------------

    def _advance_clock(self, now: float) -> float:
        """Return the time of the decisions, which stands still with this process."""
        if not self._streams and self._due_at == math.inf:
            self.clock.skip_to(now)  # nothing could be late
        missed_s = self.clock.missed_s
        at = self.clock.now(now)
        if self.clock.missed_s - missed_s >= STANDSTILL_S:
            self._begins_at = at + self.config.settle_in_s
            for run in self._runs.values():
                run.stood_still(self.config.settle_in_s, at)
        return at

    def _check_room_for(self, name: str, world: World) -> None:
        """Refuse a world from elsewhere that would fill the memory."""
        worlds = [run.world for key, run in self._runs.items() if run.world and key != name]
        num_nodes = sum(len(each.nodes) for each in worlds) + len(world.nodes)
        if num_nodes > MAX_NODES_OF_ALL_RUNS:
            raise RequestRefused(
                f"with run {name!r} there would be {num_nodes} nodes in all runs, "
                f"{MAX_NODES_OF_ALL_RUNS} are allowed"
            )

    def _check_was_open(self, name: str, node_id: str, at: float) -> None:
        """Refuse a node that was cut off while its run was closed, and has begun anew (L12)."""
        before = self._before.get(name)
        if before is None or not before.knows(node_id) or self._is_forgotten(before, at):
            return
        assert before.closed is not None
        raise RequestRefused(
            f"run {name!r} was closed while node {node_id!r} was away, and has begun anew: "
            f"{before.closed.reason}"
        )

    def _is_history(self, run: LaunchedRun, node_id: str) -> bool:
        """Whether an agent that was never in this run begins another one of its name (L12).

        That is so if it was closed, and all have left.
        """
        return not run.has_agents() and run.closed is not None and not run.knows(node_id)

    def _is_forgotten(self, run: LaunchedRun, at: float) -> bool:
        if not run.is_over():
            return False
        return run.empty_since is not None and at >= run.empty_since + EMPTY_RUN_KEPT_S

    def _due(self, run: LaunchedRun) -> float:
        due_at = run.next_deadline()
        if run.is_over():
            due_at = min(due_at, (run.empty_since or 0.0) + EMPTY_RUN_KEPT_S)
        return due_at

    def _conclude_input(self, run: LaunchedRun, decided: Iterable[Order]) -> Orders:
        orders = self._without_ended(decided)
        self._due_at = min(self._due_at, self._due(run))
        return self._with_standstill(orders)

    def _without_ended(self, decided: Iterable[Order]) -> list[Order]:
        """Forget the streams that are to end."""
        orders = list(decided)
        for order in orders:
            if isinstance(order, EndStream):
                self._streams.pop(order.stream, None)
        return orders

    def _with_standstill(self, orders: list[Order]) -> Orders:
        missed_s = self.clock.missed_s - self._reported_missed_s
        if missed_s:
            self._reported_missed_s = self.clock.missed_s
            orders.insert(0, ReportStandstill(missed_s))
        return tuple(orders)
