"""Tests of a worker's round in a term: which steps keep the quorum, and which ask (E1, E2)."""

from __future__ import annotations

import dataclasses

import pytest

from core.quorum.worker.test_round import BEHIND, QUORUM, meeting, training, worker
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.term import Fate, TermEnds, Wish
from torchft_svc.core.quorum.types import Vote, WorkerRequest
from torchft_svc.core.quorum.worker.peers import LoseMember
from torchft_svc.core.quorum.worker.round import (
    NEWS_AFTER_S,
    NOTHING,
    AskDecision,
    AskManager,
    Decide,
    MeetMembers,
    Ready,
    Round,
    RoundRequest,
    WorkerCalls,
)
from torchft_svc.errors import QuorumFailed, RequestRefused

STEADY = dataclasses.replace(QUORUM, steady=True)
REQUEST = RoundRequest(timeout_s=60.0)
BROKEN = QuorumFailed("connection reset")


def in_term(size: int = 1, wishes: float | None = 0.0, at: float = 100.0) -> Round:
    """The first step of a term, step 3, is committed, and its update applied."""
    round_ = training(worker(is_steady=True, group_world_size=size), STEADY)
    end_step(round_, wishes, at=at)
    return round_


def end_step(
    round_: Round,
    wishes: float | None = 0.0,
    *,
    decided: Fate | None = None,
    at: float = 100.0,
) -> None:
    """End the step by a vote; ``decided``: by the manager of several workers."""
    if wishes is not None:
        round_.record_wishes(wishes)
    output = round_.begin_vote(at, 10.0)
    if isinstance(output, AskDecision):
        fate = decided or (Fate.CONTINUES if round_.wish is Wish.NONE else Fate.ENDS)
        output = round_.vote_decided(round_.ballot().should_commit, fate)
    round_.apply_decision(output)
    if output.committed:
        round_.step.end_update()


def test_steps_of_a_steady_quorum_ask_nobody() -> None:
    round_ = in_term()
    for step in (4, 5, 6):
        epoch = round_.step.state.epoch
        assert round_.begin_step(REQUEST, 100.0) == NOTHING
        assert (round_.keeps_quorum, round_.step.state.step) == (True, step)
        assert round_.step.state.epoch == epoch + 1
        assert round_.quorum == STEADY
        assert round_.step.state.phase is Phase.TRAINING
        assert round_.may_reduce
        end_step(round_)
    assert round_.step.state.batches_committed == 3 + 4 * 2


def lose_a_peer(round_: Round) -> None:
    round_.peers.record_loss("b:1", "it has left", STEADY.quorum_id)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_step_that_lacks_a_member_is_summed_in_the_next_quorum(is_known: bool) -> None:
    """The end of its connections may be seen before the news of its loss."""
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    epoch = round_.step.state.epoch
    if is_known:
        lose_a_peer(round_)
    round_.record_error(BROKEN, epoch)
    assert round_.may_sum_again
    assert round_.sum_again(100.0) == Ready(then=AskManager(0.0, 160.0))
    assert round_.step.state.epoch == epoch + 1
    assert (round_.keeps_quorum, round_.quorum, round_.step.state.error) == (False, None, None)
    assert not round_.question("", are_connections_broken=True).agreed
    alone = dataclasses.replace(QUORUM, quorum_id=QUORUM.quorum_id + 1, replica_ids=("a:1",))
    round_.quorum_received(alone)
    round_.members_met(None)
    assert not round_.may_sum_again, "it is no step of a term any more"
    end_step(round_)
    assert round_.step.state.step == 5


def test_a_term_that_is_over_is_as_good_as_a_member_that_left() -> None:
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    round_.record_term_end(TermEnds(STEADY.quorum_id, 4, "another group asks"))
    assert round_.may_sum_again


