"""Tests of the commit barrier in a term, in which one barrier follows the other (E1, E2)."""

from __future__ import annotations

from typing import Any

import pytest
from support.core.barriers import vote
from support.core.scenes import plain

from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, CommitBarrier, VoteAnswer
from torchft_svc.core.quorum.term import Fate, Wish
from torchft_svc.core.quorum.types import Vote, WorkerRequest
from torchft_svc.errors import RequestRefused

ROUND = 3
OLD_ROUND = 2**20


def steady(group_rank: int, step: int = 5, *, wish: Wish = Wish.NONE, **fields: Any) -> Vote:
    return vote(group_rank, step=step, wish=wish, round=ROUND, **fields)


def opened(size: int = 2) -> CommitBarrier:
    barrier = CommitBarrier(size, ROUND)
    barrier.announce_round(ROUND)
    barrier.open_round([5])
    return barrier


def count(barrier: CommitBarrier, each: Vote, caller: int) -> list[VoteAnswer]:
    return barrier.count_vote(each, caller, ())


def yes_to(*callers: int, fate: Fate = Fate.CONTINUES) -> list[VoteAnswer]:
    return [AnswerVote(each, True, fate) for each in callers]


def decided(barrier: CommitBarrier, step: int) -> None:
    """Both workers vote yes on ``step``, and go on."""
    assert count(barrier, steady(0, step), 1000 + step) == []
    assert count(barrier, steady(1, step), 2000 + step) == yes_to(1000 + step, 2000 + step)


def test_the_barriers_of_a_term_follow_one_another() -> None:
    barrier = opened()
    for step in (5, 6, 7):
        decided(barrier, step)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("wish", "fate"), [(Wish.SOME, Fate.ENDS), (Wish.ALONE, Fate.ABORTED)], ids=["seen", "lost"]
)
def test_one_wish_ends_the_term_for_all_ranks(rank: int, wish: Wish, fate: Fate) -> None:
    barrier = opened()
    wishes = [Wish.NONE, Wish.NONE]
    wishes[rank] = wish
    assert count(barrier, steady(0, wish=wishes[0]), 10) == []
    assert count(barrier, steady(1, wish=wishes[1]), 11) == yes_to(10, 11, fate=fate)


@pytest.mark.parametrize("fate", [Fate.ENDS, Fate.ABORTED])
def test_after_the_end_of_a_term_there_is_nothing_to_vote_on(fate: Fate) -> None:
    barrier = opened()
    count(barrier, steady(0, wish=Wish.SOME), 10)
    count(barrier, steady(1, yes=fate is Fate.ENDS), 11)
    with pytest.raises(RequestRefused, match="the vote is for step 6, the group is at step 5"):
        count(barrier, steady(0, 6), 12)


def test_one_no_breaks_the_term_off_at_once() -> None:
    barrier = opened()
    decided(barrier, 5)
    assert count(barrier, steady(0, 6), 10) == []
    no = steady(1, 6, yes=False, wish=Wish.SOME)
    assert count(barrier, no, 11) == [AnswerVote(10, False), AnswerVote(11, False)]


def test_a_step_cannot_be_left_out() -> None:
    barrier = opened()
    decided(barrier, 5)
    with pytest.raises(RequestRefused):
        count(barrier, steady(0, 7), 10)
    decided(barrier, 6)


def test_the_next_step_begins_only_after_a_decision() -> None:
    barrier = opened()
    assert count(barrier, steady(0), 10) == []
    with pytest.raises(RequestRefused):
        count(barrier, steady(1, 6), 11)
    assert count(barrier, steady(1), 12) == yes_to(10, 12)


def test_a_vote_whose_answer_was_lost_is_answered_again() -> None:
    """The others may have voted on the next step, or not yet."""
    barrier = opened()
    decided(barrier, 5)
    assert count(barrier, steady(1), 12) == yes_to(12)
    assert count(barrier, steady(0, 6), 13) == []
    assert count(barrier, steady(1), 14) == yes_to(14)
    assert count(barrier, steady(1, 6), 15) == yes_to(13, 15)


