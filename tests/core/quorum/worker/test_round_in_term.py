"""Tests of a worker's round in a term: who goes on without a question, and who asks (E1, E2)."""

from __future__ import annotations

import dataclasses

import pytest

from core.quorum.worker.test_round import BEHIND, QUORUM, meeting, training, worker
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.term import Fate, TermEnds, Wish
from torchft_svc.core.quorum.types import Vote, WorkerRequest
from torchft_svc.core.quorum.worker.peers import LoseMember
from torchft_svc.core.quorum.worker.round import LISTEN_AFTER_S, Round, RoundRequest
from torchft_svc.core.quorum.worker.round_orders import (
    AskDecision,
    Decide,
    LeaveMembers,
    MeetMembers,
)
from torchft_svc.core.quorum.worker.worker_calls import WorkerCalls
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
    told: Fate | None = None,
    at: float = 100.0,
) -> None:
    """``told``: by the manager of several workers."""
    if wishes is not None:
        round_.summed(wishes)
    (order,) = round_.vote(at, 10.0)
    if isinstance(order, AskDecision):
        fate = told or (Fate.GOES_ON if round_.wish is Wish.NONE else Fate.ENDS)
        (order,) = round_.voted(round_.ballot().should_commit, fate)
    assert isinstance(order, Decide)
    round_.decide(order)
    if order.committed:
        round_.step.end_update()


def test_steps_of_a_steady_quorum_ask_nobody() -> None:
    round_ = in_term()
    for step in (4, 5, 6):
        epoch = round_.begin(REQUEST)
        assert (round_.goes_on, round_.step.state.step) == (True, step)
        assert epoch == round_.step.state.epoch
        assert round_.go_on() == ()
        assert round_.quorum == STEADY
        assert round_.step.state.phase is Phase.TRAINING
        assert round_.may_reduce
        end_step(round_)
    assert round_.step.state.batches_committed == 3 + 4 * 2


def lose_a_peer(round_: Round) -> None:
    round_.peers.lost("b:1", "it has left", STEADY.quorum_id)


def test_a_step_that_lacks_a_member_is_summed_in_the_next_quorum() -> None:
    round_ = in_term()
    epoch = round_.begin(REQUEST)
    assert not round_.may_sum_again(), "nobody has left"
    assert round_.awaits_losses
    lose_a_peer(round_)
    assert round_.may_sum_again()
    round_.broke(BROKEN, epoch)
    assert round_.sum_again() == epoch + 1
    assert (round_.goes_on, round_.quorum, round_.step.state.error) == (False, None, None)
    assert not round_.question("", are_connections_broken=True).agreed
    round_.ask(100.0)
    alone = dataclasses.replace(QUORUM, quorum_id=QUORUM.quorum_id + 1, replica_ids=("a:1",))
    round_.answered(alone)
    round_.met(None)
    assert not round_.may_sum_again(), "it is no step of a term any more"
    end_step(round_)
    assert round_.step.state.step == 5


def test_a_term_that_is_over_is_as_good_as_a_member_that_left() -> None:
    round_ = in_term()
    round_.begin(REQUEST)
    round_.term_ends(TermEnds(STEADY.quorum_id, 4, "another group asks"))
    assert round_.may_sum_again()


def test_who_cannot_sum_a_step_again() -> None:
    """Others of its group may be in a collective; it is to end; the others go on without it."""
    several, drained, out = in_term(size=2), in_term(), in_term()
    for round_ in (several, drained, out):
        round_.begin(REQUEST)
        lose_a_peer(round_)
    assert (drained.awaits_losses, out.awaits_losses) == (True, True)
    drained.drain("SIGTERM")
    own = STEADY.replica_ids[STEADY.replica_rank]
    out.peers.lost(own, "it was silent", STEADY.quorum_id)
    for round_ in (several, drained, out):
        assert not round_.awaits_losses, "a wait for news would be in vain"
        assert not round_.may_sum_again()
    asks = training(worker(is_steady=True))
    lose_a_peer(asks)
    assert not asks.awaits_losses
    assert not asks.may_sum_again(), "its quorum was asked for"


@pytest.mark.parametrize("wishes", [1.0, 0.5, None])
def test_a_wish_or_a_step_without_a_sum_ends_the_term_and_all_know(wishes: float | None) -> None:
    round_ = in_term(wishes=wishes)
    round_.begin(REQUEST)
    assert not round_.goes_on
    assert round_.quorum is None
    assert round_.question("", are_connections_broken=False).agreed


def test_a_wish_counts_for_its_step_alone() -> None:
    round_ = in_term()
    round_.begin(REQUEST)
    end_step(round_, 0.0)
    round_.begin(REQUEST)
    assert round_.goes_on
    end_step(round_, None)
    round_.begin(REQUEST)
    assert not round_.goes_on, "what was summed in the step before tells nothing of this one"


