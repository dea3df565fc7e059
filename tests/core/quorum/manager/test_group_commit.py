"""A group's commit barrier: all its workers get one decision, or the reason why there is none."""

from __future__ import annotations

import pytest
from support.core.barriers import QUORUM, TimelessGroup, asks, in_round, request, vote
from support.core.scenes import Refused, plain

from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote
from torchft_svc.core.quorum.term import Fate
from torchft_svc.core.quorum.types import Vote
from torchft_svc.errors import RequestRefused


def test_all_vote_yes() -> None:
    group = in_round(3)
    assert group.vote_received(vote(1), 20) == ()
    assert group.vote_received(vote(0), 21) == ()
    assert group.why() == "group rank 2 of 3 workers has not voted"
    assert group.vote_received(vote(2), 22) == tuple(
        AnswerVote(who, True, Fate.ENDS) for who in (20, 21, 22)
    )


def test_one_no_decides_at_once_and_for_all() -> None:
    group = in_round(3)
    assert group.vote_received(vote(1), 20) == ()
    assert group.vote_received(vote(0, yes=False), 21) == (
        AnswerVote(20, False),
        AnswerVote(21, False),
    )
    assert group.vote_received(vote(2), 22) == (AnswerVote(22, False),)


def test_a_vote_may_name_the_step_of_the_group_or_of_the_quorum() -> None:
    """A group that healed meanwhile is at max_step when it votes."""
    assert in_round(1).vote_received(vote(0, step=5), 20) == (AnswerVote(20, True, Fate.ENDS),)
    assert in_round(1).vote_received(vote(0, step=7), 20) == (AnswerVote(20, True, Fate.ENDS),)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (vote(0, step=6), "the vote is for step 6, the group is at step 5 or 7"),
        (vote(0, step=4), "the vote is for step 4, the group is at step 5 or 7"),
        (vote(0, round=2), "the vote belongs to round 2, this is round 3"),
        (vote(0, round=4), "the vote belongs to round 4, this is round 3"),
        (vote(2), "group rank 2 is outside this group of 2 workers"),
        (vote(-1), "group rank -1 is outside this group of 2 workers"),
        (vote(1, yes=False), "group rank 1 has already voted in round 3"),
        (
            vote(1, worker_id="y"),
            "group rank 1 is taken: another worker with this rank is there; "
            "give every worker of the group a rank of its own",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refused_vote_leaves_the_state_as_it_was(bad: Vote, sentence: str) -> None:
    group = in_round(2, round_=3)
    group.vote_received(vote(1, round=3), 20)
    with pytest.raises(RequestRefused) as refused:
        group.vote_received(bad, 21)
    assert str(refused.value) == sentence
    assert group.vote_received(vote(0, round=3), 22) == (
        AnswerVote(20, True, Fate.ENDS),
        AnswerVote(22, True, Fate.ENDS),
    )


NOTHING = "there is nothing to vote on: no quorum yet, or a new one is due"


def test_a_vote_without_a_quorum_is_refused() -> None:
    with pytest.raises(RequestRefused) as refused:
        TimelessGroup(1).vote_received(vote(0), 20)
    assert str(refused.value) == NOTHING


def test_a_late_vote_does_not_count_in_the_next_round() -> None:
    group = in_round(2)
    group.quorum_requested(request(0), 30)
    group.quorum_requested(request(1), 32)
    with pytest.raises(RequestRefused, match=NOTHING):
        group.vote_received(vote(1, round=1), 31)
    group.lighthouse_answered(2, QUORUM)
    with pytest.raises(RequestRefused, match="belongs to round 1, this is round 2"):
        group.vote_received(vote(1, round=1), 33)
    assert group.vote_received(vote(1, round=2), 34) == ()


def test_a_repeated_vote_is_answered_once() -> None:
    group = in_round(2)
    group.vote_received(vote(0), 20)
    sentence = "no commit decision: a newer call of group rank 0 has taken the place of this one"
    assert plain(group.vote_received(vote(0), 21)) == [Refused(20, "CommitFailed", sentence)]
    assert group.call_withdrawn(20) == ()
    assert group.vote_received(vote(1), 22) == (
        AnswerVote(21, True, Fate.ENDS),
        AnswerVote(22, True, Fate.ENDS),
    )
    assert group.vote_received(vote(1), 23) == (
        AnswerVote(23, True, Fate.ENDS),
    )  # its answer was lost


def test_a_voter_that_gives_up_releases_the_others() -> None:
    group = in_round(3)
    group.vote_received(vote(0), 20)
    group.vote_received(vote(1), 21)
    sentence = "no commit decision: group rank 0 gave up waiting"
    assert plain(group.call_withdrawn(20)) == [Refused(21, "CommitFailed", sentence)]
    assert plain(group.vote_received(vote(2), 22)) == [Refused(22, "CommitFailed", sentence)]


def test_giving_up_after_the_decision_changes_nothing() -> None:
    group = in_round(2)
    group.vote_received(vote(0, yes=False), 20)
    assert group.call_withdrawn(20) == ()
    assert group.vote_received(vote(1), 21) == (AnswerVote(21, False),)


def test_a_worker_that_asks_instead_of_voting_releases_the_voters() -> None:
    group = in_round(2)
    group.vote_received(vote(0), 20)
    sentence = "no commit decision: group rank 1 asked for a new quorum instead of voting"
    assert plain(group.quorum_requested(request(1), 21)) == [Refused(20, "CommitFailed", sentence)]


def test_a_voter_that_is_later_than_the_next_question_learns_what_was_decided() -> None:
    """A no is final at once, and its voter does not wait for the others before it goes on."""
    for number in (0, 1):  # 0: a client that does not know rounds
        group = in_round(2)
        group.vote_received(vote(0, yes=False), 20)
        group.quorum_requested(request(0), 21)
        assert group.vote_received(vote(1, round=number), 22) == (AnswerVote(22, False),)
        assert group.quorum_requested(request(1), 23) == (asks(2),)


def test_i3_a_late_no_is_not_answered_with_a_yes() -> None:
    """The voter came after the step was committed, from a checkpoint of it, and had no quorum."""
    group = in_round(2)
    group.vote_received(vote(0), 20)
    group.vote_received(vote(1), 21)
    group.quorum_requested(request(0), 22)
    assert group.vote_received(vote(1, yes=False), 23) == (AnswerVote(23, False),)
    assert group.vote_received(vote(1), 24) == (
        AnswerVote(24, True, Fate.ENDS),
    )  # its answer was lost


@pytest.mark.parametrize("step", [4, 6])
def test_a_late_vote_for_another_step_is_refused(step: int) -> None:
    group = in_round(2)
    group.vote_received(vote(0, yes=False), 20)
    group.quorum_requested(request(0), 21)
    with pytest.raises(RequestRefused, match=NOTHING):
        group.vote_received(vote(1, step=step), 22)


def test_a_voter_that_is_later_than_a_death_learns_of_it() -> None:
    group = in_round(2)
    group.worker_attached(0, "")
    group.worker_detached(0, "", "its process ended")
    sentence = "no commit decision: group rank 0 is gone: its process ended"
    assert plain(group.vote_received(vote(1), 20)) == [Refused(20, "CommitFailed", sentence)]


def test_rounds_go_on_above_those_of_an_earlier_manager() -> None:
    group = TimelessGroup(1, first_round=40)
    assert group.quorum_requested(request(0), 10) == (asks(40),)


def test_many_missing_workers_are_not_all_named() -> None:
    group = TimelessGroup(20)
    group.quorum_requested(request(0), 10)
    assert group.why() == (
        "group rank 1, 2, 3, 4, 5, 6, 7, 8 ... of 20 workers has not asked for a quorum"
    )