def test_a_late_no_had_no_part_in_a_yes() -> None:
    barrier = opened()
    decided(barrier, 5)
    count(barrier, steady(0, 6), 13)
    late = steady(1, yes=False, wish=Wish.SOME)
    assert count(barrier, late, 14) == [AnswerVote(14, False)]


def test_two_steps_ago_is_too_late() -> None:
    barrier = opened()
    for step in (5, 6, 7):
        decided(barrier, step)
    count(barrier, steady(0, 8), 10)
    assert count(barrier, steady(1, 7), 11) == yes_to(11)
    assert count(barrier, steady(1, 6), 12) == yes_to(12)
    with pytest.raises(RequestRefused):
        count(barrier, steady(1, 5), 13)


def test_a_worker_that_is_gone_ends_the_barrier_of_the_next_step() -> None:
    barrier = opened()
    decided(barrier, 5)
    assert barrier.drop_votes("group rank 1 is gone") == []
    gone = "no commit decision: group rank 1 is gone"
    (refused,) = plain(count(barrier, steady(0, 6), 10))
    assert (refused.caller, refused.reason) == (10, gone)
    assert count(barrier, steady(0), 11) == yes_to(11), "what was decided before stays"


def test_workers_that_wait_in_the_next_step_receive_the_reason_for_its_end() -> None:
    barrier = opened()
    decided(barrier, 5)
    count(barrier, steady(0, 6), 10)
    (refused,) = plain(barrier.drop_votes("group rank 1 is gone"))
    assert refused.caller == 10


def test_a_new_quorum_begins_a_new_term() -> None:
    barrier = opened()
    decided(barrier, 5)
    barrier.drop_votes("asks")
    barrier.announce_round(ROUND + 1)
    barrier.open_round([6])
    again = vote(0, step=6, round=ROUND + 1, wish=Wish.NONE)
    assert count(barrier, again, 10) == []
    with pytest.raises(RequestRefused):
        count(barrier, steady(1, 6), 11)


# -- a manager that follows another one ----------------------------------------------------------


def old(group_rank: int, step: int, **fields: Any) -> Vote:
    """A vote in a round of the manager before."""
    return vote(group_rank, step=step, wish=Wish.NONE, round=OLD_ROUND, **fields)


def test_the_steps_of_an_inherited_round_follow_one_another() -> None:
    barrier = CommitBarrier(2, ROUND)
    for step in (8, 9):
        assert count(barrier, old(0, step), 10 + step) == []
        assert count(barrier, old(1, step), 20 + step) == yes_to(10 + step, 20 + step)


def test_a_vote_on_the_next_step_shows_what_was_decided_about_the_one_before() -> None:
    barrier = CommitBarrier(2, ROUND)
    assert count(barrier, old(0, 8), 10) == [], "its answer was lost"
    assert count(barrier, old(1, 9), 11) == yes_to(10)
    assert count(barrier, old(0, 9), 12) == yes_to(11, 12)


def test_the_same_if_the_vote_on_the_next_step_comes_first() -> None:
    barrier = CommitBarrier(2, ROUND)
    assert count(barrier, old(1, 9), 10) == []
    assert count(barrier, old(0, 8), 11) == yes_to(11)
    assert count(barrier, old(0, 9), 12) == yes_to(10, 12)


def test_a_no_on_the_next_step_does_not_show_that_all_go_on() -> None:
    """The voter may have asked in vain for the next quorum, as all were to."""
    no = old(1, 9, yes=False)
    barrier = CommitBarrier(2, ROUND)
    assert count(barrier, old(0, 8), 10) == []
    assert count(barrier, no, 11) == [
        AnswerVote(10, True, Fate.ABORTED),
        AnswerVote(11, False),
    ]
    barrier = CommitBarrier(2, ROUND)
    assert count(barrier, no, 10) == [AnswerVote(10, False)]
    assert count(barrier, old(0, 8), 11) == [AnswerVote(11, True, Fate.ABORTED)]