def test_one_of_several_sums_is_enough_to_tell() -> None:
    round_ = in_term()
    round_.begin(REQUEST)
    round_.summed(1.0)
    round_.summed(0.0)
    assert round_.wish is Wish.SOME


def test_an_ordinary_quorum_is_asked_for_again() -> None:
    round_ = training(worker(is_steady=True))
    end_step(round_)
    round_.begin(REQUEST)
    assert not round_.goes_on
    assert round_.question("", are_connections_broken=False).steady


def test_who_discards_its_step_asks_and_says_that_others_may_not_know() -> None:
    round_ = in_term()
    epoch = round_.begin(REQUEST)
    assert [type(each) for each in round_.broke(BROKEN, epoch)] == [LeaveMembers]
    end_step(round_)
    assert (round_.step.state.step, round_.step.state.failures) == (4, 1)
    round_.begin(REQUEST)
    assert not round_.goes_on
    asked = round_.question("", are_connections_broken=True)
    assert (asked.agreed, asked.commit_failures) == (False, 1)


def test_a_step_that_goes_on_and_is_interrupted_at_its_start_is_not_committed() -> None:
    round_ = in_term()
    round_.begin(REQUEST)
    round_.withdraw(BROKEN)
    assert not round_.may_reduce
    end_step(round_)
    assert round_.step.state.step == 4
    round_.begin(REQUEST)
    assert not round_.goes_on


def test_a_question_after_a_first_one_without_a_quorum_is_not_agreed_on() -> None:
    round_ = in_term(wishes=1.0)
    round_.begin(REQUEST)
    round_.ask(100.0)
    round_.failed(BROKEN)
    end_step(round_, None)
    round_.begin(REQUEST)
    assert not round_.question("", are_connections_broken=False).agreed


# -- what ends it --------------------------------------------------------------------------------


def lose_update(round_: Round) -> None:
    round_.step.lose_update("it raised")


REASONS_TO_ASK = {
    "its connections are broken": (lambda round_: None, REQUEST, BROKEN),
    "a member is gone": (lambda round_: round_.peers.lost("b:1", "killed", 7), REQUEST, None),
    "it sums something else": (
        lambda round_: None,
        dataclasses.replace(REQUEST, layout="other"),
        None,
    ),
    "the term is over": (lambda round_: round_.term_ends(TermEnds(7, 4, "")), REQUEST, None),
    "its weights are spoiled": (lose_update, REQUEST, None),
}


@pytest.mark.parametrize("why", REASONS_TO_ASK)
def test_a_worker_that_is_alone_asks_if_it_cannot_go_on(why: str) -> None:
    happen, request, broken = REASONS_TO_ASK[why]
    round_ = in_term()
    happen(round_)
    round_.begin(request, broken)
    assert not round_.goes_on
    assert not round_.question("", are_connections_broken=False).agreed


@pytest.mark.parametrize("why", REASONS_TO_ASK)
def test_one_of_several_goes_on_and_votes_no(why: str) -> None:
    happen, request, broken = REASONS_TO_ASK[why]
    round_ = in_term(size=2)
    happen(round_)
    round_.begin(request, broken)
    assert round_.goes_on
    (left,) = round_.go_on()
    assert isinstance(left, LeaveMembers)
    (order,) = round_.vote(100.0, 10.0)
    assert isinstance(order, AskDecision)
    vote = round_.ballot()
    assert (vote.step, vote.should_commit) == (4, False)


def test_another_manager_learns_after_which_quorum_a_worker_asks_and_what_it_got() -> None:
    calls = WorkerCalls("w")
    first, second = (WorkerRequest(group_rank=0, step=3, question=each) for each in (7, 8))
    report = PhaseReport(Phase.TRAINING, 3)
    assert (calls.question(first).last_round, calls.report(report)) == (0, report)
    calls.answered(1, 2, round_=100)
    assert calls.report(report) == report, "there was none before"
    assert calls.question(second).last_round == 100
    assert calls.question(second).last_round == 100, "it asks again"
    calls.answered(1, 2, round_=101)
    assert calls.report(report) == dataclasses.replace(report, round_before=100)
    assert calls.question(first).last_round == 101
    assert calls.question(second).last_round == 0, "it has given one up"


