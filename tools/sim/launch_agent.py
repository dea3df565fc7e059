"""An agent of a simulated launched run: the machine of the real one, and simulated workers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from tools.sim.launch_checks import LaunchChecks, NodeLedger
from tools.sim.launch_lighthouse import LaunchLighthouse
from tools.sim.network import MAX_SERVER_KEEPALIVE_S, Network, Reason, Stream, StreamEnd
from tools.sim.trace import Trace
from tools.sim.world import Event, Process, VirtualWorld
from torchft_svc.core.launch.agent import (
    AgentConfig,
    AgentMachine,
    Broadcast,
    End,
    Order,
    OrderQueue,
    Orders,
    ReplaceWorkers,
    StartWorkers,
    StopWorkers,
    WorkerState,
)
from torchft_svc.core.launch.world import (
    AgentLeave,
    AgentMessage,
    AgentState,
    AgentWelcome,
    RunClosed,
    RunMove,
    World,
    WorldNews,
)
from torchft_svc.core.quorum.manager.lighthouse_link import WELCOME_TIMEOUT_S
from torchft_svc.core.route import LOOK_BACK_S, Backoff, Route
from torchft_svc.errors import NotLeader, RequestRefused

# The longest that a worker takes to look at its events, and to end.
MAX_STEP_S, MAX_STOP_S = 0.5, 1.0
NOTICE_S = 0.01  # how long an agent takes to notice that a worker has died
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
        self._queue = OrderQueue(self)
        self._timer: Event | None = None
        self._timer_at = math.inf
        checks.record_start(self.ledger)
        self.feed(self.machine.started)
        self._connect()

    @property
    def is_up(self) -> bool:
        return not self.process.is_dead and self.ended is None

    def kill(self) -> None:
        """Send SIGKILL to the agent; its workers die with it."""
        self.process.thaw()
        self.process.kill()
        self.workers.die()

    def processes(self) -> list[Process]:
        return [self.process, *([self.workers.process] if self.workers.process else [])]

    # -- the driver ------------------------------------------------------------------------------

    def feed(self, input_: Callable[[float], Orders]) -> None:
        """Hand an input to the machine, and execute its orders."""
        if self.ended is not None:
            return
        self._queue.execute(input_(self._universe.now))
        self._checks.check_agent(self.ledger)
        at = self.machine.next_deadline()
        if at is not None and at < self._timer_at:
            if self._timer is not None:
                self._timer.cancelled = True
            self._timer_at = at
            self._timer = self.process.after(at - self._universe.now, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self.feed(self.machine.tick)

    def _feed_after(self, delay_s: float, input_: Callable[[float], Orders]) -> None:
        self.process.after(delay_s, self.feed, input_)

    # -- orders ----------------------------------------------------------------------------------

    def open_store(self) -> None:
        port = next(self._ports)
        delay_s = self.process.chance.uniform(0.0, STORE_S)
        self._feed_after(delay_s, lambda now: self.machine.store_opened(port, now))

    def send_state(self, state: AgentState) -> None:
        self._send(state)

    def start_workers(self, order: StartWorkers) -> None:
        self._record(order)
        self._checks.check_start(self.ledger, order)
        self.workers.start(order.world, order.is_expected)

    def replace_workers(self, order: ReplaceWorkers) -> None:
        self._record(order)
        self._checks.check_replacement(self.ledger, order)
        self.workers.replace()

    def stop_workers(self, order: StopWorkers) -> None:
        self._record(order)
        self._checks.check_stop(self.ledger, order)
        self.workers.stop()

    def broadcast(self, order: Broadcast) -> None:
        self._record(order)
        self._checks.check_broadcast(self.ledger, order)
        if order.state is WorkerState.HEALTHY:
            self.workers.enter(order.world)

    def send_leave(self, leave: AgentLeave) -> None:
        self._record(leave)
        self._has_left |= self._stream is not None
        self._send(leave)

    def finish(self, end: End) -> None:
        self._record(end)
        self.ended = end
        self._checks.check_end(self.ledger, end)
        self.workers.die()
        if self._stream is not None and self._end is not None and self._end.is_open:
            self._stream.cancel()

    def _record(self, done: Order | AgentLeave) -> None:
        self._trace.record(self.node_id, shown(done))

    # -- workers ---------------------------------------------------------------------------------

    def report_from_workers(self, delay_s: float, input_: Callable[[float], Orders]) -> None:
        """Feed what workers report, or what happens to them, after ``delay_s``."""
        self._feed_after(delay_s, input_)

    def kill_worker(self) -> None:
        """Send SIGKILL to one of its workers."""
        if self.workers.is_there:
            self.workers.lose_one()
            self.ledger.num_failures += 1
            rank = self.process.chance.randrange(self.machine.config.node.num_workers)
            self._feed_after(
                NOTICE_S, lambda now: self.machine.workers_failed("it died", (rank,), now)
            )

    def break_process_group(self) -> None:
        """Break the process group of its workers, though no node is lost."""
        if self.workers.is_there:
            self._feed_after(NOTICE_S, self.machine.world_over)

    def finish_workers(self) -> None:
        """End all workers well, if they are in a world that is reached."""
        if self.workers.is_there and self.ledger.is_in_reached_world():
            self.workers.die()
            self.ledger.has_finished = True
            self._feed_after(NOTICE_S, self.machine.workers_succeeded)

    def stop(self) -> None:
        """Send SIGTERM to the agent."""
        self.ledger.was_stopped = True
        self.feed(lambda now: self.machine.stop_requested("SIGTERM", now))

    # -- the link --------------------------------------------------------------------------------

    def _connect(self) -> None:
        if not self.is_up:
            return
        end: StreamEnd = StreamEnd(
            self.process, self._receive, lambda reason: self._reconnect(end, reason)
        )
        lighthouse = self._lighthouses[self._route.current]
        self._end, self._beat_s = end, 0.0
        self._stream = self._network.connect(end, lighthouse.accept)
        if self._stream is not None:
            self._stream.to_server(self.machine.hello())
            self.process.after(WELCOME_TIMEOUT_S, self._check_welcome, end)

    def _check_welcome(self, end: StreamEnd) -> None:
        if end is self._end and not self._beat_s:
            self._drop_stream(end)

    def await_frozen(self, lighthouse: LaunchLighthouse) -> None:
        """Let the keepalive end a stream to ``lighthouse``, which stands still from now on."""
        end = self._end
        if end is None or self._lighthouses[self._route.current] is not lighthouse:
            return
        is_only_one = len(self._lighthouses) == 1
        longest_s = MAX_SERVER_KEEPALIVE_S if is_only_one else MAX_IMPATIENT_KEEPALIVE_S
        delay_s = self.process.chance.uniform(longest_s / 2, longest_s)
        self.process.after(delay_s, self._check_answer, end, lighthouse, self._universe.now)

    def _check_answer(self, end: StreamEnd, lighthouse: LaunchLighthouse, since: float) -> None:
        process = lighthouse.process
        if end is self._end and process.is_frozen and process.thawed_at < since:
            self._drop_stream(end)

    def _drop_stream(self, end: StreamEnd) -> None:
        if self._stream is not None and end.is_open:
            self._stream.cancel()
            self._reconnect(end, "it does not answer")

    def _reconnect(self, end: StreamEnd, reason: Reason) -> None:
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
            self._plan_look_back(self._end)
        if isinstance(news, RunMove):
            self._move = news
        elif self.ended is None:
            self._has_left |= isinstance(news, RunClosed)  # it does not connect again
            self._checks.check_news(self.ledger, news)
            self.feed(lambda now: self.machine.news_received(news, now))

    def _beat(self, end: StreamEnd) -> None:
        if end is self._end and self.is_up:
            self._send(self.machine.state)
            self.process.after(self._beat_s, self._beat, end)

    def _plan_look_back(self, end: StreamEnd | None) -> None:
        if self._route.preferred:
            delay_s = LOOK_BACK_S * self.process.chance.uniform(0.5, 1.0)
            self.process.after(delay_s, self.look_back, end)

    def look_back(self, end: StreamEnd) -> None:
        """Move the run to an earlier lighthouse of the list, if one accepts it (rule L21)."""
        if end is not self._end or not self.is_up:
            return
        is_cut = self._network.is_cut(self.process.name)
        for address in self._route.preferred:
            if self._lighthouses[address].accepts_agents() and not is_cut:
                self._send(RunMove(address))
                return
        self._plan_look_back(end)

    def _send(self, message: AgentMessage) -> None:
        if self._stream is not None and self._beat_s:
            self._stream.to_server(message)


class Workers:
    """All workers of one node: they start, act on their events, and end."""

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
        """Whether one of them will die, or has died, and its agent may not know yet."""
        return self.is_to_fail or not self.is_whole

    def start(self, world: World, is_expected: bool) -> None:
        """Start new ones."""
        self._num_lives += 1
        self.process = self._universe.process(f"{self._agent.node_id}/w{self._num_lives}")
        self._start_up()
        if not is_expected:
            self.enter(world, self._duration_of_start())

    def replace(self) -> None:
        """Start a new one, while the others stay."""
        self._start_up()

    def _start_up(self) -> None:
        process, agent = self._running(), self._agent
        self.is_whole, self.is_to_fail = True, agent.wants_next_start_to_fail
        if agent.wants_next_start_to_fail:
            agent.wants_next_start_to_fail = False
            process.after(0.5 * self._start_s, agent.kill_worker)
        process.after(self._duration_of_start(), self._call_api, self._report_ready)

    def _duration_of_start(self) -> float:
        return self._start_s * self._running().chance.uniform(0.5, 1.5)

    def enter(self, world: World, delay_s: float = 0.0) -> None:
        """Send them a world; they report when they are in it."""
        process = self._running()
        delay_s += process.chance.uniform(0.0, MAX_STEP_S)
        process.after(delay_s, self._call_api, lambda: self._report_reached(world.round))

    def _call_api(self, action: Callable[[], None]) -> None:
        """Call the runtime's API, after they hang no more."""
        if self.hung_until > self._universe.now:
            self._running().after(self.hung_until - self._universe.now, self._call_api, action)
        elif self.is_whole:
            action()

    def _report_ready(self) -> None:
        self._agent.report_from_workers(0.0, self._agent.machine.workers_ready)

    def _report_reached(self, round_: int) -> None:
        machine = self._agent.machine
        self._agent.report_from_workers(0.0, lambda now: machine.workers_reached(round_, now))

    def lose_one(self) -> None:
        self.is_whole = self.is_to_fail = False

    def stop(self) -> None:
        """Send SIGTERM to all of them."""
        agent = self._agent
        self.die()
        agent.report_from_workers(
            agent.process.chance.uniform(0.0, MAX_STOP_S), agent.machine.workers_stopped
        )

    def die(self) -> None:
        if self.process is not None:
            self.process.thaw()
            self.process.kill()
            self.process = None

    def _running(self) -> Process:
        assert self.process is not None
        return self.process


def shown(order: Order | AgentLeave) -> str:
    """An order as a line of a trace."""
    if isinstance(order, StartWorkers):
        return f"starts its workers{' early' if order.is_expected else ''} in {order.world.round}"
    if isinstance(order, ReplaceWorkers):
        return f"replaces workers {order.local_ranks}"
    if isinstance(order, Broadcast):
        change = order.change.value if order.change else ""
        return f"{order.state.value} {order.world.round} {order.world.node_ids} {change}"
    return str(order)
