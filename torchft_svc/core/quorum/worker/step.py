"""Decides what a trainer's step may do next: its phases, its counters, its pending heal (rule T3).

    idle ── start ──> quorum ── formed ──> training ── vote ──> voting ── discarded ──> idle
     │                  │                   ^  │                  └─ committed ─> applying ─> idle
     │                  └─ heal planned ─> healing └─ start (the step was given up) ─> quorum
     └─ start in the term (its quorum is still in force) ─> training

A step number advances in two places only: by one with a commit, and to the healed step at the
moment the healed weights are in place. It goes back in one: by one, if the update of that commit
was lost. Everything else, errors included, leaves it as it is.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torchft_svc.core.limits import MAX_INT64
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.errors import (
    CommitFailed,
    ConfigError,
    GroupDiffers,
    OperationsDiffer,
    RequestRefused,
    TornState,
)

# How many steps in a row a group may lose by what does not pass by itself: operations that are not
# those of the others, a healed state that cannot be loaded. The others may lose each of them, too.
MAX_MISFITS = 3
MAX_FAILED_LOADS = 3
# A group with fewer commits is new: what it loses in these steps is counted together.
FIRST_STEPS = 100
# How many steps in a row may be discarded because this worker's program does not use them as it has
# to, such as a vote before all samples were read. The next steps of the loop would be, too.
MAX_REFUSALS = 10
# How many times in a row its state may differ from the others', although it heals in between.
MAX_DIVERGENCES = 3


class StepEvent(enum.Enum):
    """The events of a step."""

    STARTED = "started"
    WENT_ON = "went on"
    QUORUM_FORMED = "quorum formed"
    HEAL_PLANNED = "heal planned"
    QUORUM_FAILED = "quorum failed"
    STATE_RECEIVED = "state received"
    HEAL_APPLIED = "heal applied"
    HEAL_FAILED = "heal failed"
    VOTE_BEGAN = "vote began"
    COMMITTED = "committed"
    DISCARDED = "discarded"
    UPDATE_APPLIED = "update applied"
    UPDATE_LOST = "update lost"
    RESTORED = "restored"

    __hash__ = object.__hash__  # as `Phase`: a step needs many


# What may happen when, and where it leads; what is not here is refused and changes nothing.
TRANSITIONS: dict[tuple[Phase, StepEvent], Phase] = {
    (Phase.IDLE, StepEvent.STARTED): Phase.QUORUM,
    (Phase.IDLE, StepEvent.WENT_ON): Phase.TRAINING,
    (Phase.IDLE, StepEvent.RESTORED): Phase.IDLE,
    (Phase.APPLYING, StepEvent.RESTORED): Phase.IDLE,
    (Phase.QUORUM, StepEvent.QUORUM_FORMED): Phase.TRAINING,
    (Phase.QUORUM, StepEvent.HEAL_PLANNED): Phase.HEALING,
    (Phase.QUORUM, StepEvent.QUORUM_FAILED): Phase.TRAINING,
    (Phase.HEALING, StepEvent.STATE_RECEIVED): Phase.TRAINING,
    (Phase.HEALING, StepEvent.HEAL_FAILED): Phase.TRAINING,
    (Phase.TRAINING, StepEvent.HEAL_APPLIED): Phase.TRAINING,
    (Phase.TRAINING, StepEvent.HEAL_FAILED): Phase.TRAINING,
    (Phase.TRAINING, StepEvent.STARTED): Phase.QUORUM,
    (Phase.TRAINING, StepEvent.VOTE_BEGAN): Phase.VOTING,
    (Phase.VOTING, StepEvent.COMMITTED): Phase.APPLYING,
    (Phase.VOTING, StepEvent.DISCARDED): Phase.IDLE,
    (Phase.APPLYING, StepEvent.UPDATE_APPLIED): Phase.IDLE,
    (Phase.APPLYING, StepEvent.UPDATE_LOST): Phase.IDLE,
    (Phase.IDLE, StepEvent.UPDATE_LOST): Phase.IDLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation:
    """The groups that contribute gradients in this step.

    ``participating_rank`` is None for a group that does not.
    """

    participating_rank: int | None = None
    num_participants: int = 0


def participation(
    quorum: QuorumResult, *, heals_first: bool, num_wanted: int | None = None
) -> Participation:
    """Return which groups contribute in a quorum.

    ``heals_first``: groups that are behind heal before the step, so all contribute; otherwise only
    those at ``max_step``. ``num_wanted``: how many may contribute at most, the rest are spares.
    """
    rank, num = quorum.max_replica_rank, quorum.max_world_size
    if heals_first:
        rank, num = quorum.replica_rank, quorum.replica_world_size
    if num_wanted is not None and num > num_wanted:
        num = num_wanted
        rank = rank if rank is not None and rank < num else None
    return Participation(participating_rank=rank, num_participants=num)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingHeal:
    """The state of ``step`` is on its way (``received`` False) or waits to be applied."""

    step: int
    received: bool = False


class StepState(NamedTuple):
    """The state of a worker's step; a named tuple, because a step makes seven of them, and a frozen
    dataclass takes three times as long.

    ``epoch`` counts the steps started, committed or not: what belongs to an earlier one is stale.
    ``failures``: steps discarded since the last commit. ``unhealed``: this worker has to heal,
    because the last quorum wanted it or an update spoiled the weights, and no healed state is in
    place; its step need not show that. ``spoiled``: why the weights belong to no step; only a
    worker that is to heal may continue with them. ``quorum_id``: in which ``step`` was committed
    (0: not known); two groups at one step that was committed in one quorum have one state.
    ``settled``: it has committed a step since it came, or was last behind, so that it does in a
    step what the others do. ``num_commits``: steps that this worker has committed since it came.
    ``misfits``: steps that were lost because it did not do what the others did, in its
    `FIRST_STEPS`, and later since the last commit; ``misfit``: the last reason. ``failed_loads``:
    healed states in a row that arrived and could not be loaded. ``divergences``: checks in a
    row that found this worker's state to differ, with a heal between them. ``refusals``: steps
    since the last commit that were discarded for what the program of this worker did.
    """

    phase: Phase = Phase.IDLE
    epoch: int = 0
    step: int = 0
    batches_committed: int = 0
    quorum_id: int = 0
    failures: int = 0
    error: Exception | None = None
    participation: Participation = Participation()
    pending_heal: PendingHeal | None = None
    spoiled: str = ""
    unhealed: bool = False
    settled: bool = False
    num_commits: int = 0
    misfits: int = 0
    misfit: str = ""
    failed_loads: int = 0
    divergences: int = 0
    refusals: int = 0

    def counters(self) -> dict[str, int]:
        """Return what travels with the weights, to a group that heals and into a checkpoint."""
        return {
            "step": self.step,
            "batches_committed": self.batches_committed,
            "quorum_id": self.quorum_id,
        }

    @property
    def may_begin_from_copy(self) -> bool:
        """Whether this worker has no state yet, or only that of a checkpoint (rule B5).

        In a step that follows one without a vote it has to look later, when its quorum has formed.
        """
        is_between_steps = (self.phase, StepEvent.RESTORED) in TRANSITIONS
        return (self.epoch == 0 or self.step == 0) and is_between_steps

    def is_copied(self, every: int) -> bool:
        """Whether this is the state of an ``every``-th committed step, which holders get (rule B3).

        A worker that has to heal, or whose step is of no known quorum, has nothing to copy.
        """
        is_due = every > 0 and self.step > 0 and self.step % every == 0
        return is_due and self.quorum_id > 0 and not (self.unhealed or self.spoiled)


class StepMachine:
    """A worker's step: read `state`, call a method when its event happened.

    ``max_retries``: how many steps may be discarded in a row (None: any number).

    A method whose transition the table does not have raises `RequestRefused` and changes nothing.
    """

    def __init__(self, *, min_replica_size: int = 1, max_retries: int | None = None) -> None:
        if min_replica_size < 1:
            raise ConfigError("min_replica_size", min_replica_size, "use 1 or more groups")
        if max_retries is not None and max_retries < 0:
            raise ConfigError("max_retries", max_retries, "use 0 or more, or None for no limit")
        self._min_replica_size = min_replica_size
        self._max_retries = max_retries
        self.state = StepState()

    def start(self) -> int:
        """Begin a step that asks for a quorum; returns the new epoch.

        The rest of an earlier step is forgotten.
        """
        self.check_healable()
        self._check_hope()
        return self._move(
            StepEvent.STARTED,
            epoch=self.state.epoch + 1,
            error=None,
            pending_heal=None,
            participation=Participation(),
        ).epoch

    def start_in_term(self) -> int:
        """Begin a step in the quorum of the one before, without a question; returns the new epoch.

        The group participates as before.

        Raises:
            RequestRefused: as `start`; nothing has changed.
        """
        self._check_hope()
        return self._move(
            StepEvent.WENT_ON, epoch=self.state.epoch + 1, error=None, pending_heal=None
        ).epoch

    def check_whole(self) -> None:
        """Raise `RequestRefused` if the weights belong to no step."""
        if self.state.spoiled:
            raise RequestRefused(
                f"{self.state.spoiled}, so these weights belong to no step: restart this "
                "worker, which then heals, or load a periodic checkpoint"
            )

    def check_healable(self) -> None:
        """Raise `RequestRefused` if the weights belong to no step, and no quorum may heal them."""
        if not self.state.unhealed:
            self.check_whole()

    def form(
        self, participation: Participation, heal_to: int | None = None, *, may_heal: bool = True
    ) -> None:
        """Begin the training: the quorum is there.

        ``heal_to``: the step whose state this worker has to fetch. It may be a lower step, if the
        others did not believe a step that is far ahead. If the worker may not heal, it still has
        to, and the step cannot be committed.
        """
        if heal_to is not None and not may_heal:
            self._move(
                StepEvent.QUORUM_FORMED, participation=participation, unhealed=True, settled=False
            )
            self.latch(
                RequestRefused(
                    f"this worker has to heal from step {self.state.step} to the state of step "
                    f"{heal_to} before it can commit, and start_quorum(allow_heal=False) forbids it"
                )
            )
            return
        if heal_to is None:
            self._move(StepEvent.QUORUM_FORMED, participation=participation, unhealed=False)
            try:
                self.check_whole()
            except RequestRefused as error:
                self.latch(error)
            return
        heal = PendingHeal(step=heal_to)
        self._move(
            StepEvent.HEAL_PLANNED,
            participation=participation,
            pending_heal=heal,
            unhealed=True,
            settled=False,
        )

    def fail_quorum(self, error: Exception) -> None:
        """Record that there is no quorum in this step, which can only be discarded."""
        self._move(StepEvent.QUORUM_FAILED, error=self.state.error or error)

    def receive_state(self) -> None:
        """Record that the healed state has arrived; it counts when it is applied."""
        heal = self.state.pending_heal
        self._move(StepEvent.STATE_RECEIVED, pending_heal=heal and replace(heal, received=True))

    def apply_heal(self, batches_committed: int, quorum_id: int = 0) -> None:
        """Record that the healed weights are in place: this worker is at their step."""
        heal = self.state.pending_heal
        if heal is None or not heal.received:
            raise RequestRefused("there is no healed state to apply")
        self._move(
            StepEvent.HEAL_APPLIED,
            step=heal.step,
            batches_committed=_counter("batches_committed", batches_committed),
            quorum_id=_counter("quorum_id", quorum_id),
            pending_heal=None,
            unhealed=False,
            spoiled="",
            failed_loads=0,
        )

    def fail_heal(self, error: Exception) -> None:
        """Record that the state could not be fetched or applied.

        Nothing of it remains, except after a `TornState`.
        """
        spoiled, heal = self.state.spoiled, self.state.pending_heal
        if isinstance(error, TornState):
            spoiled = f"a heal was not applied completely ({error})"
        self._move(
            StepEvent.HEAL_FAILED,
            error=self.state.error or error,
            pending_heal=None,
            spoiled=spoiled,
            failed_loads=self.state.failed_loads + (heal is not None and heal.received),
        )

    def latch(self, error: Exception, epoch: int | None = None) -> bool:
        """Record the first error of the step; an error of an earlier ``epoch`` is ignored.

        `OperationsDiffer` explains other errors, so it replaces them.
        """
        if epoch is not None and epoch != self.state.epoch:
            return False
        if self.state.error is None or isinstance(error, OperationsDiffer):
            self.state = self.state._replace(error=error)
        return True

    def begin_vote(self) -> bool:
        """Begin the vote, and return it: yes if there is no error, and enough groups contribute."""
        if self.state.pending_heal is not None:
            raise RequestRefused("the healed state must be applied before the vote")
        state = self._move(StepEvent.VOTE_BEGAN)
        enough = state.participation.num_participants >= self._min_replica_size
        return state.error is None and enough

    def decide(self, committed: bool, quorum_id: int = 0) -> None:
        """Record the group's decision: the step is committed in ``quorum_id``, or discarded.

        After a commit the update is under way, until `end_update` or `lose_update`.

        Raises:
            CommitFailed: more than ``max_retries`` steps in a row were discarded.
            RequestRefused: this worker would lose all further steps, too, and may begin none; or
                its program does not use the steps as it has to, see `MAX_REFUSALS`.
        """
        state = self.state
        if committed:
            self._move(
                StepEvent.COMMITTED,
                step=state.step + 1,
                batches_committed=state.batches_committed + state.participation.num_participants,
                quorum_id=quorum_id,
                failures=0,
                refusals=0,
                settled=True,
                num_commits=state.num_commits + 1,
                misfits=state.misfits if state.num_commits + 1 < FIRST_STEPS else 0,
            )
            return
        failures = self._move(StepEvent.DISCARDED, failures=state.failures + 1).failures
        if isinstance(state.error, OperationsDiffer) and state.error.is_misfit:
            self.record_misfit(str(state.error))
        self._check_hope()
        if _is_refused(state):
            self._count_refusal()
        if self._max_retries is not None and failures > self._max_retries:
            raise CommitFailed(
                f"{failures} steps in a row were discarded, max_retries is {self._max_retries}; "
                f"the last reason: {self._why_discarded()}"
            )

    def record_misfit(self, reason: str) -> None:
        """Record that this group has cost the others a step: it did not do what they did."""
        self.state = self.state._replace(misfits=self.state.misfits + 1, misfit=reason)

    def _count_refusal(self) -> None:
        """Count a step that was discarded for what the program did; raise an error after many."""
        refusals = self.state.refusals + 1
        self.state = self.state._replace(refusals=refusals)
        if refusals >= MAX_REFUSALS:
            error = RequestRefused(
                f"{refusals} steps were discarded in vain, as the next ones would be, because of "
                f"what the program of this group does: {self._why_discarded()}"
            )
            error.is_final = True
            raise error

    def _check_hope(self) -> None:
        """Raise `RequestRefused` if this worker would only delay the others."""
        state = self.state
        if state.misfits >= MAX_MISFITS:
            in_a_row = state.failures >= state.misfits
            when = (
                "in a row" if in_a_row else f"beside the {state.num_commits} that it has committed"
            )
            raise RequestRefused(
                f"this group does not match the others, which has cost all groups "
                f"{state.misfits} steps {when}: {state.misfit}. If steps take turns, "
                "such as a discriminator's and a generator's, choose the turn by "
                "manager.current_step() with use_async_quorum=False, or make both updates in one "
                "step with Optimizer(manager, [first, second]). Then restart this group"
            )
        if state.failed_loads >= MAX_FAILED_LOADS:
            raise GroupDiffers(
                f"the state of the other groups could not be loaded {state.failed_loads} "
                f"times in a row: {self._why_discarded()}. Fix load_state_dict, then restart this "
                "group"
            )
        if state.divergences >= MAX_DIVERGENCES:
            raise GroupDiffers(
                f"{state.divergences} checks in a row found that this group's state is not that of "
                f"the others, although it healed in between: {self._why_discarded()}. What differs "
                "is not in the state that load_state_dict loads, or the program changes it in this "
                "group only. Fix that, then restart this group"
            )

    def end_update(self) -> None:
        """Record that the update of the last commit is in the weights."""
        self._move(StepEvent.UPDATE_APPLIED)

    def lose_update(self, spoiled_by: str = "") -> None:
        """Record that the update of the last commit is not in the weights.

        So the step does not count here.

        The others have it: this worker is behind them and heals. ``spoiled_by``: a part of the
        update may be in the weights, which then belong to no step. After `end_update` the step's
        number stays, but the worker has to heal.
        """
        state = self.state
        changes: dict[str, object] = {"settled": False}
        if state.phase is Phase.APPLYING:
            num = state.participation.num_participants
            batches = state.batches_committed - num
            changes.update(step=state.step - 1, batches_committed=batches, quorum_id=0)
            changes["num_commits"] = state.num_commits - 1
        if spoiled_by:
            spoiled = f"the update to step {state.step} was not applied completely ({spoiled_by})"
            changes.update(spoiled=spoiled, unhealed=True)
        self._move(StepEvent.UPDATE_LOST, **changes)

    def lose_state(self, reason: str) -> None:
        """Record that these weights are not those of the others: this worker heals.

        A check has found that, and the step was discarded. ``reason``: a sentence for people.

        Raises:
            RequestRefused: healing has not helped, see `MAX_DIVERGENCES`.
        """
        divergences = self.state.divergences + 1
        self._move(
            StepEvent.UPDATE_LOST,
            spoiled=f"this group's state is not that of the others: {reason}",
            unhealed=True,
            settled=False,
            divergences=divergences,
        )
        self._check_hope()

    def confirm_state(self) -> None:
        """Record that a check found this worker's state to be that of the others."""
        self.state = self.state._replace(divergences=0)

    def interrupt(self) -> None:
        """Record that an exception has ended the call that voted: no update will be applied."""
        if self.state.phase is Phase.VOTING:
            self._move(StepEvent.DISCARDED, failures=self.state.failures + 1)
        elif self.state.phase is Phase.APPLYING:
            self.lose_update()

    def restore(self, step: int, batches_committed: int, quorum_id: int = 0) -> None:
        """Continue from a periodic checkpoint; only between two steps."""
        self._move(
            StepEvent.RESTORED,
            spoiled="",
            step=_counter("step", step),
            batches_committed=_counter("batches_committed", batches_committed),
            quorum_id=_counter("quorum_id", quorum_id),
        )

    def begin_from_copy(self, step: int, batches_committed: int, quorum_id: int) -> None:
        """Continue from a copy, which is whole whatever was in the weights; only between steps."""
        self.restore(step, batches_committed, quorum_id)
        self.state = self.state._replace(unhealed=False)

    def spoil_by_copy(self, error: BaseException) -> None:
        """Record that a copy may be loaded in part, so the weights belong to no step.

        Another copy or a heal mends that; no job begins with such weights (rule B5).
        """
        self._move(
            StepEvent.UPDATE_LOST,
            spoiled=f"a copy was not loaded completely ({error!r})",
            unhealed=True,
            step=0,
            batches_committed=0,
            quorum_id=0,
        )

    def _why_discarded(self) -> str:
        if self.state.error is not None:
            return str(self.state.error) or repr(self.state.error)
        num = self.state.participation.num_participants
        if num < self._min_replica_size:
            return f"{num} groups contributed, min_replica_size is {self._min_replica_size}"
        return "another worker of the group voted against it"

    def _move(self, event: StepEvent, **changes: Any) -> StepState:
        """Apply the table's transition together with ``changes``, or refuse."""
        phase = TRANSITIONS.get((self.state.phase, event))
        if phase is None:
            raise RequestRefused(
                f"{event.value!r} cannot happen in phase {self.state.phase.value!r} of a step"
            )
        self.state = self.state._replace(phase=phase, **changes)
        return self.state


def _is_refused(state: StepState) -> bool:
    """Whether the step has failed for what the program of this worker did.

    Groups at different operations are counted apart, and a program that forbids its worker to heal
    may allow it later.
    """
    is_of_program = isinstance(state.error, ConfigError | RequestRefused)
    return is_of_program and not isinstance(state.error, OperationsDiffer) and not state.unhealed


def _counter(field: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INT64:
        raise ConfigError(field, value, "a counter is a whole number, 0 or more")
    return value
