"""What an elastic agent does with its workers: inputs carry ``now``, orders come out.

    agent = AgentMachine(config, now)
    agent.started(now)                            # the first input
    agent.news(news, now)                         # what the lighthouse pushes, on any stream
    agent.hello()                                 # how to introduce it on a new stream
    agent.store_opened(port, now)
    agent.workers_ready(now), .workers_reached(round, now), .workers_succeeded(now)
    agent.workers_failed(reason, local_ranks, now), .workers_stopped(now)
    agent.workers_cut_off(reason, now)
    agent.stopped(reason, now)                    # SIGTERM, SIGINT
    agent.tick(now)                               # at next_deadline()

An event begins the steps that `REACTIONS` has for it, a step that takes a while is over with its
input. The shell may lose its stream and open another one at any time: workers go on meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torchft_svc.core.launch.agent_orders import (
    Broadcast,
    End,
    OpenStore,
    Order,
    Orders,
    Outcome,
    ReplaceWorkers,
    StartWorkers,
    StopWorkers,
    Tell,
    TellLeave,
)
from torchft_svc.core.launch.restart import (
    REACTIONS,
    Reaction,
    RestartPolicy,
    RunEvent,
    event_of_failure,
)
from torchft_svc.core.launch.world import (
    FAILURE_WINDOW_S,
    AgentHello,
    AgentLeave,
    AgentState,
    AgentStatus,
    AgentWelcome,
    Node,
    RunClosed,
    RunSettings,
    RunWaiting,
    WarmUp,
    WorkerState,
    World,
    WorldChangeEvent,
    WorldNews,
    WorldPaused,
    WorldReached,
)
from torchft_svc.core.pausable_clock import PausableClock
from torchft_svc.errors import ConfigError

# The lighthouse ends a wait; an agent that hears nothing of it ends itself so much later.
WAIT_SLACK_S = 30.0
_HOW_TO_ANSWER = "they have to call get_worker_info() and get_pg_parameters()"
# How often to look while a deadline waits.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How an agent behaves; durations in seconds.

    ``ready_timeout_s``: for workers to call the runtime's API after their start, and to reach a
    world (0: they are not asked to). ``exit_barrier_timeout_s``: how long the others may take after
    the workers of this node have finished. ``max_soft_failures``: more of them within
    ``failure_window_s``, and since all workers were started, restart all of them again.
    ``can_warm_up``: start workers before there is a world (soft policies, with a lighthouse).
    ``reactions``: a table for ``policy`` (default: its own).
    """

    node: Node
    settings: RunSettings
    policy: RestartPolicy
    max_restarts: int = 0
    ready_timeout_s: float = 300.0
    exit_barrier_timeout_s: float = 300.0
    max_soft_failures: int = 3
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
        self.world: World | None = None  # the newest that it was told
        self.entered: World | None = None  # the one that its workers were told last
        self._status = AgentStatus.JOINING
        self._reached = False
        self._trained = 0, 0  # rounds of the first and the last world that all had reached
        self._store_port = 0
        self._told: AgentState | None = None
        self._orders: list[Order] = []
        self._plan: deque[Reaction] = deque()
        self._step: Reaction | None = None  # the one that takes a while
        self._has_workers = False
        self._is_paused = False
        self._expected: World | None = None
        self._num_welcomes = 0
        self._is_store_doubtful = False  # a world that it was not told may have used it
        self._is_outside = False  # the run goes on without it, as it was told last
        self._is_unheard = False  # the lighthouse has not said yet that it knows of a failure
        self._passed_round = 0  # the highest one that is not to be entered any more
        self._change = WorldChangeEvent.SCALE_UP
        self._is_short = False  # a worker has failed since all were ready
        self._unreplaced: set[int] = set()  # local ranks that failed, and were not started anew
        self._num_failures = 0
        # The last ones since all workers were started, so many as matter.
        self._soft_failures: deque[float] = deque(maxlen=config.max_soft_failures + 1)
        self._failure = ""
        self._end: End | None = None  # when the plan is over
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
            paused=self._waits_in_world(),
        )

    @property
    def num_restarts(self) -> int:
        return self.config.max_restarts - self.num_restarts_left

    def hello(self) -> AgentHello:
        """The first message of a stream. A world that goes on without it, or is over, is no news
        for another lighthouse (L13)."""
        world = None if self._is_outside else self.world
        return AgentHello(self.config.node, self.config.settings, self.state, world)

    def next_deadline(self) -> float | None:
        """When to `tick`, on the clock of ``now``; may be too early, never too late."""
        at = self._due_at()
        return None if at == math.inf or self._has_ended else self._clock.look_by(at)

    def _due_at(self) -> float:
        return min(self._ready_at, self._waits_until, self._barrier_at)

    # -- inputs ----------------------------------------------------------------------------------

    def started(self, now: float) -> Orders:
        """It begins, and waits for a world."""

        def take(at: float) -> None:
            self._orders.append(OpenStore())
            self._begin((Reaction.RENDEZVOUS, Reaction.START_WORKERS), at)

        return self._take(now, take)

    def news(self, news: WorldNews, now: float) -> Orders:
        """The lighthouse has told something."""
        return self._take(now, lambda at: self._hear(news, at))

    def store_opened(self, port: int, now: float) -> Orders:
        """A store listens that no world uses."""

        def take(at: float) -> None:
            self._store_port = port

        return self._take(now, take)

    def workers_ready(self, now: float) -> Orders:
        """Each of the workers that were started last has called the runtime's API."""

        def take(at: float) -> None:
            if self._step in (Reaction.START_WORKERS, Reaction.REPLACE_WORKERS):
                self._be_ready()
                self._advance(at)

        return self._take(now, take)

    def workers_reached(self, round_: int, now: float) -> Orders:
        """All workers have said that they are in the world with this round."""

        def take(at: float) -> None:
            is_told = self._is_in_world() and not self._is_paused
            if is_told and self.entered is not None and round_ == self.entered.round:
                self._reached, self._ready_at = round_ == self.state.round, math.inf

        return self._take(now, take)

    def workers_failed(self, reason: str, local_ranks: Iterable[int], now: float) -> Orders:
        """These workers have ended with an error, or could not be started."""
        return self._take(now, lambda at: self._fail(reason, local_ranks, at))

    def workers_cut_off(self, reason: str, now: float) -> Orders:
        """Some can neither be told of another world nor answer: they would miss the deadline of an
        answer that is awaited."""

        def take(at: float) -> None:
            if self._ready_at < math.inf or (self._is_paused and self.config.ready_timeout_s):
                self._miss(reason, at)

        return self._take(now, take)

    def workers_succeeded(self, now: float) -> Orders:
        """All workers have ended well."""
        return self._take(now, self._finish)

    def workers_stopped(self, now: float) -> Orders:
        """None runs any more, as was ordered."""

        def take(at: float) -> None:
            if self._step is Reaction.STOP_WORKERS:
                self._has_workers = False
                self._advance(at)

        return self._take(now, take)

    def stopped(self, reason: str, now: float) -> Orders:
        """The agent has to end, by a signal."""
        return self._take(now, lambda at: self._wind_up(End(Outcome.STOPPED, reason), at))

    def world_over(self, now: float) -> Orders:
        """The present world is to be followed by another one; for back ends that are polled."""

        def take(at: float) -> None:
            if self._is_in_world() and self._step is None:
                soft = self.config.policy.is_soft
                self._leave_world(AgentStatus.READY if soft else AgentStatus.JOINING)
                self._begin_event(RunEvent.SCALE_UP, at)

        return self._take(now, take)

    def tick(self, now: float) -> Orders:
        """Time has passed."""
        return self._take(now, self._look)

    # -- what happens ----------------------------------------------------------------------------

    def _take(self, now: float, input_: Callable[[float], None]) -> Orders:
        if self._due_at() == math.inf:
            self._clock.skip_to(now)  # nothing could be late
        at = self._clock.now(now)
        if not self._has_ended:
            input_(at)
        if not (self._has_ended or self._has_left) and self.state != self._told:
            self._told = self.state
            self._orders.append(Tell(self._told))
        orders, self._orders = tuple(self._orders), []
        return orders

    def _hear(self, news: WorldNews, now: float) -> None:
        if isinstance(news, AgentWelcome):
            self._num_welcomes += 1
            self._is_store_doubtful = self._num_welcomes > 1
        elif isinstance(news, World):
            self._hear_world(news, now)
        elif isinstance(news, WorldReached):
            entered = 0 if self.entered is None else self.entered.round
            if self._has_workers and news.round == entered and not self._is_short:
                self._trained = self._trained[0] or entered, entered
        elif isinstance(news, RunClosed):
            if self._status is AgentStatus.FINISHED:
                self._conclude(End(Outcome.SUCCEEDED, news.reason))
            else:
                outcome = Outcome.DRAINED if news.drained else Outcome.RUN_CLOSED
                self._wind_up(End(outcome, news.reason), now)
        elif isinstance(news, WorldPaused | RunWaiting | WarmUp):
            self._hear_of_waiting(news, now)

    def _hear_of_waiting(self, news: WorldPaused | RunWaiting | WarmUp, now: float) -> None:
        is_working = self._is_in_world() and self._step is None
        if not isinstance(news, WorldPaused):
            self._is_outside = True
        if isinstance(news, RunWaiting) and news.num_failures == self._num_failures:
            self._is_unheard = False
        if isinstance(news, RunWaiting) and (is_working or self._is_store_doubtful):
            self._is_store_doubtful = False
            if self._store_port:
                self._store_port = 0
                self._orders.append(OpenStore())
        if not isinstance(news, WarmUp):
            if is_working:
                self._begin_event(RunEvent.SCALE_DOWN, now)
        elif self._status is AgentStatus.JOINING and self._step is Reaction.RENDEZVOUS:
            self._expected = news.expected
            self._status = AgentStatus.WARMING
            self._begin((Reaction.START_WORKERS, Reaction.RENDEZVOUS, Reaction.RESUME), now)

    def _hear_world(self, world: World, now: float) -> None:
        known = 0 if self.world is None else self.world.round
        if world.round <= known or self.config.node.node_id not in world.node_ids:
            return
        self.world, self._reached, self._is_outside = world, False, False
        self._take_store(world)
        if self._end is not None or self._status is AgentStatus.FINISHED:
            return
        if self._status is AgentStatus.WARMING or self._is_unheard:
            self._passed_round = world.round  # it was made for the workers that have failed
        elif self._step is Reaction.RENDEZVOUS:
            self._advance(now)
        elif self._step is None:
            self._begin_event(self._event(world), now)
        else:
            self._status = AgentStatus.WORKING  # as soon as its workers have stopped

    def _take_store(self, world: World) -> None:
        first = world.nodes[0].node_id
        if first == self.config.node.node_id and world.master_port == self._store_port:
            self._store_port = 0
            self._orders.append(OpenStore())

    def _event(self, world: World) -> RunEvent:
        """With a lost node a scale down, however many join: nobody must wait for its workers."""
        before = self.entered
        if before is None:
            return RunEvent.SCALE_UP
        is_larger = world.world_size > before.world_size
        is_larger = is_larger and set(before.node_ids) <= set(world.node_ids)
        return RunEvent.SCALE_UP if is_larger else RunEvent.SCALE_DOWN

    def _be_ready(self) -> None:
        self._ready_at = math.inf
        self._is_short = False
        self._status = AgentStatus.READY

    def _fail(
        self, reason: str, local_ranks: Iterable[int], now: float, is_hopeless: bool = False
    ) -> None:
        is_over = self._end is not None or self._status is AgentStatus.FINISHED
        if is_over or not self._has_workers or self._step is Reaction.STOP_WORKERS:
            return
        self._failure = reason
        self._trained = 0, 0
        self._is_short = True
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
        self._begin_event(event, now)

    def _miss(self, reason: str, now: float) -> None:
        """Workers that do not answer are restarted as a whole."""
        self._fail(reason, range(self.config.node.num_workers), now, is_hopeless=True)

    def _finish(self, now: float) -> None:
        if self._end is not None:
            return
        self._plan.clear()
        self._step, self._has_workers = None, False
        self._status = AgentStatus.FINISHED
        self._ready_at = self._waits_until = math.inf
        self._barrier_at = now + self.config.exit_barrier_timeout_s

    def _wind_up(self, end: End, now: float) -> None:
        """End, without workers; the others need not wait until they have stopped."""
        if self._end is not None:
            return
        self._end = end
        if end.outcome not in (Outcome.RUN_CLOSED, Outcome.DRAINED):
            self._leave(AgentLeave(end.reason))
        if self._step is Reaction.STOP_WORKERS:
            self._plan.clear()
        else:
            self._begin((Reaction.STOP_WORKERS,), now)

    def _look(self, now: float) -> None:
        config = self.config
        if now >= self._ready_at:
            self._ready_at = math.inf
            timeout_s = config.ready_timeout_s
            self._miss(f"workers did not answer within {timeout_s:g} s: {_HOW_TO_ANSWER}", now)
        if now >= self._waits_until:
            self._waits_until = math.inf
            waited_s = config.settings.join_timeout_s + WAIT_SLACK_S
            reason = f"there was no world within {waited_s:g} s"
            self._wind_up(End(Outcome.RENDEZVOUS_FAILED, reason), now)
        if now >= self._barrier_at:
            timeout_s = config.exit_barrier_timeout_s
            reason = f"it finished {timeout_s:g} s ago, the others did not"
            self._leave(AgentLeave(reason, closes=True))
            self._conclude(End(Outcome.SUCCEEDED, reason))

    def _leave(self, leave: AgentLeave) -> None:
        self._has_left = True
        self._orders.append(TellLeave(leave))

    def _conclude(self, end: End) -> None:
        self._has_ended = True
        self._orders.append(end)

    # -- the steps -------------------------------------------------------------------------------

    def _is_in_world(self) -> bool:
        return self._status is AgentStatus.WORKING

    def _waits_in_world(self) -> bool:
        """For another one: the lighthouse has said that this one is broken."""
        is_waiting = self._step is not None and self._end is None
        return is_waiting and self._is_in_world() and not self._has_next()

    def _begin_event(self, event: RunEvent, now: float) -> None:
        reactions = self.config.reactions or REACTIONS[self.config.policy]
        self._begin(reactions[event], now, event)

    def _begin(
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
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Do what can be done until a step takes a while."""
        self._step = None
        self._waits_until = math.inf
        while self._plan and self._step is None and not self._has_ended:
            step = self._plan.popleft()
            if not self._do(step, now):
                self._step = step
        if self._step is None and self._end is not None and not self._has_ended:
            self._conclude(self._end)

    def _do(self, step: Reaction, now: float) -> bool:
        """Whether it is over at once."""
        if step is Reaction.PAUSE:
            self._pause()
        elif step is Reaction.USE_RESTART:
            self.num_restarts_left -= 1
        elif step is Reaction.LEAVE_WORLD:
            self._leave_world(AgentStatus.WARMING)
            self._is_unheard = self.config.can_warm_up and self.entered is not None
        elif step is Reaction.STOP_WORKERS:
            if self._has_workers:
                why = self._failure if self._is_short else "the world changes"
                why = self._end.reason if self._end else why
                self._orders.append(StopWorkers(why))
            return not self._has_workers
        elif step is Reaction.START_WORKERS:
            return self._start(now)
        elif step is Reaction.REPLACE_WORKERS:
            return self._replace(now)
        elif step is Reaction.RENDEZVOUS:
            return self._meet(now)
        elif step is Reaction.RESUME:
            self._resume(now)
        else:
            self._end = End(Outcome.WORKERS_FAILED, self._failure)
            closes = step is Reaction.CLOSE_RUN
            self._leave(AgentLeave(self._failure, failed=True, closes=closes))
        return True

    def _leave_world(self, status: AgentStatus) -> None:
        self._status = status
        self._passed_round = 0 if self.world is None else self.world.round

    def _pause(self) -> None:
        if self._has_workers and not self._is_paused and self.entered is not None:
            self._is_paused = True
            if self._has_next():
                assert self.world is not None
                self._change = self._change_to(self.world)
            self._orders.append(Broadcast(WorkerState.PAUSED, self.entered, self._change))

    def _change_to(self, world: World) -> WorldChangeEvent:
        is_up = self._event(world) is RunEvent.SCALE_UP
        return WorldChangeEvent.SCALE_UP if is_up else WorldChangeEvent.SCALE_DOWN

    def _has_next(self) -> bool:
        """Whether there is a world that its workers have not been told."""
        return self.world is not None and self.world.round > self._passed_round

    def _start(self, now: float) -> bool:
        self._has_workers, self._trained = True, (0, 0)
        self._soft_failures.clear()
        self._is_short = False
        self._unreplaced.clear()
        if self._status is AgentStatus.WARMING:
            expected = self._expected or self.entered or self.world
            assert expected is not None
            self._orders.append(StartWorkers(expected, True, self.num_restarts))
            self._is_paused = True
            return self._answer_until(now)
        assert self.world is not None
        self._orders.append(StartWorkers(self.world, False, self.num_restarts))
        self._enter(now)
        return True

    def _replace(self, now: float) -> bool:
        expected = self.entered or self._expected
        assert expected is not None
        dead = tuple(sorted(self._unreplaced))
        self._unreplaced.clear()
        self._orders.append(ReplaceWorkers(dead, expected, self.num_restarts))
        return self._answer_until(now)

    def _answer_until(self, now: float) -> bool:
        """Workers that were started have to call the API; whether they are not asked to."""
        if self.config.ready_timeout_s:
            self._ready_at = now + self.config.ready_timeout_s
            return False
        self._be_ready()
        return True

    def _meet(self, now: float) -> bool:
        """Whether the next world is there; else the wait begins."""
        if self._has_next():
            return True
        self._waits_until = now + self.config.settings.join_timeout_s + WAIT_SLACK_S
        return False

    def _resume(self, now: float) -> None:
        assert self.world is not None
        self._orders.append(Broadcast(WorkerState.HEALTHY, self.world, self._change_to(self.world)))
        self._enter(now)

    def _enter(self, now: float) -> None:
        """Its workers are told of the world."""
        assert self.world is not None
        self.entered, self._expected = self.world, None
        self._passed_round = self.world.round
        self._status, self._is_paused = AgentStatus.WORKING, False
        is_asked = self.config.policy.is_soft and self.config.ready_timeout_s > 0
        self._reached = not is_asked
        self._ready_at = now + self.config.ready_timeout_s if is_asked else math.inf
