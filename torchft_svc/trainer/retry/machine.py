"""Decides how a trainer continues when workers are lost: which are ended, started, and sent what.

    idle ── begin ──> waiting ── enough resources ──> forming ── all joined ──> training ── done ─┐
     ^                   ^ └ too few: again later         │                        │              │
     │                   └─────── all ended ─────────── ending <─── a worker is lost, or growth   │
     └─────────────────────── no retry is left ───────────┘ ─────────────────────────────> idle <─┘

Inputs are method calls with ``now``, the instant of a monotonic clock; each returns orders for the
shell, to be executed one after another. Workers are numbers, each used once.

    machine.begin_command(budget, now)              # ends with EndCommand
    machine.resources_found(num, now, jitter)       # answers LookForResources
    machine.joined(worker, world, step, now)        # and so on: messages of workers
    machine.tick(now)                               # at next_deadline()
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from torchft_svc.core.pausable_clock import PausableClock, usual_look_s
from torchft_svc.core.restart_progress import RestartProgress
from torchft_svc.errors import ConfigError
from torchft_svc.trainer.retry.budget import ProgramError, Retries, RetryBudget
from torchft_svc.trainer.retry.incident import (
    MAX_FORMINGS,
    IncidentCause,
    OpenIncident,
    Remedy,
    ReportBroken,
)
from torchft_svc.trainer.retry.initial_state import (
    DropHandle,
    FindCheckpoint,
    InitialState,
    KnownState,
    RejectState,
    StateSource,
)

# How many reasons are kept of one incident.
MAX_REASONS = 8
# The part of a pause by which the jitter shortens it at most.
JITTER = 0.5
# How many starts in a row may fail before there is a pause.
MAX_QUICK_STARTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """The settings of a trainer for lost and missing workers.

    Args:
        num_workers: how many are wanted.
        min_workers: how many are enough to train.
        num_spares: how many more stand by, to take the place of a lost one (``keeps_others``).
        ends_spares: they end with each command, since a program of its own waits inside of it.
        keeps_others: a lost worker is replaced while the others train (``per-step``); otherwise all
            workers are started anew (``restart``).
        heartbeat_timeout_s: how long a worker may be silent before it counts as lost.
        start_timeout_s: the longest that a worker may take to start, and then to join the others.
        offer_timeout_s: how long workers of a broken world may take to offer a state.
        settle_s: how long the others may take after the first offer.
        kill_timeout_s: how long the end of a killed worker is awaited.
        first_pause_s, max_pause_s: between two looks for resources; it doubles.
        resources_timeout_s: how long a wait for resources is until it costs a retry.
        grow_every_s: how often to look whether missing workers could be started.
        max_restarts_without_progress: so many restarts in a row that do not get beyond a step are
            the last ones (None: no limit).
    """

    num_workers: int
    min_workers: int = 1
    num_spares: int = 0
    ends_spares: bool = False
    keeps_others: bool = False
    heartbeat_timeout_s: float = 5.0
    start_timeout_s: float = 120.0
    offer_timeout_s: float = 20.0
    settle_s: float = 0.3
    kill_timeout_s: float = 15.0
    first_pause_s: float = 0.5
    max_pause_s: float = 60.0
    resources_timeout_s: float = 600.0
    grow_every_s: float = 5.0
    max_restarts_without_progress: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError("num_workers", self.num_workers, "use 1 or more")
        if not 1 <= self.min_workers <= self.num_workers:
            reason = f"use 1 to num_workers={self.num_workers}"
            raise ConfigError("min_workers", self.min_workers, reason)
        if self.num_spares < 0:
            raise ConfigError("spares", self.num_spares, "use 0 or more")
        if self.num_spares and not self.keeps_others:
            reason = "a spare takes a place among workers that go on: use 'per-step'"
            raise ConfigError(
                "fault_tolerance", "restart", f"with spares={self.num_spares} {reason}"
            )
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name.endswith("_s") and not (math.isfinite(value) and value > 0):
                raise ConfigError(name, value, "use a finite number of seconds above 0")


# -- phases ----------------------------------------------------------------------------------------


class RunPhase(Enum):
    """The phases of a trainer."""

    IDLE = "no command is executed; workers may live"
    WAITING = "resources are looked for"
    FORMING = "workers start and join"
    TRAINING = "the command is executed"
    ENDING = "all workers are ended"


class RunChange(Enum):
    """The events that change the phase."""

    BEGAN_NEW = "a command, and there are no workers"
    BEGAN_WHOLE = "a command for workers that are ready"
    BEGAN_BROKEN = "a command, and workers were lost meanwhile, or can be added"
    ENOUGH = "there are resources for enough workers"
    FORMED = "all workers have joined"
    BROKE = "a worker is lost, and the others cannot continue"
    GROWS = "resources for missing workers are there"
    ALL_ENDED = "all workers have ended"
    GAVE_UP = "the command cannot be executed"
    DONE = "the command was executed"


# The next phase, for each event that is possible in a phase.
RUN_TRANSITIONS: dict[tuple[RunPhase, RunChange], RunPhase] = {
    (RunPhase.IDLE, RunChange.BEGAN_NEW): RunPhase.WAITING,
    (RunPhase.IDLE, RunChange.BEGAN_WHOLE): RunPhase.TRAINING,
    (RunPhase.IDLE, RunChange.BEGAN_BROKEN): RunPhase.ENDING,
    (RunPhase.WAITING, RunChange.ENOUGH): RunPhase.FORMING,
    (RunPhase.WAITING, RunChange.GAVE_UP): RunPhase.IDLE,
    (RunPhase.FORMING, RunChange.FORMED): RunPhase.TRAINING,
    (RunPhase.FORMING, RunChange.BROKE): RunPhase.ENDING,
    (RunPhase.TRAINING, RunChange.BROKE): RunPhase.ENDING,
    (RunPhase.TRAINING, RunChange.GROWS): RunPhase.ENDING,
    (RunPhase.TRAINING, RunChange.DONE): RunPhase.IDLE,
    (RunPhase.ENDING, RunChange.ALL_ENDED): RunPhase.WAITING,
    (RunPhase.ENDING, RunChange.GAVE_UP): RunPhase.IDLE,
}


class WorkerStage(Enum):
    """The stages in the life of a worker."""

    STARTING = auto()
    STARTED = auto()
    JOINING = auto()
    JOINED = auto()  # it has the state of its world, or gets it in its first step
    FAILED = auto()  # its program raised an error; it may still offer a state
    LEAVING = auto()  # it was asked to end
    KILLED = auto()


_COUNT = (WorkerStage.STARTING, WorkerStage.STARTED, WorkerStage.JOINING, WorkerStage.JOINED)


@dataclass(slots=True)
class KnownWorker:
    """The trainer's record of a worker.

    Args:
        seen_at: when it sent its last message.
        from_step: the step of the others when it joined them.
        has_state: whether it has the state of the last step; if not, it heals in its first one.
        has_command, is_done: whether it was sent the present command, and has executed it.
        is_spare: it has no state before a place is free; ``stands_by``: it waits for one, inside of
            a command.
        behind_since: when another one had finished with a later step, which it cannot reach alone.
    """

    rank: int
    stage: WorkerStage
    seen_at: float
    stage_at: float
    step: int = 0
    from_step: int = 0
    has_state: bool = False
    has_command: bool = False
    is_done: bool = False
    has_offered: bool = False
    is_spare: bool = False
    stands_by: bool = False
    behind_since: float = math.inf

    @property
    def counts(self) -> bool:
        """Whether the worker trains, or is about to."""
        return self.stage in _COUNT

    def enter_stage(self, stage: WorkerStage, at: float) -> None:
        self.stage, self.stage_at = stage, at

    def silence(self, rules: RetryRules, at: float) -> str:
        """Describe why the worker is given up at `silent_at`."""
        if self.stage is WorkerStage.STARTING:
            return f"worker {self.rank} did not start in {rules.start_timeout_s:.3g} s"
        if at >= self.behind_since + rules.heartbeat_timeout_s:
            return f"worker {self.rank} is at step {self.step}, and others have finished later ones"
        if at < self.seen_at + rules.heartbeat_timeout_s:
            return f"worker {self.rank} did not join the others in {rules.start_timeout_s:.3g} s"
        return f"worker {self.rank} was silent for {rules.heartbeat_timeout_s:.3g} s"

    def silent_at(self, rules: RetryRules) -> float:
        """The instant at which the worker is given up, unless it sends something before."""
        if self.stage is WorkerStage.KILLED:
            return self.stage_at + rules.kill_timeout_s
        if self.stage is WorkerStage.STARTING:
            return self.stage_at + rules.start_timeout_s
        silent_at = min(self.seen_at, self.behind_since) + rules.heartbeat_timeout_s
        longest_s = rules.start_timeout_s if self.stage is WorkerStage.JOINING else math.inf
        return min(silent_at, self.stage_at + longest_s)


# -- orders ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookForResources:
    """Call `RetryMachine.resources_found` with how many more workers could be started now."""


@dataclass(frozen=True, slots=True)
class RequestWorkers:
    """Ask an autoscaler for resources for ``num`` more workers; 0: for no more."""

    num: int


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker with the number ``worker``, which no other one has had."""

    worker: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LetJoin:
    """Send a worker to ``world``; an empty ``address``: it opens the store.

    ``begin``: the state that it begins with; None: it heals from the others. ``is_spare``: it waits
    for a place among them.
    """

    worker: int
    world: int
    rank: int
    world_size: int
    address: str
    begin: KnownState | None
    is_spare: bool = False


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Send the present command to a worker."""

    worker: int


@dataclass(frozen=True, slots=True)
class LetAbandon:
    """Make a worker abandon its step, offer its state, and end."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class LetEnd:
    """Make a worker end in good order."""

    worker: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End a worker at once."""

    worker: int


@dataclass(frozen=True, slots=True)
class ReportFormed:
    """All ``num_workers`` have joined, and continue from ``state``; ``is_first``: nothing broke.

    ``why_not_peer``: why it is not that of a worker that was left (empty: it is, or none was).
    """

    state: KnownState
    step: int
    num_workers: int
    is_first: bool
    why_not_peer: str = ""


@dataclass(frozen=True, slots=True)
class ReportNoResources:
    """Resources suffice for ``num`` workers of ``needed``; the next look is in ``pause_s``."""

    num: int
    needed: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class ReportPlaceFilled:
    """A worker that stood by has taken a lost one's place, and has its ``rank`` now."""

    worker: int
    rank: int