def test_workers_that_cannot_sum_a_step_again() -> None:
    """One of several, whose group may be in a collective; one that drains; one that is out."""
    several, drained, out = in_term(size=2), in_term(), in_term()
    for round_ in (several, drained, out):
        round_.begin_step(REQUEST, 100.0)
        lose_a_peer(round_)
    assert (drained.may_sum_again, out.may_sum_again) == (True, True)
    drained.drain("SIGTERM")
    own = STEADY.replica_ids[STEADY.replica_rank]
    out.peers.record_loss(own, "it was silent", STEADY.quorum_id)
    for round_ in (several, drained, out):
        assert not round_.may_sum_again
    heals_first = training(worker(is_steady=True, use_async_quorum=False), STEADY)
    end_step(heals_first)
    heals_first.begin_step(REQUEST, 100.0)
    lose_a_peer(heals_first)
    assert heals_first.keeps_quorum
    assert not heals_first.may_sum_again, "its passes have changed what a newcomer would get"
    asks = training(worker(is_steady=True))
    lose_a_peer(asks)
    assert not asks.may_sum_again, "its quorum was asked for"


@pytest.mark.parametrize("wishes", [1.0, 0.5, None])
def test_a_wish_or_a_step_without_a_sum_ends_the_term_in_all_groups(wishes: float | None) -> None:
    round_ = in_term(wishes=wishes)
    round_.begin_step(REQUEST, 100.0)
    assert not round_.keeps_quorum
    assert round_.quorum is None
    assert round_.question("", are_connections_broken=False).agreed


def test_a_wish_counts_for_its_step_alone() -> None:
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    end_step(round_, 0.0)
    round_.begin_step(REQUEST, 100.0)
    assert round_.keeps_quorum
    end_step(round_, None)
    round_.begin_step(REQUEST, 100.0)
    assert not round_.keeps_quorum, "what was summed in the step before shows nothing of this one"


def test_a_wish_in_one_of_several_sums_counts() -> None:
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    round_.record_wishes(1.0)
    round_.record_wishes(0.0)
    assert round_.wish is Wish.SOME


def test_an_ordinary_quorum_is_asked_for_again() -> None:
    round_ = training(worker(is_steady=True))
    end_step(round_)
    round_.begin_step(REQUEST, 100.0)
    assert not round_.keeps_quorum
    assert round_.question("", are_connections_broken=False).steady


def test_a_discarded_step_is_followed_by_a_question_that_is_not_agreed_on() -> None:
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    assert round_.record_error(BROKEN, round_.step.state.epoch) == Ready(leave=BROKEN)
    end_step(round_)
    assert (round_.step.state.step, round_.step.state.failures) == (4, 1)
    round_.begin_step(REQUEST, 100.0)
    assert not round_.keeps_quorum
    asked = round_.question("", are_connections_broken=True)
    assert (asked.agreed, asked.commit_failures) == (False, 1)


def test_a_step_in_a_term_that_is_cancelled_at_its_start_is_not_committed() -> None:
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    round_.cancel_round(BROKEN)
    assert not round_.may_reduce
    end_step(round_)
    assert round_.step.state.step == 4
    round_.begin_step(REQUEST, 100.0)
    assert not round_.keeps_quorum


def test_a_question_after_a_first_one_without_a_quorum_is_not_agreed_on() -> None:
    round_ = in_term(wishes=1.0)
    round_.begin_step(REQUEST, 100.0)
    round_.record_failure(BROKEN)
    end_step(round_, None)
    round_.begin_step(REQUEST, 100.0)
    assert not round_.question("", are_connections_broken=False).agreed


# -- what ends it --------------------------------------------------------------------------------


def lose_update(round_: Round) -> None:
    round_.step.lose_update("it raised")


REASONS_TO_ASK = {
    "its connections are broken": (lambda round_: None, REQUEST, BROKEN),
    "a member is gone": (
        lambda round_: round_.peers.record_loss("b:1", "killed", 7),
        REQUEST,
        None,
    ),
    "it sums something else": (
        lambda round_: None,
        dataclasses.replace(REQUEST, layout="other"),
        None,
    ),
    "the term is over": (lambda round_: round_.record_term_end(TermEnds(7, 4, "")), REQUEST, None),
    "its weights are spoiled": (lose_update, REQUEST, None),
}


