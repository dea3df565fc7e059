"""An agent of a simulated launched run: the real one's own machine, and workers that obey it."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable

from tools.sim.launch_checks import LaunchChecks, NodeLedger
from tools.sim.launch_lighthouse import LaunchLighthouse
from tools.sim.network import MAX_SERVER_KEEPALIVE_S, Network, Reason, Stream, StreamEnd
from tools.sim.trace import Trace
from tools.sim.world import Event, Process, VirtualWorld
from torchft_svc.core.launch.agent import AgentConfig, AgentMachine
from torchft_svc.core.launch.agent_orders import (
    Broadcast,
    End,
    OpenStore,
    Order,
    Orders,
    ReplaceWorkers,
    StartWorkers,
    StopWorkers,
    Tell,
    TellLeave,
)
from torchft_svc.core.launch.world import (
    AgentMessage,
    AgentWelcome,
    RunClosed,
    RunMove,
    WorkerState,
    World,
    WorldNews,
)
from torchft_svc.core.quorum.manager.lighthouse_link import WELCOME_TIMEOUT_S
from torchft_svc.core.route import LOOK_BACK_S, Backoff, Route
from torchft_svc.errors import NotLeader, RequestRefused

# The longest that a worker takes to look at its events, and to end.
MAX_STEP_S, MAX_STOP_S = 0.5, 1.0
NOTICE_S = 0.01  # how long an agent takes to hear that a worker has died
# As the real channels to a list of lighthouses: asked after 2 s, and waited for as long.
MAX_IMPATIENT_KEEPALIVE_S = 4.0
STORE_S = 0.05  # the longest that a store takes to open


class LaunchAgent:
    """One life of an agent; its node has a new id in each."""

    def __init__(
        self,
        config: AgentConfig,
        universe: VirtualWorld,
        network: Network,
        lighthouses: dict[str, LaunchLighthouse],
        checks: LaunchChecks,
        trace: Trace,
        worker_start_s: float,
    ) -> None:
        self.node_id = config.node.node_id
        self.process = universe.process(self.node_id)
        self.machine = AgentMachine(config, universe.now)
        self.ledger = NodeLedger(self.node_id, self.machine)
        self.workers = Workers(self, universe, worker_start_s)
        self.ended: End | None = None
        self.wants_next_start_to_fail = False
        self._universe = universe
        self._network = network
        self._lighthouses = lighthouses
        self._checks = checks
        self._trace = trace
        self._route = Route(tuple(lighthouses))
        self._backoff = Backoff(self.process.chance.random)
        self._stream: Stream | None = None
        self._end: StreamEnd | None = None
        self._beat_s = 0.0
        self._move: RunMove | None = None
        self._has_left = False
        self._ports = itertools.count(1000)
        self._timer: Event | None = None
        self._timer_at = math.inf
        checks.begins(self.ledger)
        self.feed(self.machine.started)
        self._connect()

    @property
    def is_up(self) -> bool:
        return not self.process.is_dead and self.ended is None

    def kill(self) -> None:
        """SIGKILL; its workers die with it."""
        self.process.thaw()
        self.process.kill()
        self.workers.die()

    def processes(self) -> list[Process]:
        return [self.process, *([self.workers.process] if self.workers.process else [])]

    # -- the driver ------------------------------------------------------------------------------

    def feed(self, take: Callable[[float], Orders]) -> None:
        """Let the machine ``take`` an input, and carry its orders out."""
        if self.ended is not None:
            return
        orders = deque(take(self._universe.now))
        while orders:
            self._carry_out(orders.popleft())
        self._checks.looks_at(self.ledger)
        at = self.machine.next_deadline()
        if at is not None and at < self._timer_at:
            if self._timer is not None:
                self._timer.cancelled = True
            self._timer_at = at
            self._timer = self.process.after(at - self._universe.now, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self.feed(self.machine.tick)

    def _carry_out(self, order: Order) -> None:
        if not isinstance(order, Tell | OpenStore):
            self._trace.record(self.node_id, shown(order))
        if isinstance(order, OpenStore):
            port = next(self._ports)
            delay_s = self.process.chance.uniform(0.0, STORE_S)
            self._later(delay_s, lambda now: self.machine.store_opened(port, now))
        elif isinstance(order, Tell):
            self._send(order.state)
        elif isinstance(order, StartWorkers):
            self._checks.starts(self.ledger, order)
            self.workers.start(order.world, order.is_expected)
        elif isinstance(order, ReplaceWorkers):
            self._checks.replaces(self.ledger, order)
            self.workers.replace()
        elif isinstance(order, StopWorkers):
            self._checks.stops(self.ledger, order)
            self.workers.stop()
        elif isinstance(order, Broadcast):
            self._checks.broadcasts(self.ledger, order)
            if order.state is WorkerState.HEALTHY:
                self.workers.enter(order.world)
        elif isinstance(order, TellLeave):
            self._has_left |= self._stream is not None
            self._send(order.leave)
        else:
            self._finish(order)

    def _finish(self, end: End) -> None:
        self.ended = end
        self._checks.ends(self.ledger, end)
        self.workers.die()
        if self._stream is not None and self._end is not None and self._end.is_open:
            self._stream.cancel()

    def _later(self, delay_s: float, take: Callable[[float], Orders]) -> None:
        self.process.after(delay_s, self.feed, take)

    # -- workers ---------------------------------------------------------------------------------

    def hears_of_workers(self, delay_s: float, take: Callable[[float], Orders]) -> None:
        """What the agent is told by its workers, or of them."""
        self._later(delay_s, take)

    def worker_dies(self) -> None:
        """SIGKILL of one of its workers."""
        if self.workers.is_there:
            self.workers.lose_one()
            self.ledger.num_failures += 1
            rank = self.process.chance.randrange(self.machine.config.node.num_workers)
            self._later(NOTICE_S, lambda now: self.machine.workers_failed("it died", (rank,), now))

    def workers_leave_world(self) -> None:
        """Their process group is broken, though no node is lost."""
        if self.workers.is_there:
            self._later(NOTICE_S, self.machine.world_over)

    def workers_finish(self) -> None:
        """All workers have come to their end."""
        if self.workers.is_there and self.ledger.is_in_reached_world():
            self.workers.die()
            self.ledger.has_finished = True
            self._later(NOTICE_S, self.machine.workers_succeeded)

    def stop(self) -> None:
        """SIGTERM."""
        self.ledger.was_stopped = True
        self.feed(lambda now: self.machine.stopped("SIGTERM", now))

    # -- the link --------------------------------------------------------------------------------

    def _connect(self) -> None:
        if not self.is_up:
            return
        end: StreamEnd = StreamEnd(
            self.process, self._receive, lambda reason: self._lose(end, reason)
        )
        lighthouse = self._lighthouses[self._route.current]
        self._end, self._beat_s = end, 0.0
        self._stream = self._network.connect(end, lighthouse.accept)
        if self._stream is not None:
            self._stream.to_server(self.machine.hello())
            self.process.after(WELCOME_TIMEOUT_S, self._look_for_welcome, end)

    def _look_for_welcome(self, end: StreamEnd) -> None:
        if end is self._end and not self._beat_s:
            self._give_up(end)

    def miss(self, lighthouse: LaunchLighthouse) -> None:
        """It stands still from now on: the keepalive ends a stream to it, unless it goes on."""
        end = self._end
        if end is None or self._lighthouses[self._route.current] is not lighthouse:
            return
        is_only_one = len(self._lighthouses) == 1
        longest_s = MAX_SERVER_KEEPALIVE_S if is_only_one else MAX_IMPATIENT_KEEPALIVE_S
        delay_s = self.process.chance.uniform(longest_s / 2, longest_s)
        self.process.after(delay_s, self._look_for_answer, end, lighthouse, self._universe.now)

    def _look_for_answer(self, end: StreamEnd, lighthouse: LaunchLighthouse, since: float) -> None:
        process = lighthouse.process
        if end is self._end and process.is_frozen and process.thawed_at < since:
            self._give_up(end)

    def _give_up(self, end: StreamEnd) -> None:
        if self._stream is not None and end.is_open:
            self._stream.cancel()
            self._lose(end, "it does not answer")

    def _lose(self, end: StreamEnd, reason: Reason) -> None:
        if end is not self._end:
            return
        self._stream = self._end = None
        if not self.is_up or self._has_left:
            return
        if isinstance(reason, RequestRefused):
            self._trace.record(self.node_id, f"is refused: {reason}")
            self.stop()
            return
        if self._move is not None:
            self._route.go_back(self._move.address)
            self._move = None
            self._connect()
            return
        leader = reason.leader if isinstance(reason, NotLeader) else ""
        if not self._route.go_on(leader):
            self._backoff.tried(failed=True)
        self.process.after(self._backoff.pause_s(), self._connect)

    def _receive(self, news: WorldNews) -> None:
        if isinstance(news, AgentWelcome):
            self._route.worked()
            self._backoff.tried(failed=False)
            self._beat_s = news.beat_interval_s
            self.process.after(self._beat_s, self._beat, self._end)
            self._look_back_later(self._end)
        if isinstance(news, RunMove):
            self._move = news
        elif self.ended is None:
            self._has_left |= isinstance(news, RunClosed)  # it does not connect again
            self._checks.hears(self.ledger, news)
            self.feed(lambda now: self.machine.news(news, now))

    def _beat(self, end: StreamEnd) -> None:
        if end is self._end and self.is_up:
            self._send(self.machine.state)
            self.process.after(self._beat_s, self._beat, end)

    def _look_back_later(self, end: StreamEnd | None) -> None:
        if self._route.preferred:
            delay_s = LOOK_BACK_S * self.process.chance.uniform(0.5, 1.0)
            self.process.after(delay_s, self._look_back, end)

    def _look_back(self, end: StreamEnd) -> None:
        """Whether an earlier lighthouse of the list would take the run (rule L21)."""
        if end is not self._end or not self.is_up:
            return
        is_cut = self._network.is_cut(self.process.name)
        for address in self._route.preferred:
            if self._lighthouses[address].would_take() and not is_cut:
                self._send(RunMove(address))
                return
        self._look_back_later(end)

    def _send(self, message: AgentMessage) -> None:
        if self._stream is not None and self._beat_s:
            self._stream.to_server(message)


class Workers:
    """All workers of one node: they start, look at their events, and end."""

    def __init__(self, agent: LaunchAgent, universe: VirtualWorld, start_s: float) -> None:
        self._agent = agent
        self._universe = universe
        self._start_s = start_s
        self._num_lives = 0
        self.process: Process | None = None
        self.hung_until = 0.0
        self.is_whole = True  # none of them has died
        self.is_to_fail = False  # this start will

    @property
    def is_there(self) -> bool:
        return self.process is not None and self.is_whole

    @property
    def are_failing(self) -> bool:
        """One of them will die, or has died, and its agent may not know yet."""
        return self.is_to_fail or not self.is_whole

    def start(self, world: World, is_expected: bool) -> None:
        """New ones."""
        self._num_lives += 1
        self.process = self._universe.process(f"{self._agent.node_id}/w{self._num_lives}")
        self._start_up()
        if not is_expected:
            self.enter(world, self._duration_of_start())

    def replace(self) -> None:
        """One of them is new, the others stay."""
        self._start_up()

    def _start_up(self) -> None:
        process, agent = self._there(), self._agent
        self.is_whole, self.is_to_fail = True, agent.wants_next_start_to_fail
        if agent.wants_next_start_to_fail:
            agent.wants_next_start_to_fail = False
            process.after(0.5 * self._start_s, agent.worker_dies)
        process.after(self._duration_of_start(), self._call, self._ready)

    def _duration_of_start(self) -> float:
        return self._start_s * self._there().chance.uniform(0.5, 1.5)

    def enter(self, world: World, delay_s: float = 0.0) -> None:
        """They are told of a world, and say when they are in it."""
        process = self._there()
        delay_s += process.chance.uniform(0.0, MAX_STEP_S)
        process.after(delay_s, self._call, lambda: self._reach(world.round))

    def _call(self, action: Callable[[], None]) -> None:
        """The runtime's API, unless they hang."""
        if self.hung_until > self._universe.now:
            self._there().after(self.hung_until - self._universe.now, self._call, action)
        elif self.is_whole:
            action()

    def _ready(self) -> None:
        self._agent.hears_of_workers(0.0, self._agent.machine.workers_ready)

    def _reach(self, round_: int) -> None:
        machine = self._agent.machine
        self._agent.hears_of_workers(0.0, lambda now: machine.workers_reached(round_, now))

    def lose_one(self) -> None:
        self.is_whole = self.is_to_fail = False

    def stop(self) -> None:
        """SIGTERM to all of them."""
        agent = self._agent
        self.die()
        agent.hears_of_workers(
            agent.process.chance.uniform(0.0, MAX_STOP_S), agent.machine.workers_stopped
        )

    def die(self) -> None:
        if self.process is not None:
            self.process.thaw()
            self.process.kill()
            self.process = None

    def _there(self) -> Process:
        assert self.process is not None
        return self.process


def shown(order: Order) -> str:
    """For a trace."""
    if isinstance(order, StartWorkers):
        return f"starts its workers{' early' if order.is_expected else ''} in {order.world.round}"
    if isinstance(order, ReplaceWorkers):
        return f"replaces workers {order.local_ranks}"
    if isinstance(order, Broadcast):
        change = order.change.value if order.change else ""
        return f"{order.state.value} {order.world.round} {order.world.node_ids} {change}"
    return str(order)