@dataclass(frozen=True, slots=True)
class ReportSpareLost:
    """A worker that stood by has ended; the others do not notice."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReportLeftAlone:
    """A worker was killed, and its end is not awaited any longer."""

    worker: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCommand:
    """The command is over; ``reason`` is empty if it was executed.

    ``error``: of the program, if that is what ended it; ``is_repeated``: it came twice at one step.
    ``is_final``: restarts did not get beyond a step.
    """

    reason: str = ""
    error: ProgramError | None = None
    is_repeated: bool = False
    is_final: bool = False


RetryOrder = (
    LookForResources
    | RequestWorkers
    | FindCheckpoint
    | RejectState
    | StartWorker
    | LetJoin
    | SendCommand
    | LetAbandon
    | LetEnd
    | KillWorker
    | DropHandle
    | ReportBroken
    | ReportFormed
    | ReportNoResources
    | ReportLeftAlone
    | ReportPlaceFilled
    | ReportSpareLost
    | EndCommand
)

RetryOrders = tuple[RetryOrder, ...]


# -- the machine -----------------------------------------------------------------------------------


class RetryMachine:
    """The decisions of one trainer, for one command after another."""

    def __init__(self, rules: RetryRules, now: float) -> None:
        self.rules = rules
        self.phase = RunPhase.IDLE
        self._clock = PausableClock(usual_look_s(rules.heartbeat_timeout_s), now)
        self._at = now
        self._orders: list[RetryOrder] = []
        self._workers: dict[int, KnownWorker] = {}
        self._num_started = 0
        self._num_failed_starts = 0  # in a row
        self._look_at = math.inf  # for resources
        self._num_pauses = 0
        self.retries = Retries()
        self._progress = RestartProgress(rules.max_restarts_without_progress)
        self.best_step = 0  # that was completed
        self._world = 0
        self._num_places = 0  # of this world: how many have trained in it at once
        self._address = ""
        self._leader_only, self._trains = False, True
        self._wants_look = False  # an IDLE command waits for what resources there are
        self._broken: tuple[IncidentCause, str, int] | None = None  # while idle
        self._incident = OpenIncident()
        self._error: ProgramError | None = None  # of the open incident
        self._num_started_at_error = 0
        self._verdict: EndCommand | None = None
        self._initial = InitialState()
        self._why_not_peer: list[str] = []  # why states of workers that ended were not taken
        # Instants of what is to be done in the present phase.
        self._end_by = self._alone_at = self._grow_at = math.inf
        self._waits_since: float | None = None

    @property
    def held(self) -> KnownState:
        """The state to continue from if nobody offers one."""
        return self._initial.held

    def ranks(self) -> dict[int, int]:
        """The rank of each worker that has not ended, by its number."""
        return {number: each.rank for number, each in self._workers.items()}

    def num_ready(self) -> int:
        """The number of workers that have joined, without those that stand by."""
        joined = (each for each in self._workers.values() if each.stage is WorkerStage.JOINED)
        return sum(not each.is_spare for each in joined)

    def num_spares(self) -> int:
        """The number of workers that stand by, and could take a place now."""
        joined = (each for each in self._workers.values() if each.stage is WorkerStage.JOINED)
        return sum(each.is_spare and each.stands_by for each in joined)

    # -- inputs of the shell -----------------------------------------------------------------------

    def begin_command(
        self, budget: RetryBudget, now: float, *, leader_only: bool = False, trains: bool = True
    ) -> RetryOrders:
        """Begin a command, which all workers execute, or one of them (``leader_only``).

        ``trains``: workers that have no state yet get it with this command.
        """
        assert self.phase is RunPhase.IDLE
        self._clock.skip_to(now)
        at = self._advance_clock(now)
        self._leader_only, self._trains = leader_only, trains
        self.retries = Retries(budget, self.best_step)
        self._progress = RestartProgress(self.rules.max_restarts_without_progress)
        self._error = self._verdict = None
        self._why_not_peer = []
        for worker in self._workers.values():
            worker.seen_at = at
            worker.has_command = worker.is_done = False
            worker.behind_since = math.inf
        if self._broken is not None:
            cause, reason, rank = self._broken
            self._broken = None
            self._orders += self._incident.interrupt(Remedy.RESTART, cause, reason, rank)
            self._end_world(RunChange.BEGAN_BROKEN)
        elif not self._workers:
            self._change_phase(RunChange.BEGAN_NEW)
            self._orders.append(LookForResources())
        elif self._num_missing() and trains:
            self._wants_look = True
            self._orders.append(LookForResources())
        else:
            self._send_commands()
        return self._pop_orders()

    def resources_found(self, num_startable: int, now: float, jitter: float) -> RetryOrders:
        """Use resources for ``num_startable`` more workers; ``jitter`` is drawn from 0 to 1."""
        self._advance_clock(now)
        if self.phase is RunPhase.WAITING:
            self._form_or_wait(num_startable, jitter)
        elif self._wants_look and num_startable and not self.rules.keeps_others:
            self._wants_look = False
            self._grow(RunChange.BEGAN_BROKEN)
        elif self._wants_look:
            self._wants_look = False
            self._fill_ranks(num_startable, jitter)
            self._send_commands()
        elif self.phase in (RunPhase.TRAINING, RunPhase.FORMING):
            if self.rules.keeps_others:
                self._fill_ranks(num_startable, jitter)
            elif num_startable and self._num_missing():
                self._grow(RunChange.GROWS)
        return self._pop_orders()

    def checkpoint_found(self, state: KnownState | None, now: float) -> RetryOrders:
        """Use ``state``, the newest good checkpoint of this run; None: there is none."""
        self._advance_clock(now)
        if self._initial.refusal is None:
            self._orders += self._initial.checkpoint_found(state)
        else:
            self._fall_back(self._initial.refusal, state)
        return self._pop_orders()

    def replace_state(self, state: KnownState, now: float) -> RetryOrders:
        """End the workers, and begin the next world with ``state``, which may be an older one.

        Called while no command is executed.
        """
        assert self.phase is RunPhase.IDLE
        self._advance_clock(now)
        self._orders += self._initial.settle_on(state)
        self.best_step = state.step
        return self.dismiss(now)

    def hold_state(self, state: KnownState, now: float) -> RetryOrders:
        """Record a ``state`` of the shell, which is at least as new as the one before."""
        self._advance_clock(now)
        is_ending = self.phase is RunPhase.ENDING
        hold = self._initial.hold_reported if is_ending else self._initial.hold_newer
        self._orders += hold(state)
        return self._pop_orders()

    def interrupt(self, reason: str, now: float, *, waits: bool = True) -> RetryOrders:
        """End the command on request; a state that is offered is kept if it ``waits``."""
        self._advance_clock(now)
        self._verdict = EndCommand(reason=reason)
        if self.phase is RunPhase.WAITING:
            self._give_up()
        elif self.phase in (RunPhase.FORMING, RunPhase.TRAINING):
            self._end_world(RunChange.BROKE)
        if not waits and self.phase is RunPhase.ENDING:
            self._leave_alone(*self._workers)
            self._finish_ending()
        return self._pop_orders()

    def dismiss(self, now: float) -> RetryOrders:
        """End all workers in good order; called while no command is executed."""
        self._advance_clock(now)
        for number, worker in self._workers.items():
            if worker.counts:
                worker.stage = WorkerStage.LEAVING
                self._orders.append(LetEnd(number))
        self._workers.clear()
        self._broken = None
        return self._pop_orders()

    # -- messages of workers -----------------------------------------------------------------------

    def started(self, worker: int, now: float) -> RetryOrders:
        """The worker runs, and has created what it trains."""
        found = self._record_sign_of_life(worker, now)
        if found is not None and found.stage is WorkerStage.STARTING:
            found.enter_stage(WorkerStage.STARTED, self._at)
            if self.phase in (RunPhase.TRAINING, RunPhase.IDLE):
                self._join_worker(worker, found, None)
            elif self.phase is RunPhase.FORMING:
                self._join_started()
        return self._pop_orders()

    def store_opened(self, worker: int, world: int, address: str, now: float) -> RetryOrders:
        """The worker hosts the store of ``world``."""
        found = self._record_sign_of_life(worker, now)
        if found is not None and world == self._world and self.phase is RunPhase.FORMING:
            self._address = address
            self._join_started()
        return self._pop_orders()

    def joined(self, worker: int, world: int, step: int, now: float) -> RetryOrders:
        """The worker is in ``world``, with the state of ``step``."""
        found = self._record_sign_of_life(worker, now)
        if found is None or found.stage is not WorkerStage.JOINING or world != self._world:
            return self._pop_orders()
        found.enter_stage(WorkerStage.JOINED, self._at)
        found.step = step
        if self.phase is RunPhase.TRAINING:
            if self._trains:
                self._send_command(worker, found)
        elif self.phase is RunPhase.FORMING:
            found.has_state = True
            if all(each.stage is WorkerStage.JOINED for each in self._alive().values()):
                self._finish_forming(step)
        return self._pop_orders()

    def progressed(self, worker: int, step: int, now: float) -> RetryOrders:
        """The worker lives, and has completed ``step`` steps."""
        found = self._record_sign_of_life(worker, now)
        if found is not None and found.stage in (WorkerStage.JOINED, WorkerStage.FAILED):
            self._record_step(worker, found, step)
        return self._pop_orders()

    def reported(self, worker: int, step: int, now: float) -> RetryOrders:
        """The worker's program has reported something: a good moment to grow."""
        found = self._record_sign_of_life(worker, now)
        if found is not None and found.stage is WorkerStage.JOINED:
            self._record_step(worker, found, step)
            may_grow = not self.rules.keeps_others and self.phase is RunPhase.TRAINING
            if may_grow and self._num_missing() and self._at >= self._grow_at:
                self._grow_at = self._at + self.rules.grow_every_s
                self._orders.append(LookForResources())
        return self._pop_orders()

    def offered(self, worker: int, state: KnownState, now: float) -> RetryOrders:
        """The worker offers its state, and ends."""
        found = self._record_sign_of_life(worker, now)
        if found is not None and state.place < self.held.place:
            self._record_why_not_peer(
                f"worker {found.rank} offered that of step {state.step}, and that of step "
                f"{self.held.step} is here"
            )
        if state.step < self.held.step or (found is None and self.phase is not RunPhase.ENDING):
            self._orders.append(DropHandle(state.handle))
        else:
            self._orders += self._initial.hold_offered(state)
            self.best_step = max(self.best_step, state.step)
            self.retries.record_step(self.best_step)
        if found is not None:
            found.has_offered = True
            if self.phase is RunPhase.ENDING:
                self._end_by = min(self._end_by, self._at + self.rules.settle_s)
        return self._pop_orders()

    def finished(self, worker: int, step: int, now: float) -> RetryOrders:
        """The worker has executed the command."""
        found = self._record_sign_of_life(worker, now)
        if found is not None and found.stage is WorkerStage.JOINED and found.has_command:
            self._record_step(worker, found, step)
            found.is_done = True
            self._record_state(worker, found)
            if self.phase is RunPhase.TRAINING:
                self._finish_if_done()
        return self._pop_orders()

    def failed(self, worker: int, error: ProgramError, now: float) -> RetryOrders:
        """The worker's program raised ``error``."""
        found = self._record_sign_of_life(worker, now)
        if found is None or not found.counts:
            return self._pop_orders()
        found.enter_stage(WorkerStage.FAILED, self._at)
        cause = IncidentCause.COLLECTIVE if error.is_peers else IncidentCause.PROGRAM
        reason = f"{error.kind}: {error.message}" if error.message else error.kind
        is_forming = self.phase is RunPhase.FORMING
        is_running = is_forming or self.phase is RunPhase.TRAINING
        if is_running and self._initial.refuses(error, 0 if is_forming else self.best_step):
            self._orders += self._initial.refuse(error)
            return self._pop_orders()
        if not error.is_peers:
            self._error = error
        if error.is_final and is_running:
            self._verdict = EndCommand(reason=reason, error=error)
            self._orders += self._incident.interrupt(Remedy.RESTART, cause, reason, found.rank)
            self._end_world(RunChange.BROKE)
        if self.phase is RunPhase.TRAINING and self._can_continue() and not error.is_peers:
            self._judge_error(worker, found, error, reason)
        if self._verdict is None:
            self._lose_worker(found, cause, reason)
        if self.phase in (RunPhase.FORMING, RunPhase.TRAINING):  # the others have the state
            self._kill(worker, found)
        return self._pop_orders()

    def lost(self, worker: int, reason: str, now: float) -> RetryOrders:
        """The worker has ended."""
        self._advance_clock(now)
        found = self._workers.pop(worker, None)
        if found is None:
            return ()
        is_without_offer = found.stage is WorkerStage.LEAVING and not found.has_offered
        if is_without_offer:
            self._record_why_not_peer(f"worker {found.rank} ended before it offered one ({reason})")
        if found.counts:
            self._lose_worker(found, IncidentCause.LOST, f"worker {found.rank}: {reason}")
        elif is_without_offer and self._incident.is_loss:
            self._orders += self._incident.merge(
                IncidentCause.LOST, f"worker {found.rank}: {reason}", found.rank
            )
        if self.phase is RunPhase.ENDING and not self._workers:
            self._finish_ending()
        elif self.rules.keeps_others and self.phase in (RunPhase.FORMING, RunPhase.TRAINING):
            self._replace_missing()
        return self._pop_orders()

    def tick(self, now: float) -> RetryOrders:
        """Apply the time that has passed; call it at `next_deadline`, or more often."""
        at = self._advance_clock(now)
        if self.phase is RunPhase.ENDING:
            self._tick_ending(at)
        elif self.phase is not RunPhase.IDLE:
            for number, worker in list(self._workers.items()):
                if at >= worker.silent_at(self.rules):
                    self._give_up_on(number, worker)
            if at >= self._look_at:
                self._look_at = math.inf
                self._orders.append(LookForResources())
        return self._pop_orders()

    def next_deadline(self) -> float | None:
        """The instant of the next `tick`; may be too early, never too late."""
        if self.phase is RunPhase.IDLE:
            return None
        instants = [self._look_at]
        is_ending = self.phase is RunPhase.ENDING
        if is_ending:
            instants += [self._end_by, self._alone_at]
        for worker in self._workers.values():
            if not is_ending or worker.stage is WorkerStage.LEAVING:
                instants.append(worker.silent_at(self.rules))
        return self._clock.look_by(min(instants))

    # -- a world ---------------------------------------------------------------------------------

    def _form_or_wait(self, num: int, jitter: float) -> None:
        num = min(num, self.rules.num_workers)
        if num >= self.rules.min_workers:
            self._waits_since, self._num_pauses, self._look_at = None, 0, math.inf
            self._orders.append(RequestWorkers(self.rules.num_workers - num))
            self._change_phase(RunChange.ENOUGH)
            self._start_world(num)
            return
        if self._waits_since is None:
            self._waits_since = self._at
        if self._at >= self._waits_since + self.rules.resources_timeout_s:
            self._waits_since = self._at
            reason = f"no resources for {self.rules.min_workers} workers"
            self._orders += self._incident.interrupt(
                Remedy.RESTART, IncidentCause.NO_RESOURCES, reason, None
            )
            if not self._spend_retry(None):
                self._give_up()
                return
        pause_s = self._schedule_look(jitter)
        self._orders += [
            RequestWorkers(self.rules.num_workers),
            ReportNoResources(num, self.rules.min_workers, pause_s),
        ]

    def _start_world(self, num: int) -> None:
        self._world += 1
        self._address = ""
        self._grow_at = self._at + self.rules.grow_every_s
        self._orders += self._initial.begin_world()
        for rank in range(num):
            self._start_worker(rank)

    def _join_started(self) -> None:
        """Send those workers to the world that can join it now."""
        alive = self._alive()
        if self.rules.keeps_others:  # the first quorum has all of them
            if any(each.stage is WorkerStage.STARTING for each in alive.values()):
                return
            for number, worker in alive.items():
                if worker.stage is WorkerStage.STARTED:
                    self._join_worker(number, worker, self._initial.of_world)
            return
        for number, worker in alive.items():
            if worker.stage is WorkerStage.STARTED and (worker.rank == 0 or self._address):
                self._join_worker(number, worker, self._initial.of_world)

    def _join_worker(self, number: int, worker: KnownWorker, begin: KnownState | None) -> None:
        worker.enter_stage(WorkerStage.JOINING, self._at)
        size = self.rules.num_workers if self.rules.keeps_others else len(self._alive())
        self._orders.append(
            LetJoin(
                worker=number,
                world=self._world,
                rank=worker.rank,
                world_size=size,
                address="" if worker.rank == 0 else self._address,
                begin=begin,
                is_spare=worker.is_spare,
            )
        )

    def _finish_forming(self, step: int) -> None:
        self._change_phase(RunChange.FORMED)
        self._num_failed_starts = 0
        self.best_step = step
        self.retries.begin_at(step)
        begin = self._initial.of_world
        is_first = self._incident.cause is None
        why_not_peer = "" if begin.source is StateSource.PEER else "; ".join(self._why_not_peer)
        self._orders.append(ReportFormed(begin, step, len(self._alive()), is_first, why_not_peer))
        self._why_not_peer = []
        self._incident.close()
        for worker in self._alive().values():
            worker.from_step = step
        self._num_places = self._num_with_state()
        if self.rules.keeps_others:
            self._replace_missing()
        self._send_commands()

    def _send_commands(self) -> None:
        """Send the command to the workers that are ready."""
        if self.phase is RunPhase.IDLE:
            self._change_phase(RunChange.BEGAN_WHOLE)
        ready = [(each.rank, n) for n, each in self._alive().items() if self._is_ready(each)]
        for _, number in sorted(ready)[: 1 if self._leader_only else None]:
            self._send_command(number, self._workers[number])

    def _is_ready(self, worker: KnownWorker) -> bool:
        return worker.stage is WorkerStage.JOINED and (worker.has_state or self._trains)

    def _send_command(self, number: int, worker: KnownWorker) -> None:
        if not worker.has_state:
            worker.from_step = self.best_step
        worker.has_command, worker.is_done, worker.stands_by = True, False, worker.is_spare
        self._orders.append(SendCommand(number))

    def _finish_if_done(self) -> None:
        alive = self._alive()
        asked = {n: each for n, each in alive.items() if each.has_command and not each.is_spare}
        if not any(each.is_done for each in asked.values()):
            if not asked:  # the only one that was asked is lost
                self._send_commands()
            return
        late = {n: each for n, each in asked.items() if not (each.is_done or each.has_state)}
        if any(not each.is_done for n, each in asked.items() if n not in late):
            self._record_behind(asked.values())
            return
        if self.rules.ends_spares:
            late |= {n: each for n, each in alive.items() if each.is_spare}
        for number, worker in late.items():  # nobody is left whose state it could get
            self._kill(number, worker)
        self._look_at = math.inf
        self._change_phase(RunChange.DONE)
        self._orders.append(EndCommand())

    def _end_world(self, change: RunChange, *, offers: bool = True) -> None:
        """End all workers; those with a state offer it before, unless nobody ``offers``."""
        if self.phase is not RunPhase.FORMING:  # else nobody has trained since a state was offered
            self._initial.is_settled = False
        self._change_phase(change)
        reason = self._incident.reason or "the command was interrupted"
        self._look_at = math.inf
        self._end_by = self._at + self.rules.offer_timeout_s
        self._alone_at = math.inf
        for number, worker in list(self._workers.items()):
            if worker.stage is WorkerStage.KILLED:
                continue
            if worker.has_state and offers and worker.stage is not WorkerStage.LEAVING:
                worker.enter_stage(WorkerStage.LEAVING, self._at)
                self._orders.append(LetAbandon(number, reason))
            else:
                self._kill(number, worker)
        if not self._workers:
            self._finish_ending()

    def _fall_back(self, error: ProgramError, checkpoint: KnownState | None) -> None:
        """Begin with another state than this world's, which nobody can load, or give up."""
        self._end_world(RunChange.BROKE, offers=False)
        orders = self._initial.fall_back(checkpoint)
        if orders is None:
            self._verdict = EndCommand(reason=error.message, error=error)
        else:
            self._orders += orders

    def _tick_ending(self, at: float) -> None:
        for number, worker in self._workers.items():
            end_by = min(self._end_by, worker.silent_at(self.rules))
            if worker.stage is WorkerStage.LEAVING and at >= end_by:
                if not worker.has_offered:
                    waited_s = at - worker.stage_at
                    self._record_why_not_peer(
                        f"worker {worker.rank} offered none in {waited_s:.3g} s"
                    )
                self._kill(number, worker)
        is_killed = all(each.stage is WorkerStage.KILLED for each in self._workers.values())
        if is_killed and self._alone_at == math.inf:
            self._end_by, self._alone_at = math.inf, at + self.rules.kill_timeout_s
        if at >= self._alone_at:
            self._leave_alone(*self._workers)
            self._finish_ending()

    def _record_why_not_peer(self, reason: str) -> None:
        """Record why the next world does not begin with the state of a worker that lived."""
        if self.phase is RunPhase.ENDING and not self._initial.is_settled:
            self._why_not_peer = [*self._why_not_peer, reason][-MAX_REASONS:]

    def _finish_ending(self) -> None:
        """Continue, or give up, when no worker is left."""
        self._end_by = self._alone_at = math.inf
        if self._verdict is None and self._incident.cause is not None:
            if self._incident.cause is IncidentCause.GROWTH and not self._initial.is_settled:
                self._orders += self._incident.merge(
                    IncidentCause.LOST, "all workers ended without a state", None
                )
            error = self._error if self._incident.cause is IncidentCause.PROGRAM else None
            if error is not None and self.retries.record_error(error):
                reason = self._incident.reason
                self._verdict = EndCommand(reason=reason, error=error, is_repeated=True)
            elif not self._incident.is_spent and self._incident.cause is not IncidentCause.GROWTH:
                self._spend_retry(error)
        self._error = None
        if self._verdict is not None:
            self._give_up()
            return
        self._change_phase(RunChange.ALL_ENDED)
        self._look_for_workers()

    def _give_up(self) -> None:
        assert self._verdict is not None
        for number, worker in self._workers.items():
            self._kill(number, worker)
        self._incident.close()
        self._look_at = math.inf
        self._change_phase(RunChange.GAVE_UP)
        self._orders.append(self._verdict)

    # -- incidents -------------------------------------------------------------------------------

    def _lose_worker(self, worker: KnownWorker, cause: IncidentCause, reason: str) -> None:
        """Decide what becomes of the others when ``worker`` trains no more."""
        if self.phase is RunPhase.ENDING:
            self._orders += self._incident.merge(cause, reason, worker.rank)
        elif self.phase is RunPhase.IDLE:
            is_worse = self._broken is None or cause.weight > self._broken[0].weight
            if is_worse and not self._can_continue():
                self._broken = cause, reason, worker.rank
        elif self.phase is RunPhase.FORMING:
            self._lose_forming(worker, cause, reason)
        elif not self._can_continue():
            self._orders += self._incident.interrupt(Remedy.RESTART, cause, reason, worker.rank)
            self._end_world(RunChange.BROKE)
        elif worker.is_spare and worker.stands_by:  # nobody waits for it
            self._orders.append(ReportSpareLost(worker.rank, reason))
        else:
            self._num_failed_starts += not worker.has_state
            self._report(Remedy.REPLACE, cause, reason, worker.rank)
            self._finish_if_done()

    def _lose_forming(self, worker: KnownWorker, cause: IncidentCause, reason: str) -> None:
        alive = self._alive()
        self._num_failed_starts += 1
        is_hopeless = not alive or self._num_failed_starts > MAX_FORMINGS
        if not self.rules.keeps_others or is_hopeless or cause is IncidentCause.PROGRAM:
            self._orders += self._incident.interrupt(Remedy.RESTART, cause, reason, worker.rank)
            self._end_world(RunChange.BROKE)
        elif all(each.stage is WorkerStage.JOINED for each in alive.values()):
            self._finish_forming(max(each.step for each in alive.values()))
        else:
            self._join_started()

    def _judge_error(
        self, number: int, worker: KnownWorker, error: ProgramError, reason: str
    ) -> None:
        """Spend a retry for a program that failed in one worker while the others train."""
        self._error = None
        if self.retries.is_known(error) and number < self._num_started_at_error:
            return  # what it met were the same data, or the same moment
        self._num_started_at_error = self._num_started
        if self.retries.record_error(error):
            self._verdict = EndCommand(reason=reason, error=error, is_repeated=True)
        elif self._spend_retry(error, reason):
            return
        self._orders += self._incident.interrupt(
            Remedy.RESTART, IncidentCause.PROGRAM, reason, worker.rank
        )
        self._end_world(RunChange.BROKE)

    def _spend_retry(self, error: ProgramError | None, reason: str = "") -> bool:
        """Spend a retry; return whether one was left, and restarts get somewhere."""
        reason = reason or self._incident.reason
        is_restart = self._incident.cause is not IncidentCause.NO_RESOURCES
        if is_restart and (why := self._progress.record_failure(self.best_step)):
            self._verdict = EndCommand(reason=f"{why}: {reason}", is_final=True)
            return False
        if not self.retries.spend(self.best_step):
            self._verdict = EndCommand(reason=reason, error=error)
            return False
        self._incident.is_spent = True
        return True

    # -- single workers --------------------------------------------------------------------------

    def _record_state(self, number: int, worker: KnownWorker) -> None:
        """Record that a worker has the state of the others, as it trains with them."""
        worker.has_state = True
        if worker.is_spare:
            taken = {each.rank for each in self._workers.values()}
            worker.is_spare = False
            worker.rank = min(set(range(len(taken) + 1)) - taken)
            self._orders.append(ReportPlaceFilled(number, worker.rank))
        self._num_places = max(self._num_places, self._num_with_state())

    def _record_step(self, number: int, worker: KnownWorker, step: int) -> None:
        worker.step = max(worker.step, step)
        if self.rules.keeps_others and step > worker.from_step and not worker.has_state:
            self._num_failed_starts = 0
            self._record_state(number, worker)
        self.best_step = max(self.best_step, step)
        self.retries.record_step(self.best_step)
        if worker.step == self.best_step:
            worker.behind_since = math.inf

    def _give_up_on(self, number: int, worker: KnownWorker) -> None:
        """End a worker that is silent, or did not start or join in time."""
        if worker.stage is WorkerStage.KILLED:
            self._leave_alone(number)
            if self.rules.keeps_others:
                self._replace_missing()
            return
        did_count, reason = worker.counts, worker.silence(self.rules, self._at)
        self._kill(number, worker)
        if did_count:
            self._lose_worker(worker, IncidentCause.SILENT, reason)

    def _grow(self, change: RunChange) -> None:
        reason = f"{self._num_missing()} more workers were asked for"
        self._orders += self._incident.interrupt(Remedy.GROW, IncidentCause.GROWTH, reason, None)
        self._end_world(change)

    # -- members and resources ---------------------------------------------------------------------

    def _start_worker(self, rank: int, *, is_spare: bool = False) -> None:
        number = self._num_started
        self._num_started += 1
        self._workers[number] = KnownWorker(
            rank, WorkerStage.STARTING, self._at, self._at, is_spare=is_spare
        )
        self._orders.append(StartWorker(number, rank))

    def _schedule_look(self, jitter: float) -> float:
        """Look for resources again after a pause, which becomes longer."""
        longest_s = self.rules.first_pause_s * 2.0 ** min(self._num_pauses, 32)
        pause_s = min(longest_s, self.rules.max_pause_s) * (1 - JITTER * jitter)
        self._num_pauses += 1
        self._look_at = self._at + pause_s
        return pause_s

    def _look_for_workers(self) -> None:
        """Look for resources at once; after starts that failed in a row, with a pause."""
        if self._num_failed_starts > MAX_QUICK_STARTS:
            self._num_pauses = self._num_failed_starts - MAX_QUICK_STARTS - 1
            self._schedule_look(0.0)
        else:
            self._orders.append(LookForResources())

    def _kill(self, number: int, worker: KnownWorker) -> None:
        if worker.stage is not WorkerStage.KILLED:
            worker.enter_stage(WorkerStage.KILLED, self._at)
            self._orders.append(KillWorker(number))

    def _leave_alone(self, *numbers: int) -> None:
        """Stop waiting for the ends of killed workers."""
        for number in numbers:
            worker = self._workers.pop(number)
            self._orders.append(ReportLeftAlone(number, worker.rank))

    def _alive(self) -> dict[int, KnownWorker]:
        return {number: each for number, each in self._workers.items() if each.counts}

    def _num_with_state(self) -> int:
        """The number of workers that have the state of the last step."""
        return sum(each.has_state for each in self._alive().values())

    def _record_behind(self, asked: Collection[KnownWorker]) -> None:
        """Record which workers cannot reach the step of those that have finished.

        Those ask for no more quorums.
        """
        last = max(each.step for each in asked if each.is_done)
        for each in asked:
            if self.rules.keeps_others and not each.is_done and each.step < last:
                each.behind_since = min(each.behind_since, self._at)

    def _num_missing(self) -> int:
        return self.rules.num_workers + self.rules.num_spares - len(self._workers)

    def _record_sign_of_life(self, worker: int, now: float) -> KnownWorker | None:
        at = self._advance_clock(now)
        found = self._workers.get(worker)
        if found is None or found.stage is WorkerStage.KILLED:
            return None
        found.seen_at = at
        return found

    def _advance_clock(self, now: float) -> float:
        self._at = self._clock.now(now)
        return self._at

    def _pop_orders(self) -> RetryOrders:
        orders, self._orders = tuple(self._orders), []
        return orders

    def _fill_ranks(self, num: int, jitter: float) -> None:
        """Start up to ``num`` missing workers beside those that train.

        With spares, all are spares that replace lost workers: they take free places, and stand by
        if there are none. Only a place that nobody has had yet is for an ordinary worker.
        """
        free = self._free_ranks()
        for rank in free[:num]:
            self._start_worker(rank, is_spare=rank >= self.rules.num_workers)
        left = len(free) - min(num, len(free))
        if left:
            self._schedule_look(jitter)
            self._orders.append(RequestWorkers(left))
        elif free:
            self._num_pauses = self._num_failed_starts
            self._orders.append(RequestWorkers(0))

    def _free_ranks(self) -> list[int]:
        """The ranks of the workers to start: those above `num_workers` are of spares."""
        rules, workers = self.rules, self._workers.values()
        taken = {each.rank for each in workers}
        ordinary = [rank for rank in range(rules.num_workers) if rank not in taken]
        if not rules.num_spares:
            return ordinary
        num_begun = sum(not (each.is_spare or each.has_state) for each in workers)
        num_new = max(0, rules.num_workers - self._num_places - num_begun)
        above = range(rules.num_workers, rules.num_workers + len(taken) + self._num_missing())
        spare = [rank for rank in above if rank not in taken]
        return [*ordinary[:num_new], *spare][: self._num_missing()]

    def _replace_missing(self) -> None:
        """Request replacements; with a pause if earlier ones failed to start."""
        if not self._num_missing():
            return
        if self._num_failed_starts:
            self._num_pauses = max(self._num_pauses, self._num_failed_starts - 1)
            self._schedule_look(0.0)
        else:
            self._orders.append(LookForResources())

    def _can_continue(self) -> bool:
        """Whether enough workers have a state, and can train without the others."""
        return self.rules.keeps_others and self._num_with_state() >= self.rules.min_workers

    def _report(
        self,
        remedy: Remedy,
        cause: IncidentCause,
        reason: str,
        rank: int | None,
        *,
        explains: bool = False,
    ) -> None:
        self._orders.append(
            ReportBroken(remedy=remedy, cause=cause, reason=reason, rank=rank, explains=explains)
        )

    def _change_phase(self, change: RunChange) -> None:
        self.phase = RUN_TRANSITIONS[self.phase, change]
