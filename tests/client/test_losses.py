"""Tests what the news of a lost group mean for quorums before and after it."""

from __future__ import annotations

import dataclasses

import pytest
from support.training import lighthouse, together, trainers

from torchft_svc.client.process_groups import ProcessGroupDummy, ProcessGroupGloo
from torchft_svc.client.step.membership import QuorumMembership
from torchft_svc.coordination import QuorumResult
from torchft_svc.errors import QuorumFailed

QUORUM = QuorumResult(
    quorum_id=7,
    replica_rank=0,
    replica_world_size=2,
    recover_src_manager_address="",
    recover_src_replica_rank=None,
    recover_dst_replica_ranks=[],
    recover_extra_src_manager_addresses=[],
    recover_extra_dst_replica_ranks=[],
    store_address="",
    max_step=1,
    max_replica_rank=0,
    max_world_size=2,
    heal=False,
    commit_failures=0,
    replica_ids=["a:1", "b:1"],
    store_prefix="",
)


def test_a_loss_that_is_heard_before_its_quorum_counts() -> None:
    membership = QuorumMembership(ProcessGroupDummy())
    membership.lose("b:1", "killed", 7)
    with pytest.raises(QuorumFailed, match="b:1 is out: killed"):
        membership.check_losses(QUORUM)


def test_a_group_that_was_lost_may_come_back_into_a_later_quorum() -> None:
    membership = QuorumMembership(ProcessGroupDummy())
    membership.lose("b:1", "no sign of life", 7)
    membership.check_losses(dataclasses.replace(QUORUM, quorum_id=8))


def test_who_was_lost_before_the_question_may_be_in_the_answer_whatever_its_id() -> None:
    """A lighthouse that was restarted with its clock set back gives out lower ids."""
    membership = QuorumMembership(ProcessGroupDummy())
    membership.lose("b:1", "no sign of life", 70)
    membership.ask()
    membership.check_losses(QUORUM)


def test_why_there_is_no_quorum_is_said_once_until_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    membership = QuorumMembership(ProcessGroupDummy(), clock=lambda: now[0])

    def hears(reason: str, *, at: float) -> list[str]:
        now[0] = at
        caplog.clear()
        membership.receive_no_quorum(reason)
        return caplog.messages

    assert hears("late news", at=100) == [], "nobody has asked"
    membership.ask()
    assert hears("b is slow", at=104.9) == [], "as in many a step"
    assert hears("b is slow", at=105) == ["no quorum for 5 s: b is slow"]
    assert hears("b is slow", at=134.9) == []
    assert hears("b is slow", at=135) == ["no quorum for 35 s: b is slow"]
    assert hears("c is slow", at=139.9) == [], "it may change all the time"
    membership.ask()  # the last question got an error
    assert hears("", at=140) == ["no quorum for 40 s: the lighthouse gave no reason"]
    membership.answer(QUORUM)
    assert hears("", at=300) == []
    membership.ask()
    assert hears("", at=305) == ["no quorum for 5 s: the lighthouse gave no reason"]
    membership.answer(QUORUM)
    membership.ask()
    assert hears("", at=311) == [], "each step takes so long"


def test_a_strangers_loss_does_not_matter() -> None:
    membership = QuorumMembership(ProcessGroupDummy())
    membership.lose("c:1", "killed", 7)
    membership.check_losses(QUORUM)


def test_a_group_whose_line_to_its_manager_ends_is_out_but_for_one_that_is_alone() -> None:
    alone = dataclasses.replace(QUORUM, replica_world_size=1, replica_ids=["a:1"])
    for quorum, is_left in [(QUORUM, True), (alone, False)]:
        pg = ProcessGroupGloo()
        membership = QuorumMembership(pg)
        membership.leave()
        membership.quorum = quorum
        membership.leave()
        assert (pg._loss is not None) == is_left


def test_a_group_hears_that_it_was_left_out_itself() -> None:
    membership = QuorumMembership(ProcessGroupDummy())
    membership.lose("a:1", "it hangs: training in step 1 for 9.0 s", 7)
    with pytest.raises(QuorumFailed, match="a:1 is out: it hangs"):
        membership.check_losses(QUORUM)
    membership.check_losses(dataclasses.replace(QUORUM, quorum_id=8))


def test_a_group_whose_session_broke_is_met_again() -> None:
    """Same incarnation: it was only cut off, so the news of its loss is about an earlier quorum."""
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as (a, b):
        assert together(a.step, b.step) == [True, True]
        membership = a.manager._runtime.membership
        assert membership.quorum is not None
        quorum = membership.quorum
        others = [
            name for rank, name in enumerate(quorum.replica_ids) if rank != quorum.replica_rank
        ]
        membership.lose(others[0], "its session ended", quorum.quorum_id)

        def fails() -> bool:
            a.backward()
            a.manager.report_error(RuntimeError("so the next quorum has another id"))
            return a.optimizer.step()

        together(fails, b.step)
        outcomes = [together(a.step, b.step) for _ in range(3)]
        assert outcomes[-1] == [True, True], outcomes
        assert membership.quorum.quorum_id > quorum.quorum_id
