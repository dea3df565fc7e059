"""What an agent does with its workers: inputs carry ``now``, orders come out.

    agent = AgentMachine(config, now)
    agent.started(now)                            # the first input
    agent.news_received(news, now)                # what the lighthouse pushes, on any stream
    agent.store_opened(port, now)
    agent.workers_ready(now), .workers_reached(round, now), .workers_succeeded(now)
    agent.workers_failed(reason, local_ranks, now), .workers_stopped(now)
    agent.workers_cut_off(reason, now)
    agent.stop_requested(reason, now)             # SIGTERM, SIGINT
    agent.tick(now)                               # at next_deadline()

An event begins the steps that `REACTIONS` has for it; a step that takes a while is over with its
input. The shell may lose its stream and open another one at any time: workers go on meanwhile. The
service and the simulator execute orders by one `OrderQueue`, each with its own `AgentShell`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torchft_svc.core.launch.restart import (
    REACTIONS,
    Reaction,
    RestartPolicy,
    RunEvent,
    event_of_failure,
)
from torchft_svc.core.launch.worker_events import WorkerState, WorldChangeEvent
from torchft_svc.core.launch.world import (
    FAILURE_WINDOW_S,
    AgentLeave,
    AgentState,
    AgentStatus,
    AgentWelcome,
    Node,
    RunClosed,
    RunSettings,
    RunWaiting,
    WarmUp,
    World,
    WorldNews,
    WorldPaused,
    WorldReached,
)
from torchft_svc.core.pausable_clock import PausableClock
from torchft_svc.core.restart_progress import RestartProgress
from torchft_svc.errors import ConfigError

# How much later an agent ends a wait by itself, if the lighthouse does not.
WAIT_SLACK_S = 30.0
_HOW_TO_ANSWER = "they have to call get_worker_info() and get_pg_parameters()"
# How often to look while a deadline waits.
LOOK_S = 1.0


# -- orders --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Open a store that no world uses; `AgentMachine.store_opened` receives its port.

    The stores before have to stay open: workers of earlier worlds may still use them.
    """


@dataclass(frozen=True, slots=True)
class SendState:
    """Send ``state`` to the lighthouse, now and with every beat."""

    state: AgentState


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start all local workers with the environment of ``world``; none runs.

    ``is_expected``: that world may come to be another one. The first event in their channel is
    PAUSED then, otherwise HEALTHY. The results are `AgentMachine.workers_ready`, when each of them
    has called the runtime's API, and `AgentMachine.workers_reached`, when they are in a world.
    """

    world: World
    is_expected: bool
    num_restarts: int


@dataclass(frozen=True, slots=True)
class ReplaceWorkers:
    """Start the workers with these local ranks anew, as in `StartWorkers` with ``is_expected``."""

    local_ranks: tuple[int, ...]
    world: World
    num_restarts: int


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """End all local workers within the grace time; then comes `AgentMachine.workers_stopped`.

    ``within_s``: an operator's time limit instead of the usual one.
    """

    reason: str
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send ``world`` to the local workers; ``change`` is None for their first event."""

    state: WorkerState
    world: World
    change: WorldChangeEvent | None


@dataclass(frozen=True, slots=True)
class SendLeave:
    """Send the lighthouse the last message of this agent."""

    leave: AgentLeave


class Outcome(Enum):
    """How an agent ends."""

    SUCCEEDED = "succeeded"
    WORKERS_FAILED = "its workers failed"
    RENDEZVOUS_FAILED = "there was no world in time"
    RUN_CLOSED = "the run was closed"
    DRAINED = "an operator wants it to end"
    STOPPED = "it received a signal"


@dataclass(frozen=True, slots=True)
class End:
    """The last order: no worker runs any more.

    ``within_s``: how long the workers of a drained node could take. ``final``: a restart would not
    help.
    """

    outcome: Outcome
    reason: str
    within_s: float | None = None
    final: bool = False


Order = (
    OpenStore
    | SendState
    | StartWorkers
    | ReplaceWorkers
    | StopWorkers
    | Broadcast
    | SendLeave
    | End
)
Orders = tuple[Order, ...]


class AgentShell(Protocol):
    """Executes the orders of an `AgentMachine`, one method for each kind."""

    def open_store(self) -> None: ...
    def send_state(self, state: AgentState) -> None: ...
    def start_workers(self, order: StartWorkers) -> None: ...
    def replace_workers(self, order: ReplaceWorkers) -> None: ...
    def stop_workers(self, order: StopWorkers) -> None: ...
    def broadcast(self, order: Broadcast) -> None: ...
    def send_leave(self, leave: AgentLeave) -> None: ...
    def finish(self, end: End) -> None: ...


