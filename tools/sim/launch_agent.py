"""An agent of a simulated launched run: the machine of the real one, and simulated workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tools.sim.agent_link_actor import AgentLinkActor
from tools.sim.launch_checks import LaunchChecks, NodeLedger
from tools.sim.launch_lighthouse import LaunchLighthouse
from tools.sim.network import Network
from tools.sim.trace import Trace
from tools.sim.world import Process, VirtualWorld
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
)
from torchft_svc.core.launch.agent_link import LinkNews, LinkTrouble
from torchft_svc.core.launch.worker_events import WorkerState
from torchft_svc.core.launch.world import AgentLeave, AgentState, World
from torchft_svc.core.timer import DeadlineTimer

# The longest that a worker takes to look at its events, and to end.
MAX_STEP_S, MAX_STOP_S = 0.5, 1.0
NOTICE_S = 0.01  # how long an agent takes to notice that a worker has died
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
        self._checks = checks
        self._trace = trace
        self._link = AgentLinkActor(self.process, config, network, lighthouses, self._receive)
        self._ports = itertools.count(1000)
        self._queue = OrderQueue(self)
        self._timer = DeadlineTimer(self.process.after, lambda: self.feed(self.machine.tick))
        checks.record_start(self.ledger)
        self.feed(self.machine.started)

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
        """Hand an input to the machine, execute its orders, and set the timer."""
        if self.ended is not None:
            return
        now = self._universe.now
        self._queue.execute(input_(now))
        self._checks.check_agent(self.ledger)
        self._timer.set(self.machine.next_deadline(), now)

    def _feed_after(self, delay_s: float, input_: Callable[[float], Orders]) -> None:
        self.process.after(delay_s, self.feed, input_)

    # -- orders ----------------------------------------------------------------------------------

    def open_store(self) -> None:
        port = next(self._ports)
        delay_s = self.process.chance.uniform(0.0, STORE_S)
        self._feed_after(delay_s, lambda now: self.machine.store_opened(port, now))

    def send_state(self, state: AgentState) -> None:
        self._link.feed(lambda link, now: link.report_state(state, now))

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
        self._link.leave(leave)

    def finish(self, end: End) -> None:
        self._record(end)
        self.ended = end
        self._checks.check_end(self.ledger, end)
        self.workers.die()
        self._link.finish()

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

    def _receive(self, news: LinkNews) -> None:
        if self.ended is not None:
            return
        if not isinstance(news, LinkTrouble):
            self._checks.check_news(self.ledger, news)
            self.feed(lambda now: self.machine.news_received(news, now))
        elif news.is_final:
            self._trace.record(self.node_id, f"is refused: {news.error}")
            self.stop()

    def await_frozen(self, lighthouse: LaunchLighthouse) -> None:
        """Let the keepalive end a stream to ``lighthouse``, which stands still from now on."""
        self._link.await_frozen(lighthouse)


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