@pytest.mark.parametrize("why", REASONS_TO_ASK)
def test_a_lone_worker_asks_if_it_cannot_keep_its_quorum(why: str) -> None:
    happen, request, broken = REASONS_TO_ASK[why]
    round_ = in_term()
    happen(round_)
    round_.begin_step(request, 100.0, broken)
    assert not round_.keeps_quorum
    assert not round_.question("", are_connections_broken=False).agreed


@pytest.mark.parametrize("why", REASONS_TO_ASK)
def test_one_of_several_keeps_the_quorum_and_votes_no(why: str) -> None:
    happen, request, broken = REASONS_TO_ASK[why]
    round_ = in_term(size=2)
    happen(round_)
    assert round_.begin_step(request, 100.0, broken).leave is not None
    assert round_.keeps_quorum
    assert isinstance(round_.begin_vote(100.0, 10.0), AskDecision)
    vote = round_.ballot()
    assert (vote.step, vote.should_commit) == (4, False)


def test_calls_name_the_rounds_before_for_another_manager() -> None:
    calls = WorkerCalls("w")
    first, second = (WorkerRequest(group_rank=0, step=3, question=each) for each in (7, 8))
    report = PhaseReport(Phase.TRAINING, 3)
    assert (calls.sign_question(first).last_round, calls.sign_report(report)) == (0, report)
    calls.record_answer(1, 2, round_=100)
    assert calls.sign_report(report) == report, "there was none before"
    assert calls.sign_question(second).last_round == 100
    assert calls.sign_question(second).last_round == 100, "it asks again"
    calls.record_answer(1, 2, round_=101)
    assert calls.sign_report(report) == dataclasses.replace(report, round_before=100)
    assert calls.sign_question(first).last_round == 101
    assert calls.sign_question(second).last_round == 0, "it has given one up"


def test_one_of_several_that_has_lost_an_update_is_in_the_step_of_the_others() -> None:
    round_ = training(worker(is_steady=True, group_world_size=2), STEADY)
    round_.record_wishes(0.0)
    assert round_.report().went_on_to == 0, "it has asked"
    round_.begin_vote(100.0, 10.0)
    round_.apply_decision(Decide(True, fate=Fate.CONTINUES))
    round_.step.lose_update()
    assert (round_.step.state.step, round_.report().went_on_to) == (3, 4)
    round_.begin_step(REQUEST, 100.0)
    assert (round_.keeps_quorum, round_.report().went_on_to) == (True, 4)
    round_.begin_vote(100.0, 10.0)
    assert round_.report().went_on_to == 4
    assert round_.ballot() == Vote(group_rank=0, step=4, should_commit=False, wish=Wish.SOME)
    round_.apply_decision(Decide(False))
    assert round_.report().went_on_to == 0, "the step is over"
    round_.begin_step(REQUEST, 100.0)
    asked = round_.question("", are_connections_broken=False)
    assert (round_.keeps_quorum, asked.step, asked.agreed) == (False, 3, False)


def test_what_the_group_decides_counts_also_if_this_worker_saw_no_wish() -> None:
    round_ = training(worker(is_steady=True, group_world_size=2), STEADY)
    end_step(round_, 0.0, decided=Fate.ENDS)
    round_.begin_step(REQUEST, 100.0)
    assert not round_.keeps_quorum


def test_a_spoiled_worker_that_may_not_begin_changes_nothing() -> None:
    round_ = in_term()
    round_.step.lose_update("it raised")
    round_.step.state = round_.step.state._replace(unhealed=False)
    before = round_.step.state
    with pytest.raises(RequestRefused):
        round_.begin_step(REQUEST, 100.0)
    assert round_.step.state == before


# -- a long step (E3) ----------------------------------------------------------------------------