class OrderQueue:
    """Hands orders to ``shell`` in the order in which they were given.

    An order may lead to an input, and that to other orders: these come after all that were given
    before them.
    """

    def __init__(self, shell: AgentShell) -> None:
        self._shell = shell
        self._orders: deque[Order] = deque()
        self._is_busy = False

    def execute(self, orders: Orders) -> None:
        """Execute ``orders``; returns at once within the execution of others."""
        self._orders += orders
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._orders:
                self._execute_one(self._orders.popleft())
        finally:
            self._is_busy = False

    def _execute_one(self, order: Order) -> None:
        match order:
            case OpenStore():
                self._shell.open_store()
            case SendState():
                self._shell.send_state(order.state)
            case StartWorkers():
                self._shell.start_workers(order)
            case ReplaceWorkers():
                self._shell.replace_workers(order)
            case StopWorkers():
                self._shell.stop_workers(order)
            case Broadcast():
                self._shell.broadcast(order)
            case SendLeave():
                self._shell.send_leave(order.leave)
            case End():
                self._shell.finish(order)


# -- the machine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How an agent behaves; durations in seconds.

    ``ready_timeout_s``: how long workers may take to call the runtime's API after their start, and
    to reach a world (0: they need not). ``exit_barrier_timeout_s``: how long the others may take
    after the workers of this node have finished. ``max_soft_failures``: more failures within
    ``failure_window_s``, and since all workers were started, restart all of them again.
    ``max_restarts_without_progress``: so many restarts in a row that do not get beyond a step end
    the run (None: no limit). ``can_warm_up``: start workers before there is a world (soft policies,
    with a lighthouse). ``reactions``: a table for ``policy`` (default: its own).
    """

    node: Node
    settings: RunSettings
    policy: RestartPolicy
    max_restarts: int = 0
    ready_timeout_s: float = 300.0
    exit_barrier_timeout_s: float = 300.0
    max_soft_failures: int = 3
    max_restarts_without_progress: int | None = None
    failure_window_s: float = FAILURE_WINDOW_S
    can_warm_up: bool = True
    reactions: Mapping[RunEvent, tuple[Reaction, ...]] | None = None

    def __post_init__(self) -> None:
        for field in (
            "max_restarts",
            "ready_timeout_s",
            "exit_barrier_timeout_s",
            "max_soft_failures",
            "failure_window_s",
        ):
            if getattr(self, field) < 0:
                raise ConfigError(field, getattr(self, field), "it has to be 0 or more")


class AgentMachine:
    """The decisions of one agent, which has no workers in the beginning.

    Deadlines stand still with this process: workers that were frozen with it are not late.
    """

    def __init__(self, config: AgentConfig, now: float) -> None:
        self.config = config
        self._clock = PausableClock(LOOK_S, now)
        self.num_restarts_left = config.max_restarts
        #: The newest world that it has received.
        self.world: World | None = None
        #: The world that its workers have received last.
        self.entered: World | None = None
        self._status = AgentStatus.JOINING
        self._reached = False
        #: Rounds of the first and the last world that all its nodes have reached.
        self._trained = 0, 0
        self._store_port = 0
        #: The state that was sent last.
        self._sent: AgentState | None = None
        self._orders: list[Order] = []
        self._plan: deque[Reaction] = deque()
        #: The step of the plan whose end is awaited.
        self._step: Reaction | None = None
        self._has_workers = False
        self._is_paused = False
        self._expected: World | None = None
        self._num_welcomes = 0
        #: Whether a world that it has not received may have used its store (L7).
        self._may_store_be_used = False
        #: Whether the lighthouse has not confirmed yet that it has counted the last failure (L17).
        self._awaits_failure_count = False
        #: The highest round that is not to be entered any more.
        self._skipped_round = 0
        self._change = WorldChangeEvent.SCALE_UP
        #: Whether a worker has failed since all were ready.
        self._lacks_worker = False
        #: Local ranks that have failed, and were not started anew.
        self._unreplaced: set[int] = set()
        self._num_failures = 0
        #: The times of the last failures since all workers were started.
        self._soft_failures: deque[float] = deque(maxlen=config.max_soft_failures + 1)
        self._failure = ""
        self._is_final = False  # a restart cannot mend it
        self._progress = RestartProgress(config.max_restarts_without_progress)
        #: How it ends when the plan is over.
        self._end: End | None = None
        self._has_left = False
        self._has_ended = False
        self._ready_at = math.inf
        self._waits_until = math.inf
        self._barrier_at = math.inf

    # -- questions -------------------------------------------------------------------------------

    @property
    def state(self) -> AgentState:
        """What the lighthouse has to know."""
        return AgentState(
            status=self._status,
            round=0 if self.world is None else self.world.round,
            reached=self._reached,
            store_port=self._store_port,
            can_warm_up=self.config.policy.is_soft and self.config.can_warm_up,
            num_restarts=self.num_restarts,
            num_failures=self._num_failures,
            trained_since=self._trained[0],
            trained_until=self._trained[1],
            paused=self._is_paused_in_world(),
        )

    @property
    def num_restarts(self) -> int:
        return self.config.max_restarts - self.num_restarts_left

    def next_deadline(self) -> float | None:
        """The time to `tick`, on the clock of ``now``; may be too early, never too late."""
        at = self._due_at()
        return None if at == math.inf or self._has_ended else self._clock.look_by(at)

    def _due_at(self) -> float:
        return min(self._ready_at, self._waits_until, self._barrier_at)

    # -- inputs ----------------------------------------------------------------------------------

    def started(self, now: float) -> Orders:
        """Begin, and wait for a world."""

        def apply(at: float) -> None:
            self._orders.append(OpenStore())
            self._begin_plan((Reaction.RENDEZVOUS, Reaction.START_WORKERS), at)

        return self._process(now, apply)

    def news_received(self, news: WorldNews, now: float) -> Orders:
        """Act on what the lighthouse has sent."""
        return self._process(now, lambda at: self._accept_news(news, at))

    def store_opened(self, port: int, now: float) -> Orders:
        """Record the port of a store that no world uses."""

        def apply(at: float) -> None:
            self._store_port = port

        return self._process(now, apply)

    def workers_ready(self, now: float) -> Orders:
        """Go on: each worker that was started last has called the runtime's API."""

        def apply(at: float) -> None:
            if self._step in (Reaction.START_WORKERS, Reaction.REPLACE_WORKERS):
                self._set_ready()
                self._advance_plan(at)

        return self._process(now, apply)

    def workers_reached(self, round_: int, now: float) -> Orders:
        """Record that all workers have reported to be in the world with this round."""

        def apply(at: float) -> None:
            is_there = self._is_in_world() and not self._is_paused
            if is_there and self.entered is not None and round_ == self.entered.round:
                self._reached, self._ready_at = round_ == self.state.round, math.inf

        return self._process(now, apply)

    def workers_failed(
        self,
        reason: str,
        local_ranks: Iterable[int],
        now: float,
        step: int | None = None,
        *,
        is_final: bool = False,
    ) -> Orders:
        """React to workers that have ended with an error, or could not be started.

        ``step``: the last one that they committed (None: not known). ``is_final``: a restart cannot
        mend it.
        """
        return self._process(
            now,
            lambda at: self._record_failure(reason, local_ranks, at, step=step, is_final=is_final),
        )

    def workers_cut_off(self, reason: str, now: float) -> Orders:
        """Treat workers whose channel is gone as failed, if an answer of theirs is awaited (L16).

        They would not answer in time.
        """

        def apply(at: float) -> None:
            if self._ready_at < math.inf or (self._is_paused and self.config.ready_timeout_s):
                self._fail_unanswered(reason, at)

        return self._process(now, apply)

    def workers_succeeded(self, now: float) -> Orders:
        """Record that all workers have ended well."""
        return self._process(now, self._finish)

    def workers_stopped(self, now: float) -> Orders:
        """Go on: no worker runs any more, as was ordered."""

        def apply(at: float) -> None:
            if self._step is Reaction.STOP_WORKERS:
                self._has_workers = False
                self._advance_plan(at)

        return self._process(now, apply)

    def stop_requested(self, reason: str, now: float) -> Orders:
        """End the agent, because of a signal."""
        return self._process(now, lambda at: self._begin_end(End(Outcome.STOPPED, reason), at))

    def world_over(self, now: float) -> Orders:
        """Ask for another world: workers have left theirs, or a polled back end has another one."""

        def apply(at: float) -> None:
            if self._is_in_world() and self._step is None:
                soft = self.config.policy.is_soft
                self._leave_world(AgentStatus.READY if soft else AgentStatus.JOINING)
                self._begin_event(RunEvent.SCALE_UP, at)

        return self._process(now, apply)

    def tick(self, now: float) -> Orders:
        """Act on the time that has passed."""
        return self._process(now, self._check_deadlines)

    # -- what happens ----------------------------------------------------------------------------

    def _process(self, now: float, input_: Callable[[float], None]) -> Orders:
        if self._due_at() == math.inf:
            self._clock.skip_to(now)  # nothing could be late
        at = self._clock.now(now)
        if not self._has_ended:
            input_(at)
        if not (self._has_ended or self._has_left) and self.state != self._sent:
            self._sent = self.state
            self._orders.append(SendState(self._sent))
        orders, self._orders = tuple(self._orders), []
        return orders

    def _accept_news(self, news: WorldNews, now: float) -> None:
        if isinstance(news, AgentWelcome):
            self._num_welcomes += 1
            self._may_store_be_used = self._num_welcomes > 1
        elif isinstance(news, World):
            self.accept_world(news, now)
        elif isinstance(news, WorldReached):
            entered = 0 if self.entered is None else self.entered.round
            if self._has_workers and news.round == entered and not self._lacks_worker:
                self._trained = self._trained[0] or entered, entered
        elif isinstance(news, RunClosed):
            if self._status is AgentStatus.FINISHED:
                self._conclude(End(Outcome.SUCCEEDED, news.reason))
            else:
                outcome = Outcome.DRAINED if news.drained else Outcome.RUN_CLOSED
                self._begin_end(End(outcome, news.reason, news.within_s, news.final), now)
        elif isinstance(news, WorldPaused | RunWaiting | WarmUp):
            self._accept_waiting(news, now)

    def _accept_waiting(self, news: WorldPaused | RunWaiting | WarmUp, now: float) -> None:
        is_working = self._is_in_world() and self._step is None
        if isinstance(news, RunWaiting) and news.num_failures == self._num_failures:
            self._awaits_failure_count = False
        if isinstance(news, RunWaiting) and (is_working or self._may_store_be_used):
            self._may_store_be_used = False
            if self._store_port:
                self._store_port = 0
                self._orders.append(OpenStore())
        if not isinstance(news, WarmUp):
            if is_working:
                self._begin_event(RunEvent.SCALE_DOWN, now)
        elif self._status is AgentStatus.JOINING and self._step is Reaction.RENDEZVOUS:
            self._expected = news.expected
            self._status = AgentStatus.WARMING
            self._begin_plan((Reaction.START_WORKERS, Reaction.RENDEZVOUS, Reaction.RESUME), now)

    def accept_world(self, world: World, now: float) -> None:
        """Record a newer world of this node, and begin what it leads to."""
        known = 0 if self.world is None else self.world.round
        if world.round <= known or self.config.node.node_id not in world.node_ids:
            return
        self.world, self._reached = world, False
        self.replace_used_store(world)
        if self._end is not None or self._status is AgentStatus.FINISHED:
            return
        if self._status is AgentStatus.WARMING or self._awaits_failure_count:
            self._skipped_round = world.round  # it was made for the workers that have failed
        elif self._step is Reaction.RENDEZVOUS:
            self._advance_plan(now)
        elif self._step is None:
            self._begin_event(self._event_of(world), now)
        else:
            self._status = AgentStatus.WORKING  # as soon as its workers have stopped

    def replace_used_store(self, world: World) -> None:
        """Open another store, if ``world`` uses the one of this agent (L7)."""
        first = world.nodes[0].node_id
        if first == self.config.node.node_id and world.master_port == self._store_port:
            self._store_port = 0
            self._orders.append(OpenStore())

    def _event_of(self, world: World) -> RunEvent:
        """What ``world`` is for its workers: with a lost node a scale down, however many join.

        No worker may wait for those of the lost node (L31).
        """
        before = self.entered
        if before is None:
            return RunEvent.SCALE_UP
        is_larger = world.world_size > before.world_size
        is_larger = is_larger and set(before.node_ids) <= set(world.node_ids)
        return RunEvent.SCALE_UP if is_larger else RunEvent.SCALE_DOWN

    def _set_ready(self) -> None:
        self._ready_at = math.inf
        self._lacks_worker = False
        self._status = AgentStatus.READY

    def _record_failure(
        self,
        reason: str,
        local_ranks: Iterable[int],
        now: float,
        *,
        step: int | None = None,
        is_final: bool = False,
        is_hopeless: bool = False,
    ) -> None:
        is_over = self._end is not None or self._status is AgentStatus.FINISHED
        if is_over or not self._has_workers or self._step is Reaction.STOP_WORKERS:
            return
        self._failure, self._is_final = reason, is_final
        self._trained = 0, 0
        self._lacks_worker = True
        self._unreplaced.update(local_ranks)
        self._num_failures += 1
        self._soft_failures.append(now)
        since, most = now - self.config.failure_window_s, self.config.max_soft_failures
        num_failures = sum(at > since for at in self._soft_failures)
        event = event_of_failure(
            self.config.policy,
            self.num_restarts_left,
            most + 1 if is_hopeless else num_failures,
            most,
        )
        why_in_vain = self._progress.record_failure(step)
        if is_final:
            event = RunEvent.FINAL_FAILURE
        elif why_in_vain:
            event, self._is_final = RunEvent.NO_PROGRESS, True
            self._failure = f"{why_in_vain}: {reason}"
        self._begin_event(event, now)

    def _fail_unanswered(self, reason: str, now: float) -> None:
        """Restart all workers, because some do not answer."""
        self._record_failure(reason, range(self.config.node.num_workers), now, is_hopeless=True)

    def _finish(self, now: float) -> None:
        if self._end is not None:
            return
        self._plan.clear()
        self._step, self._has_workers = None, False
        self._status = AgentStatus.FINISHED
        self._ready_at = self._waits_until = math.inf
        self._barrier_at = now + self.config.exit_barrier_timeout_s

    def _begin_end(self, end: End, now: float) -> None:
        """End the workers, and then the agent; the others need not wait until that is done."""
        if self._end is not None:
            return
        self._end = end
        if end.outcome not in (Outcome.RUN_CLOSED, Outcome.DRAINED):
            self._leave_run(AgentLeave(end.reason))
        if self._step is Reaction.STOP_WORKERS:
            self._plan.clear()
        else:
            self._begin_plan((Reaction.STOP_WORKERS,), now)

    def _check_deadlines(self, now: float) -> None:
        config = self.config
        if now >= self._ready_at:
            self._ready_at = math.inf
            timeout_s = config.ready_timeout_s
            self._fail_unanswered(
                f"workers did not answer within {timeout_s:g} s: {_HOW_TO_ANSWER}", now
            )
        if now >= self._waits_until:
            self._waits_until = math.inf
            waited_s = config.settings.join_timeout_s + WAIT_SLACK_S
            reason = f"there was no world within {waited_s:g} s"
            self._begin_end(End(Outcome.RENDEZVOUS_FAILED, reason), now)
        if now >= self._barrier_at:
            timeout_s = config.exit_barrier_timeout_s
            reason = f"it finished {timeout_s:g} s ago, the others did not"
            self._leave_run(AgentLeave(reason, closes=True))
            self._conclude(End(Outcome.SUCCEEDED, reason))

    def _leave_run(self, leave: AgentLeave) -> None:
        self._has_left = True
        self._orders.append(SendLeave(leave))

    def _conclude(self, end: End) -> None:
        self._has_ended = True
        self._orders.append(end)

    # -- the steps -------------------------------------------------------------------------------

    def _is_in_world(self) -> bool:
        return self._status is AgentStatus.WORKING

    def _is_paused_in_world(self) -> bool:
        """Whether its workers wait in a world that the lighthouse has reported as broken."""
        is_waiting = self._step is not None and self._end is None
        return is_waiting and self._is_in_world() and not self._has_next_world()

    def _begin_event(self, event: RunEvent, now: float) -> None:
        usual = REACTIONS[self.config.policy][event]
        own = self.config.reactions or {}
        self._begin_plan(own.get(event, usual), now, event)

    def _begin_plan(
        self, steps: Iterable[Reaction], now: float, event: RunEvent = RunEvent.SCALE_UP
    ) -> None:
        self._plan, self._step = deque(steps), None
        self._ready_at = self._waits_until = math.inf
        if event in (RunEvent.WORKER_FAILURE, RunEvent.REPEATED_FAILURE):
            self._reached = False
            if not self.config.policy.is_soft:
                self._leave_world(AgentStatus.JOINING)
        self._change = (
            WorldChangeEvent.SCALE_UP if event is RunEvent.SCALE_UP else WorldChangeEvent.SCALE_DOWN
        )
        self._advance_plan(now)

    def _advance_plan(self, now: float) -> None:
        """Do the steps of the plan, up to one that takes a while."""
        self._step = None
        self._waits_until = math.inf
        while self._plan and self._step is None and not self._has_ended:
            step = self._plan.popleft()
            if not self._do_step(step, now):
                self._step = step
        if self._step is None and self._end is not None and not self._has_ended:
            self._conclude(self._end)

    def _do_step(self, step: Reaction, now: float) -> bool:
        """Do a step; return whether it is over at once."""
        if step is Reaction.PAUSE:
            self._pause_workers()
        elif step is Reaction.USE_RESTART:
            self.num_restarts_left -= 1
        elif step is Reaction.LEAVE_WORLD:
            self._leave_world(AgentStatus.WARMING)
            self._awaits_failure_count = self.config.can_warm_up and self.entered is not None
        elif step is Reaction.STOP_WORKERS:
            if self._has_workers:
                why = self._failure if self._lacks_worker else "the world changes"
                why = self._end.reason if self._end else why
                within_s = self._end.within_s if self._end else None
                self._orders.append(StopWorkers(why, within_s))
            return not self._has_workers
        elif step is Reaction.START_WORKERS:
            return self._start_workers(now)
        elif step is Reaction.REPLACE_WORKERS:
            return self._replace_workers(now)
        elif step is Reaction.RENDEZVOUS:
            return self._await_world(now)
        elif step is Reaction.RESUME:
            self._resume_workers(now)
        else:
            failure, is_final = self._failure, self._is_final
            self._end = End(Outcome.WORKERS_FAILED, failure, final=is_final)
            closes = step is Reaction.CLOSE_RUN
            self._leave_run(AgentLeave(failure, failed=True, closes=closes, final=is_final))
        return True

    def _leave_world(self, status: AgentStatus) -> None:
        self._status = status
        self._skipped_round = self.round_to_skip()

    def round_to_skip(self) -> int:
        """The newest round when workers leave: it was made for those that have left (L17)."""
        return 0 if self.world is None else self.world.round

    def _pause_workers(self) -> None:
        if self._has_workers and not self._is_paused and self.entered is not None:
            self._is_paused = True
            if self._has_next_world():
                assert self.world is not None
                self._change = self._change_to(self.world)
            self._orders.append(Broadcast(WorkerState.PAUSED, self.entered, self._change))

    def _change_to(self, world: World) -> WorldChangeEvent:
        is_up = self._event_of(world) is RunEvent.SCALE_UP
        return WorldChangeEvent.SCALE_UP if is_up else WorldChangeEvent.SCALE_DOWN

    def _has_next_world(self) -> bool:
        """Whether there is a world that its workers have not received."""
        return self.world is not None and self.world.round > self._skipped_round

    def _start_workers(self, now: float) -> bool:
        self._has_workers, self._trained = True, (0, 0)
        self._soft_failures.clear()
        self._lacks_worker = False
        self._unreplaced.clear()
        if self._status is AgentStatus.WARMING:
            expected = self._expected or self.entered or self.world
            assert expected is not None
            self._orders.append(StartWorkers(expected, True, self.num_restarts))
            self._is_paused = True
            return self._await_answer(now)
        assert self.world is not None
        self._orders.append(StartWorkers(self.world, False, self.num_restarts))
        self._enter_world(now)
        return True

    def _replace_workers(self, now: float) -> bool:
        expected = self.entered or self._expected
        assert expected is not None
        dead = tuple(sorted(self._unreplaced))
        self._unreplaced.clear()
        self._orders.append(ReplaceWorkers(dead, expected, self.num_restarts))
        return self._await_answer(now)

    def _await_answer(self, now: float) -> bool:
        """Wait until started workers have called the API; return whether they need not."""
        if self.config.ready_timeout_s:
            self._ready_at = now + self.config.ready_timeout_s
            return False
        self._set_ready()
        return True

    def _await_world(self, now: float) -> bool:
        """Return whether the next world is there; else begin to wait for it."""
        if self._has_next_world():
            return True
        self._waits_until = now + self.config.settings.join_timeout_s + WAIT_SLACK_S
        return False

    def _resume_workers(self, now: float) -> None:
        assert self.world is not None
        self._orders.append(Broadcast(WorkerState.HEALTHY, self.world, self._change_to(self.world)))
        self._enter_world(now)

    def _enter_world(self, now: float) -> None:
        """Record that its workers have received the newest world."""
        assert self.world is not None
        self.entered, self._expected = self.world, None
        self._skipped_round = self.world.round
        self._status, self._is_paused = AgentStatus.WORKING, False
        is_asked = self.config.policy.is_soft and self.config.ready_timeout_s > 0
        self._reached = not is_asked
        self._ready_at = now + self.config.ready_timeout_s if is_asked else math.inf