def test_one_of_several_that_has_lost_an_update_is_in_the_step_of_the_others() -> None:
    round_ = training(worker(is_steady=True, group_world_size=2), STEADY)
    round_.summed(0.0)
    assert round_.report().went_on_to == 0, "it has asked"
    round_.vote(100.0, 10.0)
    round_.decide(Decide(True, fate=Fate.GOES_ON))
    round_.step.lose_update()
    assert (round_.step.state.step, round_.report().went_on_to) == (3, 4)
    round_.begin(REQUEST)
    assert (round_.goes_on, round_.report().went_on_to) == (True, 4)
    round_.vote(100.0, 10.0)
    assert round_.report().went_on_to == 4
    assert round_.ballot() == Vote(group_rank=0, step=4, should_commit=False, wish=Wish.SOME)
    round_.decide(Decide(False))
    assert round_.report().went_on_to == 0, "the step is over"
    round_.begin(REQUEST)
    asked = round_.question("", are_connections_broken=False)
    assert (round_.goes_on, asked.step, asked.agreed) == (False, 3, False)


def test_what_the_group_decides_counts_also_if_this_worker_saw_no_wish() -> None:
    round_ = training(worker(is_steady=True, group_world_size=2), STEADY)
    end_step(round_, 0.0, told=Fate.ENDS)
    round_.begin(REQUEST)
    assert not round_.goes_on


def test_a_spoiled_worker_that_may_not_begin_changes_nothing() -> None:
    round_ = in_term()
    round_.step.lose_update("it raised")
    round_.step.state = round_.step.state._replace(unhealed=False)
    before = round_.step.state
    with pytest.raises(RequestRefused):
        round_.begin(REQUEST)
    assert round_.step.state == before


# -- a long step (E3) ----------------------------------------------------------------------------

NEWS = {
    "this group is out": lambda round_: round_.peers.lost("a:1", "it hangs", 7),
    "a member waits in vain": lambda round_: round_.term_ends(TermEnds(7, 4, "b asks")),
}
OTHER_NEWS = {
    "another group is out": lambda round_: round_.peers.lost("b:1", "it died", 7),
    "it was out of an earlier quorum": lambda round_: round_.peers.lost("a:1", "it hangs", 6),
    "the step is the last one": lambda round_: round_.term_ends(TermEnds(7, 5, "b asks")),
    "another term is over": lambda round_: round_.term_ends(TermEnds(6, 4, "b asks")),
}


def long_step(size: int = 1, lasts_s: float = LISTEN_AFTER_S) -> Round:
    """Step 4, which is about to be voted on at 100 s; all sums are complete. ``lasts_s``: with the
    pause before it, in which the others may have waited already."""
    round_ = in_term(size, at=100.0 - lasts_s)
    round_.begin(REQUEST)
    round_.go_on()
    round_.summed(0.0)
    return round_


@pytest.mark.parametrize("why", NEWS)
def test_who_comes_late_to_the_vote_commits_nothing_that_the_others_have_given_up(why: str) -> None:
    """It may have stood still, so that its sums are complete and those of the others are not."""
    round_ = long_step()
    assert round_.listens(100.0)
    NEWS[why](round_)
    assert round_.vote(100.0, 10.0) == (Decide(False),)


@pytest.mark.parametrize("why", OTHER_NEWS)
def test_other_news_change_nothing_in_a_step_whose_sums_are_complete(why: str) -> None:
    round_ = long_step()
    OTHER_NEWS[why](round_)
    assert round_.vote(100.0, 10.0) == (Decide(True, fate=Fate.GOES_ON),)


@pytest.mark.parametrize("why", NEWS)
def test_in_a_short_step_no_news_are_awaited_before_the_vote(why: str) -> None:
    round_ = long_step(lasts_s=0.9 * LISTEN_AFTER_S)
    assert not round_.listens(100.0)
    NEWS[why](round_)
    assert round_.vote(100.0, 10.0) == (Decide(True, fate=Fate.GOES_ON),)


def test_only_a_worker_that_decides_alone_in_a_quorum_listens() -> None:
    assert not long_step(size=2).listens(100.0)
    round_ = worker()
    round_.begin(REQUEST)
    round_.ask(0.0)
    assert not round_.listens(100.0)
    assert training(worker()).listens(200.0)


# -- wishes --------------------------------------------------------------------------------------

WISHES = {
    "a group waits": lambda round_: round_.peers.waits("c:1"),
    "it has to end": lambda round_: round_.drain("SIGTERM"),
    "the manager says so": lambda round_: round_.term_ends(TermEnds(7, None, "it moves")),
}


@pytest.mark.parametrize("why", WISHES)
def test_what_a_worker_wishes_a_question_for(why: str) -> None:
    round_ = in_term()
    round_.begin(REQUEST)
    assert not round_.wants_question
    WISHES[why](round_)
    assert round_.wants_question


def test_news_about_another_quorum_is_no_wish() -> None:
    round_ = in_term()
    assert round_.term_ends(TermEnds(6, None, "it moves")) is None
    assert not round_.wants_question