NEWS = {
    "this group is out": lambda round_: round_.peers.record_loss("a:1", "it hangs", 7),
    "a member waits in vain": lambda round_: round_.record_term_end(TermEnds(7, 4, "b asks")),
}
OTHER_NEWS = {
    "another group is out": lambda round_: round_.peers.record_loss("b:1", "it died", 7),
    "it was out of an earlier quorum": lambda round_: round_.peers.record_loss(
        "a:1", "it hangs", 6
    ),
    "the step is the last one": lambda round_: round_.record_term_end(TermEnds(7, 5, "b asks")),
    "another term is over": lambda round_: round_.record_term_end(TermEnds(6, 4, "b asks")),
}


def long_step(size: int = 1, lasts_s: float = NEWS_AFTER_S) -> Round:
    """Step 4, which is about to be voted on at 100 s; all sums are complete. ``lasts_s``: with the
    pause before it, in which the others may have waited already."""
    round_ = in_term(size, at=100.0 - lasts_s)
    round_.begin_step(REQUEST, 100.0)
    round_.record_wishes(0.0)
    return round_


@pytest.mark.parametrize("why", NEWS)
def test_a_late_vote_commits_nothing_that_the_others_have_given_up(why: str) -> None:
    """The late voter may have stood still, so that only its sums are complete."""
    round_ = long_step()
    assert round_.needs_news(100.0)
    NEWS[why](round_)
    assert round_.begin_vote(100.0, 10.0) == Decide(False)


@pytest.mark.parametrize("why", OTHER_NEWS)
def test_other_news_change_nothing_in_a_step_whose_sums_are_complete(why: str) -> None:
    round_ = long_step()
    OTHER_NEWS[why](round_)
    assert round_.begin_vote(100.0, 10.0) == Decide(True, fate=Fate.CONTINUES)


@pytest.mark.parametrize("why", NEWS)
def test_in_a_short_step_no_news_are_awaited_before_the_vote(why: str) -> None:
    round_ = long_step(lasts_s=0.9 * NEWS_AFTER_S)
    assert not round_.needs_news(100.0)
    NEWS[why](round_)
    assert round_.begin_vote(100.0, 10.0) == Decide(True, fate=Fate.CONTINUES)


def test_only_a_worker_that_decides_alone_in_a_quorum_needs_news() -> None:
    assert not long_step(size=2).needs_news(100.0)
    round_ = worker()
    round_.begin_step(REQUEST, 100.0)
    assert not round_.needs_news(100.0)
    assert training(worker()).needs_news(200.0)


# -- wishes --------------------------------------------------------------------------------------

WISHES = {
    "a group waits": lambda round_: round_.peers.record_newcomer("c:1"),
    "it has to end": lambda round_: round_.drain("SIGTERM"),
    "the manager asks for it": lambda round_: round_.record_term_end(TermEnds(7, None, "it moves")),
}


@pytest.mark.parametrize("why", WISHES)
def test_what_a_worker_wishes_a_question_for(why: str) -> None:
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    assert not round_.wants_question
    WISHES[why](round_)
    assert round_.wants_question


def test_news_about_another_quorum_is_no_wish() -> None:
    round_ = in_term()
    assert round_.record_term_end(TermEnds(6, None, "it moves")) is None
    assert not round_.wants_question


@pytest.mark.parametrize(("others", "fate"), [(0.0, Fate.ABORTED), (0.5, Fate.ENDS)])
def test_a_wish_that_not_all_have_seen_is_not_agreed_on(others: float, fate: Fate) -> None:
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    round_.record_wishes(0.0, False)
    round_.record_wishes(others)
    assert round_.begin_vote(100.0, 10.0) == Decide(True, fate=fate)
    round_.apply_decision(Decide(True, fate=fate))
    round_.step.end_update()
    round_.begin_step(REQUEST, 100.0)
    assert not round_.keeps_quorum
    assert round_.question("", are_connections_broken=False).agreed is (fate is Fate.ENDS)


