"""Tests when a group that has to end leaves: between two steps, and all workers at one."""

from __future__ import annotations

import dataclasses

import pytest
from support.core.barriers import AwaitOwner, BarrierOrder, TimelessGroup
from support.core.scenes import member, quorum

from torchft_svc.core.quorum.manager.commit_barrier import RefuseWorker
from torchft_svc.core.quorum.manager.group import AnswerWorker
from torchft_svc.core.quorum.session_messages import Departure, Leave
from torchft_svc.core.quorum.types import GroupRequest, Quorum, Vote, WorkerRequest
from torchft_svc.errors import GroupLeft, QuorumFailed


def request(group_rank: int, drain_reason: str = "", worker_id: str = "w") -> WorkerRequest:
    return WorkerRequest(
        group_rank=group_rank, step=3, worker_id=worker_id, drain_reason=drain_reason
    )


def left(orders: tuple[BarrierOrder, ...]) -> list[int]:
    """Callers that are refused as the group leaves between two steps."""
    leave, *refusals = orders
    assert isinstance(leave, Leave)
    assert leave.between_steps
    assert all(isinstance(r, RefuseWorker) and isinstance(r.error, GroupLeft) for r in refusals)
    return [refusal.caller for refusal in refusals if isinstance(refusal, RefuseWorker)]


def test_it_leaves_when_all_workers_have_asked_whoever_has_the_order() -> None:
    group = TimelessGroup(2)
    group.worker_attached(0, "w")  # before the other one
    assert group.quorum_requested(request(0), 1) == ()
    orders = group.quorum_requested(request(1, "SIGTERM"), 2)
    assert left(orders) == [1, 2]
    assert orders[0].reason == "SIGTERM"
    assert group.quorum_requested(request(0), 3) == ()
    assert left(group.quorum_requested(request(1), 4)) == [3, 4], "for good"


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_worker_whose_answer_was_lost_is_refused_again_when_its_peer_has_ended(
    is_asked: bool,
) -> None:
    group = TimelessGroup(2)
    group.worker_attached(1, "w1")
    group.quorum_requested(request(0, worker_id="w0"), 1)
    orders = group.quorum_requested(request(1, "" if is_asked else "preempted", worker_id="w1"), 2)
    if is_asked:  # then the lighthouse has the last word
        (ask,) = orders
        assert isinstance(ask, GroupRequest)
        orders = (
            *group.drain("preempted"),
            *group.lighthouse_answered(ask.round, QuorumFailed("out")),
        )
    assert left(orders) == [1, 2]
    group.worker_detached(1, "w1", "it has ended")
    (again,) = group.quorum_requested(request(0, worker_id="w0"), 3)
    assert isinstance(again, RefuseWorker)
    assert isinstance(again.error, GroupLeft)
    assert group.quorum_requested(request(0, worker_id="w2"), 4) == (), "which comes after it"


def of_three(*asked: int) -> TimelessGroup:
    """A group whose workers live, and of which these have asked."""
    group = TimelessGroup(3)
    for rank in range(3):
        group.worker_attached(rank, "w")
    for rank in asked:
        assert group.quorum_requested(request(rank), rank) == ()
    return group


def ended(orders: tuple[BarrierOrder, ...]) -> list[int]:
    """Callers that are refused because the group has to end."""
    refusals = [order for order in orders if isinstance(order, RefuseWorker)]
    assert all(isinstance(refusal.error, GroupLeft) for refusal in refusals)
    return [refusal.caller for refusal in refusals]


def test_it_does_not_wait_for_a_worker_that_dies() -> None:
    group = of_three(0, 2)
    assert group.drain("preempted") == ()
    orders = group.worker_detached(1, "w", "killed")
    assert ended(orders) == [0, 2]
    assert not any(order.between_steps for order in orders if isinstance(order, Leave))


def test_it_does_not_wait_for_a_worker_that_is_dead() -> None:
    group = of_three()
    group.worker_detached(1, "w", "killed")
    assert group.quorum_requested(request(0, "SIGTERM"), 0) == ()
    assert ended(group.quorum_requested(request(2), 2)) == [0, 2]
    group = of_three()
    group.worker_detached(1, "w", "killed")
    assert group.quorum_requested(request(0), 0) == group.quorum_requested(request(2), 2) == ()
    assert ended(group.drain("its launcher has seen it")) == [0, 2]