@pytest.mark.parametrize("votes_first", [True, False])
def test_a_worker_that_has_gone_on_shows_what_was_decided(votes_first: bool) -> None:
    """The worker may wait with its vote until the other one is in the step, too."""
    barrier = CommitBarrier(2, ROUND)
    if votes_first:
        assert count(barrier, old(0, 8), 10) == []
        assert barrier.step_begun(1, 9) == yes_to(10)
    else:
        assert barrier.step_begun(1, 9) == []
        assert count(barrier, old(0, 8), 10) == yes_to(10)
    assert barrier.step_begun(1, 9) == []
    assert count(barrier, old(0, 9), 11) == []
    assert barrier.step_begun(1, 9) == []
    assert count(barrier, old(1, 9), 12) == yes_to(11, 12)


def test_a_step_that_is_in_vain_may_have_been_committed_by_an_earlier_manager() -> None:
    """One worker may have received a yes, and still be between two steps."""
    answered_one = CommitBarrier(2, ROUND)
    assert count(answered_one, old(0, 8), 10) == []
    assert answered_one.deny_steps(0) == []
    assert answered_one.step_begun(1, 9) == yes_to(10)
    assert count(answered_one, old(0, 9), 11) == [AnswerVote(11, False)]
    assert count(answered_one, old(1, 9), 12) == [AnswerVote(12, False)]
    answered_none = CommitBarrier(2, ROUND)
    assert answered_none.deny_steps(0) == []
    assert count(answered_none, old(0, 8), 10) == []
    assert count(answered_none, old(1, 8), 11) == [AnswerVote(10, False), AnswerVote(11, False)]


def test_only_the_step_after_that_of_a_vote_shows_what_was_decided() -> None:
    """Anybody may claim to be in any step."""
    barrier = CommitBarrier(2, ROUND)
    assert barrier.step_begun(1, 2**53) == []
    assert count(barrier, old(0, 8), 10) == []
    assert barrier.step_begun(1, 9) == yes_to(10)


def test_what_a_worker_has_begun_decides_nothing_in_a_round_of_this_manager() -> None:
    barrier = opened()
    count(barrier, steady(0), 10)
    assert barrier.step_begun(1, 6) == []


@pytest.mark.parametrize("first_round", [ROUND, 2 * OLD_ROUND])
def test_the_round_of_an_earlier_manager_becomes_one_of_this_when_all_go_on(
    first_round: int,
) -> None:
    """A barrier that ends is known to who votes late, and votes on other steps are refused."""
    barrier = CommitBarrier(2, first_round)
    count(barrier, old(0, 8), 10)
    count(barrier, old(1, 8), 11)
    assert count(barrier, old(0, 9), 12) == []
    (refused,) = plain(barrier.drop_votes("group rank 1 is gone"))
    assert refused.caller == 12
    (late,) = plain(count(barrier, old(1, 9), 13))
    assert "group rank 1 is gone" in late.reason
    with pytest.raises(RequestRefused):
        count(barrier, old(0, 11), 14)
    barrier.announce_round(first_round + 1)
    barrier.open_round([9])
    with pytest.raises(RequestRefused, match=f"belongs to round {OLD_ROUND}"):
        count(barrier, old(0, 9), 15)


def test_a_no_on_the_step_before_decides_for_those_that_went_on() -> None:
    """A new worker has sent the no: the next step cannot be committed without it."""
    barrier = CommitBarrier(2, ROUND)
    assert count(barrier, old(1, 9), 10) == []
    no = old(0, 8, yes=False)
    assert count(barrier, no, 11) == [AnswerVote(10, False), AnswerVote(11, False)]


@pytest.mark.parametrize(("asked", "decision"), [(9, True), (8, False)])
def test_a_question_shows_what_was_decided_in_an_inherited_round(
    asked: int, decision: bool
) -> None:
    barrier = CommitBarrier(2, ROUND)
    count(barrier, old(0, 8), 10)
    question = WorkerRequest(group_rank=1, step=asked)
    assert barrier.answer_inherited(question) == [AnswerVote(10, decision)]
