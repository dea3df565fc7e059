"""Tests that a group or a stranger with a far higher step or quorum id does not take over a job."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.running import Line, Process, lighthouse_process, line_to
from support.training import Trainer, assert_identical, in_step, together, trainers

from .test_heal import Unreliable

pytestmark = pytest.mark.processes

FAR = 1000


@pytest.fixture
def house() -> Iterator[Process]:
    with lighthouse_process("--min-replicas=1", "--join-timeout-ms=20000") as house:
        yield house


def restored(house: Process, step: int, **options: Any) -> Trainer:
    """A group from a checkpoint of another run."""
    trainer = Trainer(house.address, "late", 7, **options)
    trainer.manager.load_state_dict({"step": step, "batches_committed": step})
    return trainer


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_joiner_from_a_newer_checkpoint_heals_from_the_running_job(
    house: Process, use_async_quorum: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with trainers(house.address, 2, use_async_quorum=use_async_quorum) as members:
        in_step(3, *members)
        late = restored(house, FAR, use_async_quorum=use_async_quorum)
        with late, caplog.at_level(logging.WARNING):
            before = [member.manager.current_step() for member in members]
            in_step(max(before) + 3, *members, late)
            assert max(before) < late.manager.current_step() < FAR
            assert_identical([*members, late])
        messages = [
            record.message for record in caplog.records if "is not believed" in record.message
        ]
        assert any(
            text.startswith(f"step {FAR} of this group is not believed") for text in messages
        )
        reports = [line for line in house.errors().splitlines() if "step not believed" in line]
        assert reports
        assert f"it reports step {FAR}, the job is at step" in reports[0]
        in_step(max(before) + 5, *members)  # and they go on when it has left


def test_a_joiner_that_is_not_believed_adds_nothing_to_the_first_step(house: Process) -> None:
    """A joiner heals to step 0, for which nobody waited: its forward pass had its own weights."""
    with trainers(house.address, 2) as members:

        def discards(trainer: Trainer) -> bool:
            trainer.manager.report_error(ValueError("the job is to stay at step 0"))
            return trainer.optimizer.step()

        def begin_step(trainer: Trainer, num_groups: int) -> None:
            """The first step of so many groups; those before it are discarded."""
            while True:
                trainer.backward()
                quorum = trainer.manager.last_quorum()
                assert quorum is not None
                if quorum.replica_world_size == num_groups:
                    return
                discards(trainer)

        together(*(lambda each=each: begin_step(each, 2) for each in members))  # a job now
        for member in members:
            assert not discards(member)
        with restored(house, FAR) as late:
            everybody = [*members, late]
            together(*(lambda each=each: begin_step(each, 3) for each in everybody))
            assert not any(together(*(each.optimizer.step for each in everybody)))
            in_step(3, *everybody)
            assert_identical(everybody)


def test_a_joiner_whose_heal_fails_takes_nothing_over_either() -> None:
    transport = Unreliable(num_failures=2)
    with (
        lighthouse_process("--min-replicas=1", "--join-timeout-ms=2000") as house,
        trainers(house.address, 1) as members,
        restored(house, FAR, checkpoint_transport=transport) as late,
    ):
        in_step(2, members[0])
        in_step(5, members[0], late)
        assert transport.num_failures == 0
        assert late.manager.current_step() < FAR
        assert_identical([*members, late])


def test_a_lighthouse_may_let_the_job_follow() -> None:
    with (
        lighthouse_process("--min-replicas=1", "--on-step-jump=follow") as house,
        trainers(house.address, 1) as members,
    ):
        in_step(2, *members)
        with restored(house, FAR) as late:
            in_step(FAR + 1, *members, late)
            assert_identical([*members, late])


def comes_and_goes(members: list[Trainer], line: Line, step: int, **claims: Any) -> None:
    """A stranger that reports ``step`` joins a quorum of ``members``, and leaves; they continue."""

    def stranger() -> bool:
        answer = line.quorum("stranger:1", step=step, **claims).result().quorum
        shown = {each.replica_id: (each.step, each.doubted_step) for each in answer.participants}
        assert shown["stranger:1"] == (0, step)
        line.leave("stranger:1")
        return True

    together(stranger, *(lambda each=each: each.meets(3) for each in members))
    last = max(member.manager.current_step() for member in members)
    in_step(last + 2, *members)
    assert max(member.manager.current_step() for member in members) < FAR
    assert_identical(members)


@pytest.mark.parametrize("step", [FAR, 2**62])
def test_a_forged_step_does_not_hold_the_job(house: Process, step: int) -> None:
    """The job goes on while the stranger is there, and when it has left."""
    with trainers(house.address, 2) as members, line_to(house.address) as line:
        in_step(3, *members)
        comes_and_goes(members, line, step)


def test_a_forged_history_does_not_hold_the_job(house: Process) -> None:
    """The stranger reports that it was in a newer quorum, with another lighthouse, and how far."""
    with trainers(house.address, 2) as members, line_to(house.address) as line:
        in_step(3, *members)
        known = members[0].manager.last_quorum()
        assert known is not None
        ahead = known.quorum_id + 3600 * 1000 * 4096
        claims = {"seen_quorum_id": ahead, "has_history": True, "last_num_groups": 3}
        comes_and_goes(members, line, 2**62, **claims)


def test_a_forged_id_moves_neither_other_jobs_nor_the_next_lighthouse(house: Process) -> None:
    """An id far ahead of the clock is refused; one of some hours moves its own job alone."""
    with line_to(house.address) as line:
        first = line.quorum("a:1", job="honest").result().quorum.quorum_id
        for seen_id in (first + 2**54, first + 40 * 3600 * 1000 * 4096):
            refused = line.quorum("stranger:1", job="honest", seen_quorum_id=seen_id)
            assert "was never issued" in str(refused.exception())
        ahead = first + 14 * 3600 * 1000 * 4096
        forged = line.quorum("stranger:1", job="forged", seen_quorum_id=ahead).result().quorum
        assert forged.quorum_id > ahead
        other = line.quorum("a:1", job="other").result().quorum.quorum_id
        assert other < ahead
        with lighthouse_process("--min-replicas=1") as after, line_to(after.address) as line_after:
            forged_id = forged.quorum_id
            answer = line_after.quorum(
                "stranger:1", job="forged", seen_quorum_id=forged_id
            ).result()
            assert answer.quorum.quorum_id > forged_id
            assert line_after.quorum("a:1", job="new").result().quorum.quorum_id < ahead
