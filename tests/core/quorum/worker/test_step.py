"""Tests the trainer's step machine: the table, the counters, and what is refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.worker.step import (
    FIRST_STEPS,
    MAX_FAILED_LOADS,
    MAX_MISFITS,
    MAX_REFUSALS,
    TRANSITIONS,
    Participation,
    PendingHeal,
    StepEvent,
    StepMachine,
    StepState,
    participation,
)
from torchft_svc.errors import (
    CommitFailed,
    ConfigError,
    OperationsDiffer,
    RequestRefused,
    TornState,
)

TWO = Participation(participating_rank=0, num_participants=2)
HEALING = Participation(participating_rank=None, num_participants=2)
TORN = TornState("a source", "it hung up")
OOPS = RuntimeError("oops")
MISFIT = OperationsDiffer("7 sums, not 8", is_misfit=True)
BESIDE_A_MISFIT = OperationsDiffer("8 sums, not 7")


def training(**rules: int) -> StepMachine:
    machine = StepMachine(**rules)
    machine.start()
    machine.form(TWO)
    return machine


def healing(to: int = 7) -> StepMachine:
    machine = StepMachine()
    machine.start()
    machine.form(HEALING, heal_to=to)
    return machine


def test_a_committed_step() -> None:
    machine = training()
    assert machine.state == StepState(phase=Phase.TRAINING, epoch=1, participation=TWO)
    assert machine.begin_vote()
    machine.decide(True)
    machine.end_update()
    assert machine.state == StepState(
        phase=Phase.IDLE,
        epoch=1,
        step=1,
        batches_committed=2,
        participation=TWO,
        settled=True,
        num_commits=1,
    )


def test_a_discarded_step_counts_as_a_failure_and_nothing_else() -> None:
    machine = training()
    machine.latch(OOPS)
    assert not machine.begin_vote()
    machine.decide(False)
    assert machine.state == StepState(
        phase=Phase.IDLE, epoch=1, failures=1, error=OOPS, participation=TWO
    )


def test_a_commit_clears_the_failures() -> None:
    machine = training()
    for committed in (False, False, True):
        machine.begin_vote()
        machine.decide(committed)
        if committed:
            machine.end_update()
        machine.start()
        machine.form(TWO)
    assert (machine.state.step, machine.state.failures) == (1, 0)


def half_loaded() -> StepMachine:
    """Return the machine of a worker with a checkpoint that has loaded a part of a copy."""
    machine = StepMachine()
    machine.restore(4, 8, 2)
    machine.spoil_by_copy(OOPS)
    return machine


def test_b5_another_copy_replaces_one_that_was_loaded_in_part() -> None:
    machine = half_loaded()
    assert machine.state.may_begin_from_copy
    assert machine.state.counters() == {"step": 0, "batches_committed": 0, "quorum_id": 0}
    with pytest.raises(RequestRefused, match="a copy was not loaded completely"):
        machine.check_whole()
    machine.begin_from_copy(8, 8, 3)
    machine.check_whole()
    machine.start()
    assert (machine.state.step, machine.state.unhealed) == (8, False)


def test_b5_a_heal_replaces_a_copy_that_was_loaded_in_part() -> None:
    machine = half_loaded()
    machine.start()
    assert machine.state.unhealed, "the lighthouse lets it heal from others of its step, too"
    machine.form(TWO, heal_to=9)
    machine.receive_state()
    machine.apply_heal(18, 5)
    machine.check_whole()
    assert (machine.state.step, machine.state.unhealed) == (9, False)


def test_b5_no_job_begins_with_a_copy_that_was_loaded_in_part() -> None:
    machine = half_loaded()
    machine.start()
    machine.form(TWO)
    assert not machine.begin_vote()
    machine.decide(False)
    with pytest.raises(RequestRefused, match="a copy was not loaded completely"):
        machine.start()


def test_b5_a_worker_looks_for_a_copy_until_it_has_a_state_and_only_between_steps() -> None:
    assert StepState(step=8).may_begin_from_copy, "the state of a checkpoint"
    assert StepState(epoch=3).may_begin_from_copy
    assert not StepState(epoch=3, step=1).may_begin_from_copy
    machine = StepMachine()
    machine.start()
    machine.fail_quorum(OOPS)
    assert not machine.state.may_begin_from_copy
    with pytest.raises(RequestRefused):
        machine.restore(8, 8)


def test_b3_the_state_of_each_so_many_committed_steps_is_copied() -> None:
    state = StepState(step=10, quorum_id=7)
    assert state.is_copied(5)
    assert not state.is_copied(3)
    assert not state.is_copied(0), "copies are off"
    assert not StepState(step=0, quorum_id=7).is_copied(5)
    for other in ({"unhealed": True}, {"spoiled": "an update failed"}, {"quorum_id": 0}):
        assert not state._replace(**other).is_copied(5), other


def test_the_first_error_counts() -> None:
    machine = training()
    machine.latch(OOPS)
    machine.latch(ValueError("a consequence"))
    assert machine.state.error is OOPS


def test_an_error_of_an_earlier_step_is_ignored() -> None:
    machine = training()
    old = machine.state.epoch
    machine.start()
    machine.form(TWO)
    assert not machine.latch(OOPS, epoch=old)
    assert machine.state.error is None


def test_too_few_groups_is_a_vote_against() -> None:
    machine = training(min_replica_size=3)
    assert not machine.begin_vote()


def test_a_failed_quorum_can_only_be_discarded() -> None:
    machine = StepMachine()
    machine.start()
    machine.fail_quorum(OOPS)
    assert machine.state.phase is Phase.TRAINING
    assert not machine.begin_vote()


def test_the_step_number_does_not_advance_before_the_healed_weights_are_applied() -> None:
    machine = healing(to=7)
    assert machine.state.step == 0
    machine.receive_state()
    assert machine.state.step == 0
    assert machine.state.pending_heal == PendingHeal(step=7, received=True)
    machine.apply_heal(batches_committed=14)
    assert (machine.state.step, machine.state.batches_committed) == (7, 14)
    assert machine.state.pending_heal is None


def test_no_stale_pending_state_after_a_failed_heal() -> None:
    machine = healing()
    machine.fail_heal(OOPS)
    assert machine.state.pending_heal is None
    assert not machine.begin_vote()
    machine.decide(False)
    machine.start()
    machine.form(TWO)
    assert machine.state.pending_heal is None
    with pytest.raises(RequestRefused, match="no healed state"):
        machine.apply_heal(1)


def test_a_heal_is_owed_until_it_is_applied_or_nobody_wants_it() -> None:
    machine = healing()
    machine.fail_heal(OOPS)
    machine.decide(machine.begin_vote())
    assert machine.state.unhealed, "it has to say so when it asks again"
    machine.start()
    assert machine.state.unhealed
    machine.form(TWO, heal_to=7)
    machine.receive_state()
    machine.apply_heal(batches_committed=14)
    assert not machine.state.unhealed
    machine = healing()
    machine.fail_heal(OOPS)
    machine.start()
    machine.form(TWO)
    assert not machine.state.unhealed


def test_a_heal_that_fails_while_it_is_applied_leaves_nothing() -> None:
    machine = healing()
    machine.receive_state()
    machine.fail_heal(OOPS)
    assert (machine.state.step, machine.state.pending_heal) == (0, None)


def test_a_received_state_is_applied_before_the_vote() -> None:
    machine = healing()
    machine.receive_state()
    before = machine.state
    with pytest.raises(RequestRefused, match="must be applied"):
        machine.begin_vote()
    assert machine.state == before


def test_a_heal_may_lead_back() -> None:
    """A heal leads back from a step that the others do not believe."""
    machine = StepMachine()
    machine.restore(9, 18)
    machine.start()
    machine.form(HEALING, heal_to=7)
    assert machine.state.step == 9, "until the healed state is in place"
    machine.receive_state()
    machine.apply_heal(14)
    assert (machine.state.step, machine.state.batches_committed) == (7, 14)


@pytest.mark.parametrize(("retries", "discards"), [(0, 1), (2, 3)])
def test_more_discards_than_max_retries_raise_with_the_reason(retries: int, discards: int) -> None:
    machine = StepMachine(max_retries=retries)
    for attempt in range(1, discards + 1):
        machine.start()
        machine.fail_quorum(OOPS)
        machine.begin_vote()
        if attempt < discards:
            machine.decide(False)
            continue
        with pytest.raises(CommitFailed, match=f"{discards} steps in a row.*oops"):
            machine.decide(False)
    assert machine.state.phase is Phase.IDLE
    assert machine.state.failures == discards


def test_the_reason_for_a_discard_without_an_error() -> None:
    machine = training(min_replica_size=3, max_retries=0)
    machine.begin_vote()
    with pytest.raises(CommitFailed, match="2 groups contributed, min_replica_size is 3"):
        machine.decide(False)


def test_a_group_is_settled_from_its_first_commit_on_until_it_is_behind() -> None:
    machine = applying()
    assert machine.state.settled
    machine.end_update()
    machine.start()
    machine.form(HEALING, heal_to=7)
    assert not machine.state.settled
    assert not healing().state.settled
    machine = applying()
    machine.lose_update()
    assert not machine.state.settled


def test_a_difference_of_operations_replaces_errors_that_follow_from_it() -> None:
    machine = training()
    machine.latch(OOPS)
    machine.latch(MISFIT)
    assert machine.state.error is MISFIT


def test_a_group_that_does_not_fit_ends_after_a_few_steps() -> None:
    machine = StepMachine()
    for misfits in range(1, MAX_MISFITS + 1):
        for error in (OOPS, BESIDE_A_MISFIT, MISFIT):
            assert machine.state.misfits == misfits - 1
            machine.start()
            machine.form(TWO)
            machine.latch(error)
            machine.begin_vote()
            if error is not MISFIT or misfits < MAX_MISFITS:
                machine.decide(False)
    with pytest.raises(RequestRefused, match=r"does not match.*3 steps in a row: 7 sums, not 8\."):
        machine.decide(False)
    assert machine.state.phase is Phase.IDLE
    with pytest.raises(RequestRefused, match="does not match"):
        machine.start()


def commit(machine: StepMachine, error: Exception | None = None) -> None:
    """A step, which ``error`` spoils."""
    machine.start()
    machine.form(TWO)
    if error is not None:
        machine.latch(error)
    committed = machine.begin_vote()
    machine.decide(committed)
    if committed:
        machine.end_update()


def test_a_group_that_does_not_fit_now_and_then_ends_in_its_first_steps() -> None:
    machine = StepMachine()
    for _ in range(MAX_MISFITS - 1):
        commit(machine, MISFIT)
        commit(machine)
    machine.record_misfit("other operations in step 7")  # noticed in the step after
    for begin in (machine.start, machine.start_in_term):
        with pytest.raises(RequestRefused, match=r"3 steps beside the 2 .*: other operations in"):
            begin()
    assert machine.state.phase is Phase.IDLE


def test_what_a_group_has_lost_in_its_first_steps_is_forgotten() -> None:
    machine = StepMachine()
    for num in range(FIRST_STEPS):
        assert machine.state.num_commits == num
        if num == 0:
            commit(machine, MISFIT)
        assert machine.state.misfits == 1
        commit(machine)
    assert machine.state.misfits == 0
    commit(machine, MISFIT)
    commit(machine)
    assert machine.state.misfits == 0


def test_a_program_that_uses_its_steps_wrongly_ends_after_some() -> None:
    machine = StepMachine()
    unread = RequestRefused("not all samples were read")
    for _ in range(2):
        for error in (*[unread] * (MAX_REFUSALS - 1), OOPS, BESIDE_A_MISFIT):
            commit(machine, error)
        assert machine.state.refusals == MAX_REFUSALS - 1
        commit(machine)
        assert machine.state.refusals == 0
    for _ in range(MAX_REFUSALS - 1):
        commit(machine, unread)
    with pytest.raises(RequestRefused, match=r"10 steps .* in vain.*: not all samples were read$"):
        commit(machine, unread)
    assert machine.state.phase is Phase.IDLE
    commit(machine)  # a program that was mended by hand goes on


def test_a_program_may_forbid_to_heal_for_as_long_as_it_likes() -> None:
    machine = StepMachine()
    for _ in range(2 * MAX_REFUSALS):
        machine.start()
        machine.form(HEALING, heal_to=7, may_heal=False)
        machine.begin_vote()
        machine.decide(False)
    assert machine.state.refusals == 0


def test_a_group_that_cannot_load_what_it_heals_to_ends_after_a_few_steps() -> None:
    machine = StepMachine()
    for failed in range(1, MAX_FAILED_LOADS + 1):
        for arrives in (False, True):  # one that does not arrive may do so from another group
            assert machine.state.failed_loads == failed - 1
            machine.start()
            machine.form(HEALING, heal_to=7)
            if arrives:
                machine.receive_state()
            machine.fail_heal(TORN)
            machine.begin_vote()
            if not arrives or failed < MAX_FAILED_LOADS:
                machine.decide(False)
    with pytest.raises(RequestRefused, match=r"3 times in a row: .*hung up.*Fix load_state_dict"):
        machine.decide(False)
    with pytest.raises(RequestRefused, match="Fix load_state_dict"):
        machine.start()


def test_a_heal_that_is_applied_clears_those_that_were_not() -> None:
    machine = healing()
    machine.receive_state()
    machine.fail_heal(TORN)
    machine.decide(machine.begin_vote())
    machine.start()
    machine.form(HEALING, heal_to=7)
    machine.receive_state()
    assert machine.state.failed_loads == 1
    machine.apply_heal(14)
    assert machine.state.failed_loads == 0


def in_phase(phase: Phase) -> StepMachine:
    machine = StepMachine()
    if phase is Phase.IDLE:
        return machine
    machine.start()
    if phase is Phase.HEALING:
        machine.form(HEALING, heal_to=7)
    elif phase is not Phase.QUORUM:
        machine.form(TWO)
    if phase in (Phase.VOTING, Phase.APPLYING):
        machine.begin_vote()
    if phase is Phase.APPLYING:
        machine.decide(True)
    return machine


ACTIONS = {
    StepEvent.STARTED: lambda machine: machine.start(),
    StepEvent.WENT_ON: lambda machine: machine.start_in_term(),
    StepEvent.QUORUM_FORMED: lambda machine: machine.form(TWO),
    StepEvent.HEAL_PLANNED: lambda machine: machine.form(TWO, heal_to=7),
    StepEvent.QUORUM_FAILED: lambda machine: machine.fail_quorum(OOPS),
    StepEvent.STATE_RECEIVED: lambda machine: machine.receive_state(),
    StepEvent.HEAL_APPLIED: lambda machine: machine.apply_heal(1),
    StepEvent.HEAL_FAILED: lambda machine: machine.fail_heal(OOPS),
    StepEvent.VOTE_BEGAN: lambda machine: machine.begin_vote(),
    StepEvent.COMMITTED: lambda machine: machine.decide(True),
    StepEvent.DISCARDED: lambda machine: machine.decide(False),
    StepEvent.UPDATE_APPLIED: lambda machine: machine.end_update(),
    StepEvent.UPDATE_LOST: lambda machine: machine.lose_update(),
    StepEvent.RESTORED: lambda machine: machine.restore(3, 6),
}
# Only after a state was received; the stories above cover it.
NEEDS_A_STORY = {StepEvent.HEAL_APPLIED}


@pytest.mark.parametrize(
    ("phase", "event"),
    [pair for pair in itertools.product(Phase, StepEvent) if pair[1] not in NEEDS_A_STORY],
    ids=lambda value: value.value,
)
def test_the_table(phase: Phase, event: StepEvent) -> None:
    machine = in_phase(phase)
    before = machine.state
    if (phase, event) in TRANSITIONS:
        ACTIONS[event](machine)
        assert machine.state.phase is TRANSITIONS[phase, event]
    else:
        with pytest.raises(RequestRefused):
            ACTIONS[event](machine)
        assert machine.state == before


@pytest.mark.parametrize(
    ("place", "heals_first", "num_wanted", "expected"),
    [
        # All are at max_step.
        ((1, 3, 1, 3), False, None, (1, 3)),
        # This group is behind: it contributes only if it is healed first.
        ((1, 3, None, 2), False, None, (None, 2)),
        ((1, 3, None, 2), True, None, (1, 3)),
        # Spares: as many as wanted contribute, the rest do not.
        ((1, 3, 1, 3), False, 2, (1, 2)),
        ((2, 3, 2, 3), False, 2, (None, 2)),
        ((2, 3, 1, 2), False, 2, (1, 2)),
        # Fewer than wanted: all contribute, and the vote decides.
        ((0, 1, 0, 1), False, 2, (0, 1)),
        ((2, 3, None, 2), True, 2, (None, 2)),
    ],
)
def test_participation(
    place: tuple[int, int, int | None, int],
    heals_first: bool,
    num_wanted: int | None,
    expected: tuple[int | None, int],
) -> None:
    fields = ("replica_rank", "replica_world_size", "max_replica_rank", "max_world_size")
    quorum = cast(Any, SimpleNamespace(**dict(zip(fields, place, strict=True))))
    rank, num = expected
    assert participation(quorum, heals_first=heals_first, num_wanted=num_wanted) == Participation(
        participating_rank=rank, num_participants=num
    )


@pytest.mark.parametrize("rules", [{"min_replica_size": 0}, {"max_retries": -1}])
def test_bad_rules_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(rules))):
        StepMachine(**rules)


@pytest.mark.parametrize("value", [-1, 2**63, True, "3", 1.0])
def test_bad_counters_are_refused(value: int) -> None:
    machine = StepMachine()
    with pytest.raises(ConfigError, match="step"):
        machine.restore(value, 0)
    assert machine.state == StepState()


def applying() -> StepMachine:
    machine = training()
    assert machine.begin_vote()
    machine.decide(True)
    return machine


def test_a_step_whose_update_is_lost_does_not_count() -> None:
    machine = applying()
    assert (machine.state.step, machine.state.batches_committed) == (1, 2)
    machine.lose_update()
    assert machine.state == StepState(phase=Phase.IDLE, epoch=1, participation=TWO)
    machine.start()


def test_an_interrupted_vote_is_none() -> None:
    machine = training()
    machine.begin_vote()
    machine.interrupt()
    assert machine.state == StepState(phase=Phase.IDLE, epoch=1, failures=1, participation=TWO)


def test_an_interrupt_between_decision_and_update_takes_the_step_back() -> None:
    machine = applying()
    machine.interrupt()
    assert machine.state == StepState(phase=Phase.IDLE, epoch=1, participation=TWO)


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.QUORUM, Phase.HEALING, Phase.TRAINING])
def test_an_interrupt_elsewhere_changes_nothing(phase: Phase) -> None:
    machine = in_phase(phase)
    before = machine.state
    machine.interrupt()
    assert machine.state == before


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "after its end"])
def test_spoiled_weights_are_no_step_s(is_late: bool) -> None:
    machine = applying()
    if is_late:
        machine.end_update()
    machine.lose_update("out of memory")
    assert machine.state.step == int(is_late)
    machine.start()
    assert machine.state.unhealed, "it asks for somebody to heal from"
    machine.form(TWO)  # nobody
    assert not machine.begin_vote()
    machine.decide(False)
    before = machine.state
    with pytest.raises(
        RequestRefused, match=r"step 1 was not applied completely \(out of memory\)"
    ):
        machine.start()
    assert machine.state == before
    machine.restore(1, 1)
    machine.start()


def test_spoiled_weights_are_healed() -> None:
    machine = applying()
    machine.lose_update("out of memory")
    machine.start()
    machine.form(HEALING, heal_to=1)
    machine.receive_state()
    machine.apply_heal(batches_committed=2)
    assert (machine.state.step, machine.state.spoiled, machine.state.unhealed) == (1, "", False)
    assert machine.begin_vote()


def test_a_heal_that_is_put_off_is_owed() -> None:
    machine = StepMachine()
    machine.start()
    machine.form(HEALING, heal_to=7, may_heal=False)
    assert machine.state.phase is Phase.TRAINING
    assert machine.state.unhealed
    assert "from step 0 to the state of step 7" in str(machine.state.error)
    assert not machine.begin_vote()


def test_weights_that_a_heal_has_torn_can_be_healed_again_and_nothing_else() -> None:
    machine = StepMachine()
    for _ in range(2):
        machine.start()
        machine.form(Participation(num_participants=1), heal_to=3)
        machine.receive_state()
        machine.fail_heal(TORN)
        assert not machine.begin_vote()
        machine.decide(False)
    machine.start()
    machine.form(Participation(participating_rank=0, num_participants=1))
    with pytest.raises(RequestRefused, match=r"not applied completely \(checkpoint from a source"):
        machine.check_whole()
    assert not machine.begin_vote()
    machine.decide(False)
    with pytest.raises(RequestRefused, match="belong to no step"):
        machine.start()