def test_it_finishes_the_step_that_it_is_in() -> None:
    group = TimelessGroup(1)
    (ask,) = group.quorum_requested(request(0), 1)
    assert isinstance(ask, GroupRequest)
    group.lighthouse_answered(ask.round, quorum(1, member("a", 3)), "a")
    assert group.drain("preempted") == ()
    (answer,) = group.vote_received(
        Vote(group_rank=0, step=3, should_commit=True, worker_id="w"), 2
    )
    assert answer.should_commit  # type: ignore[union-attr]
    assert left(group.quorum_requested(request(0), 3)) == [3]


def test_a_quorum_that_is_on_its_way_is_honoured() -> None:
    group = TimelessGroup(1)
    (ask,) = group.quorum_requested(request(0), 1)
    assert isinstance(ask, GroupRequest)
    assert left(group.drain("preempted")) == []
    (answer,) = group.lighthouse_answered(ask.round, quorum(1, member("a", 3)), "a")
    assert isinstance(answer, AnswerWorker)
    assert left(group.quorum_requested(request(0), 2)) == [2]


def test_a_wait_for_a_quorum_ends_with_the_group() -> None:
    group = TimelessGroup(1)
    (ask,) = group.quorum_requested(request(0), 1)
    assert isinstance(ask, GroupRequest)
    group.drain("preempted")
    (refusal,) = group.lighthouse_answered(ask.round, QuorumFailed("it is out"))
    assert isinstance(refusal, RefuseWorker)
    assert refusal.error.reason == "preempted"  # type: ignore[attr-defined]


def test_the_workers_that_come_after_it_begin_anew() -> None:
    group = TimelessGroup(1)
    group.worker_attached(0, "w")
    group.drain("preempted")
    group.worker_detached(0, "w", "it has stopped")
    (ask,) = group.quorum_requested(request(0, worker_id="new"), 1)
    assert isinstance(ask, GroupRequest)


def test_a_worker_that_comes_back_after_the_others_have_ended_has_to_end_too() -> None:
    """The stream of rank 1 broke before the drain, and that of rank 0 has ended."""
    group = TimelessGroup(2)
    group.worker_attached(0, "w")
    group.worker_attached(1, "w")
    group.worker_detached(1, "w", "its stream broke")
    group.drain("preempted")
    group.worker_detached(0, "w", "it has stopped")
    group.worker_attached(1, "w")
    assert ended(group.quorum_requested(request(1), 0)) == [0]


def test_workers_that_take_the_place_of_others_do_not_end_in_their_stead() -> None:
    """Rank 0 of those before has asked and died, which is not noticed yet."""
    group = TimelessGroup(2)
    group.quorum_requested(request(1), 0)
    group.call_withdrawn(0)
    group.drain("preempted")
    assert group.quorum_requested(request(0), 1) == ()
    assert group.quorum_requested(request(1, worker_id="new"), 2) == (AwaitOwner(1, 2),)
    (ask,) = group.owner_was_silent(1, 2)
    assert isinstance(ask, GroupRequest)
    assert ask.new_incarnation


STEADY = quorum(7, *(member(each, 3, steady=True) for each in "ab"))
ORDINARY = quorum(7, *(member(each, 3) for each in "ab"))


@pytest.mark.parametrize(
    ("formed", "seen_id", "agreed", "others_know"),
    [
        (STEADY, 7, True, True),
        (STEADY, 7, False, False),
        (ORDINARY, 7, False, True),
        (None, 7, True, True),
        (None, 7, False, False),
        (None, 0, False, True),
    ],
)
def test_e4_a_group_that_ends_its_term_alone_does_not_leave_between_steps(
    formed: Quorum | None, seen_id: int, agreed: bool, others_know: bool
) -> None:
    """The others may wait for it in a step; without a quorum here, another manager may have formed
    it."""
    group = TimelessGroup(1)
    if formed is not None:
        (ask,) = group.quorum_requested(request(0), 1)
        assert isinstance(ask, GroupRequest)
        group.lighthouse_answered(ask.round, formed)
    last = dataclasses.replace(
        request(0, "SIGTERM"), step=5, question=2, agreed=agreed, last_quorum_id=seen_id
    )
    leave, _ = group.quorum_requested(last, 2)
    drained = Departure.DRAINED
    assert leave == Leave("SIGTERM", between_steps=others_know, ends=True, departure=drained)