def test_a_sum_that_was_not_shared_counts_for_its_step_only() -> None:
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    round_.record_wishes(0.0, False)
    assert round_.wish is Wish.ALONE
    round_.begin_step(REQUEST, 100.0)
    round_.quorum_received(STEADY)
    round_.record_wishes(0.0)
    assert round_.wish is Wish.NONE


def test_a_wish_is_over_with_the_question() -> None:
    wish = TermEnds(7, None, "it moves")
    round_ = in_term(wishes=1.0)
    round_.record_term_end(wish)
    round_.begin_step(REQUEST, 100.0)
    round_.quorum_received(STEADY)
    assert not round_.wants_question
    round_ = in_term(wishes=1.0)
    round_.begin_step(REQUEST, 100.0)
    round_.record_term_end(wish)  # it overtakes the answer
    round_.quorum_received(STEADY)
    assert round_.wants_question


# -- the news that a term is over ----------------------------------------------------------------


def test_a_step_that_is_in_vain_is_given_up() -> None:
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    assert round_.record_term_end(TermEnds(7, 5, "b asks")) is None, "it finishes step 4"
    assert round_.record_term_end(TermEnds(7, 4, "b asks")) == LoseMember(7, "b asks")


@pytest.mark.parametrize("ends", [TermEnds(6, 4, "b asks"), TermEnds(8, 4, "b asks")])
def test_the_end_of_another_term_is_of_no_concern(ends: TermEnds) -> None:
    round_ = in_term()
    round_.begin_step(REQUEST, 100.0)
    assert round_.record_term_end(ends) is None
    end_step(round_)
    round_.begin_step(REQUEST, 100.0)
    assert round_.keeps_quorum


def test_the_earliest_end_counts() -> None:
    round_ = in_term()
    assert round_.record_term_end(TermEnds(7, 4, "b asks")) is None, "no step is under way"
    assert round_.record_term_end(TermEnds(7, 6, "c asks")) is None
    round_.begin_step(REQUEST, 100.0)
    assert not round_.keeps_quorum


def test_an_end_reported_before_the_quorum_counts() -> None:
    round_ = worker(is_steady=True)
    round_.begin_step(REQUEST, 100.0)
    assert round_.record_term_end(TermEnds(7, 3, "b asks")) is None
    round_.quorum_received(STEADY)
    assert str(round_.quorum_entered().leave) == str(QuorumFailed("b asks"))


def test_an_end_reported_while_the_members_connect_counts() -> None:
    """The backend waits for a member that asks alone, as one that lost the answer does."""
    round_ = worker(is_steady=True)
    round_.begin_step(REQUEST, 100.0)
    round_.quorum_received(STEADY)
    assert round_.quorum_entered() == Ready(then=MeetMembers(anew=True))
    assert round_.record_term_end(TermEnds(6, 3, "b asks")) is None
    assert round_.record_term_end(TermEnds(7, 4, "b asks")) is None
    assert round_.record_term_end(TermEnds(7, 3, "b asks")) == LoseMember(7, "b asks")
    assert str(round_.members_met(None).leave) == str(QuorumFailed("b asks"))


def test_an_end_that_overtakes_an_answer_that_keeps_the_quorum_counts() -> None:
    round_ = in_term(wishes=1.0)
    round_.begin_step(REQUEST, 100.0)
    assert round_.record_term_end(TermEnds(7, 4, "b asks again")) is None
    assert round_.quorum_received(dataclasses.replace(STEADY, max_step=4)) == Ready(
        then=MeetMembers(anew=False)
    )
    assert str(round_.members_met(None).leave) == str(QuorumFailed("b asks again"))


def test_a_group_that_heals_is_not_in_a_steady_quorum_and_asks() -> None:
    round_ = worker(is_steady=True)
    round_.begin_step(REQUEST, 100.0)
    meeting(round_, BEHIND)
    round_.record_wishes(0.0)
    assert round_.wish is Wish.SOME