@pytest.mark.parametrize(("others", "told"), [(0.0, Fate.BREAKS_OFF), (0.5, Fate.ENDS)])
def test_what_the_sum_does_not_show_to_all_is_known_to_nobody_else(
    others: float, told: Fate
) -> None:
    round_ = in_term()
    round_.begin(REQUEST)
    round_.summed(0.0, False)
    round_.summed(others)
    assert round_.vote(100.0, 10.0) == (Decide(True, fate=told),)
    round_.decide(Decide(True, fate=told))
    round_.step.end_update()
    round_.begin(REQUEST)
    assert not round_.goes_on
    assert round_.question("", are_connections_broken=False).agreed is (told is Fate.ENDS)


def test_what_one_worker_alone_has_seen_in_the_step_before_is_over() -> None:
    round_ = in_term()
    round_.begin(REQUEST)
    round_.summed(0.0, False)
    assert round_.wish is Wish.ALONE
    round_.begin(REQUEST)
    round_.answered(STEADY)
    round_.summed(0.0)
    assert round_.wish is Wish.NONE


def test_a_wish_is_over_with_the_question() -> None:
    wish = TermEnds(7, None, "it moves")
    round_ = in_term(wishes=1.0)
    round_.term_ends(wish)
    round_.begin(REQUEST)
    round_.answered(STEADY)
    assert not round_.wants_question
    round_ = in_term(wishes=1.0)
    round_.begin(REQUEST)
    round_.term_ends(wish)  # it overtakes the answer
    round_.answered(STEADY)
    assert round_.wants_question


# -- the news that a term is over ----------------------------------------------------------------


def test_a_step_that_is_in_vain_is_given_up() -> None:
    round_ = in_term()
    round_.begin(REQUEST)
    assert round_.term_ends(TermEnds(7, 5, "b asks")) is None, "it finishes step 4"
    assert round_.term_ends(TermEnds(7, 4, "b asks")) == LoseMember(7, "b asks")


@pytest.mark.parametrize("ends", [TermEnds(6, 4, "b asks"), TermEnds(8, 4, "b asks")])
def test_the_end_of_another_term_is_of_no_concern(ends: TermEnds) -> None:
    round_ = in_term()
    round_.begin(REQUEST)
    assert round_.term_ends(ends) is None
    end_step(round_)
    round_.begin(REQUEST)
    assert round_.goes_on


def test_the_earliest_end_counts() -> None:
    round_ = in_term()
    assert round_.term_ends(TermEnds(7, 4, "b asks")) is None, "no step is under way"
    assert round_.term_ends(TermEnds(7, 6, "c asks")) is None
    round_.begin(REQUEST)
    assert not round_.goes_on


def test_an_end_that_was_told_before_the_quorum_came_counts() -> None:
    round_ = worker(is_steady=True)
    round_.begin(REQUEST)
    round_.ask(100.0)
    assert round_.term_ends(TermEnds(7, 3, "b asks")) is None
    round_.answered(STEADY)
    (left, *_) = [each for each in round_.entered() if isinstance(each, LeaveMembers)]
    assert str(left.reason) == str(QuorumFailed("b asks"))


def test_an_end_that_is_told_while_the_members_connect_counts() -> None:
    """The backend waits for a member that asks alone: it has not received the answer, say."""
    round_ = worker(is_steady=True)
    round_.begin(REQUEST)
    round_.ask(100.0)
    round_.answered(STEADY)
    assert round_.entered() == (MeetMembers(anew=True),)
    assert round_.term_ends(TermEnds(6, 3, "b asks")) is None
    assert round_.term_ends(TermEnds(7, 4, "b asks")) is None
    assert round_.term_ends(TermEnds(7, 3, "b asks")) == LoseMember(7, "b asks")
    (left, *_) = [each for each in round_.met(None) if isinstance(each, LeaveMembers)]
    assert str(left.reason) == str(QuorumFailed("b asks"))


def test_an_end_that_overtakes_an_answer_that_keeps_the_quorum_counts() -> None:
    round_ = in_term(wishes=1.0)
    round_.begin(REQUEST)
    round_.ask(101.0)
    assert round_.term_ends(TermEnds(7, 4, "b asks again")) is None
    assert round_.answered(dataclasses.replace(STEADY, max_step=4)) == (MeetMembers(anew=False),)
    (left, *_) = [each for each in round_.met(None) if isinstance(each, LeaveMembers)]
    assert str(left.reason) == str(QuorumFailed("b asks again"))


def test_who_has_to_heal_is_not_in_a_steady_quorum_and_asks() -> None:
    round_ = worker(is_steady=True)
    round_.begin(REQUEST)
    round_.ask(100.0)
    meeting(round_, BEHIND)
    round_.summed(0.0)
    assert round_.wish is Wish.SOME
