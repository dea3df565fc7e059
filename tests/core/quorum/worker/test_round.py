"""Tests of a worker's round: what is ordered when, and what an error becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.term import Fate
from torchft_svc.core.quorum.types import Resumed, Vote, WorkerRequest
from torchft_svc.core.quorum.worker.peers import LoseMember, Peers
from torchft_svc.core.quorum.worker.round import Round, RoundRequest, WorkerRules
from torchft_svc.core.quorum.worker.round_orders import (
    AskDecision,
    AskManager,
    BeginTraining,
    Decide,
    EnterQuorum,
    ExpectNoState,
    FetchState,
    LeaveMembers,
    LoseDecision,
    MeetMembers,
    OfferState,
    Order,
    RefuseState,
    Warn,
)
from torchft_svc.core.quorum.worker.step import Participation, StepMachine
from torchft_svc.core.quorum.worker.worker_calls import WorkerCalls
from torchft_svc.core.route import RETRY_S
from torchft_svc.errors import (
    CheckpointError,
    CommitFailed,
    DeadlineExceeded,
    Drained,
    GivenUp,
    GroupLeft,
    OperationsDiffer,
    QuorumFailed,
    RequestRefused,
    Unauthorized,
    Unreachable,
)

GONE = Unreachable("manager", "m:1", "it is gone")
FAILED = QuorumFailed("nobody else is there")
BROKEN = QuorumFailed("connection reset")


QUORUM = QuorumResult(
    quorum_id=7,
    group_rank=0,
    replica_rank=0,
    replica_world_size=2,
    max_step=3,
    max_replica_rank=0,
    max_world_size=2,
    store_address="a.example:2",
    recover_src_replica_rank=None,
    recover_src_manager_address="",
    recover_dst_replica_ranks=(),
    recover_extra_src_manager_addresses=(),
    recover_extra_dst_replica_ranks=(),
    commit_failures=0,
    replica_ids=("a:1", "b:1"),
)
BEHIND = dataclasses.replace(
    QUORUM, max_replica_rank=None, max_world_size=1, recover_src_replica_rank=1
)
FIRST = dataclasses.replace(QUORUM, max_step=0, max_replica_rank=0)


def worker(step: int = 3, **rules: object) -> Round:
    machine = StepMachine()
    machine.restore(step, step)
    return Round(WorkerRules(**rules), machine)  # type: ignore[arg-type]


def asking(round_: Round, **request: object) -> Round:
    """A step begins at 100 s, and its quorum is asked for."""
    round_.begin(RoundRequest(timeout_s=60.0, **request))  # type: ignore[arg-type]
    assert round_.ask(100.0) == (AskManager(0.0, 160.0),)
    round_.question("here", are_connections_broken=False)
    return round_


def meeting(
    round_: Round, quorum: QuorumResult = QUORUM, problem: Exception | None = None
) -> list[Order]:
    """What follows from the quorum on."""
    assert round_.answered(quorum) == (EnterQuorum(),)
    assert round_.entered() == (MeetMembers(anew=True),)
    return list(round_.met(problem))


def training(round_: Round | None = None, quorum: QuorumResult = QUORUM) -> Round:
    """Its members are met."""
    round_ = asking(round_ or worker())
    meeting(round_, quorum)
    return round_


def kinds(orders: Sequence[Order]) -> list[type]:
    return [type(order) for order in orders]


# -- the question ------------------------------------------------------------------------------


def test_the_question_tells_the_step_and_what_has_become_of_the_ones_before() -> None:
    round_ = asking(worker(group_rank=2), shrink_only=True, layout="x")
    expected = WorkerRequest(
        group_rank=2,
        step=3,
        checkpoint_address="here",
        shrink_only=True,
        question=1,
        layout="x",
    )
    assert round_.question("here", are_connections_broken=False) == expected


def test_only_a_worker_that_had_connections_asks_for_new_ones() -> None:
    round_ = asking(worker())
    assert round_.question("", are_connections_broken=True).commit_failures == 0
    meeting(round_)
    round_.give_up()
    asking(round_)
    assert round_.question("", are_connections_broken=False).commit_failures == 0
    assert round_.question("", are_connections_broken=True).commit_failures == 1


def test_a_manager_that_is_started_anew_is_asked_again_for_as_long_as_patience_lasts() -> None:
    round_ = asking(worker(patience_s=5.0))
    again = (AskManager(RETRY_S, 160.0),)
    assert round_.unanswered(GONE, 110.0) == again
    assert round_.unanswered(GONE, 114.9) == again
    assert round_.unanswered(GONE, 114.96) == ()
    assert round_.error is GONE


@pytest.mark.parametrize(
    ("error", "now", "is_over"),
    [
        (GONE, 159.96, False),  # the deadline
        (GONE, 101.0, True),
        (Unreachable("lighthouse", "l:1", "it is gone"), 101.0, False),
        (DeadlineExceeded("quorum", 60.0), 101.0, False),
        (FAILED, 101.0, False),
    ],
)
def test_whatever_else_fails_is_not_asked_again(
    error: Exception, now: float, is_over: bool
) -> None:
    round_ = asking(worker(patience_s=1000.0))
    assert round_.unanswered(error, now, is_manager_over=is_over) == ()
    assert round_.error is error
    assert round_.step.state.phase is Phase.TRAINING
    assert not round_.may_reduce


def test_a_repeated_question_may_say_something_else() -> None:
    round_ = asking(worker())
    round_.drain("SIGTERM")
    assert round_.question("", are_connections_broken=False).drain_reason == "SIGTERM"


def test_a_manager_is_told_what_the_one_before_had_told() -> None:
    calls = WorkerCalls("w")
    calls.answered(9, 4, 100)
    calls.answered(8, 3, 101)
    asked = calls.question(WorkerRequest(group_rank=0, step=1))
    assert (asked.worker_id, asked.last_quorum_id, asked.last_num_groups) == ("w", 9, 4)
    vote = calls.ballot(Vote(group_rank=0, step=1, should_commit=True))
    assert (vote.worker_id, vote.round) == ("w", 101)


# -- when the program waits -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "rules", "is_told_to_end", "waits"),
    [
        (0, {}, False, True),
        (0, {"init_sync": False}, False, False),
        (3, {}, False, False),
        (3, {"use_async_quorum": False}, False, True),
        (3, {}, True, True),
        (3, {"group_world_size": 2}, True, False),
    ],
)
def test_when_the_quorum_is_waited_for(
    step: int, rules: dict[str, object], is_told_to_end: bool, waits: bool
) -> None:
    round_ = worker(step, **rules)
    if is_told_to_end:
        assert round_.drain("it may end")
        assert not round_.drain("again")
    round_.begin(RoundRequest(timeout_s=1.0))
    assert round_.waits_for_quorum is waits
    assert round_.drain_reason == ("it may end" if is_told_to_end else None)


def test_a_step_that_may_not_begin_changes_nothing() -> None:
    round_ = training()
    round_.step.begin_vote()
    round_.decide(Decide(True))
    round_.step.lose_update("it raised")
    asking(round_)
    round_.answered(QUORUM)
    round_.met(None)
    quorum, state = round_.quorum, round_.step.state
    assert isinstance(state.error, RequestRefused), "nobody heals it"
    with pytest.raises(RequestRefused):
        round_.begin(RoundRequest(timeout_s=1.0))
    assert (round_.quorum, round_.step.state) == (quorum, state)


# -- the members -------------------------------------------------------------------------------


def test_who_trains_with_others_meets_them_once() -> None:
    round_ = asking(worker())
    assert round_.answered(QUORUM) == (EnterQuorum(),)
    assert round_.peers.change() == "2 groups: a, b"
    assert round_.has_connected
    assert round_.entered() == (MeetMembers(anew=True),)
    assert round_.met(None) == (ExpectNoState(), BeginTraining())
    assert round_.step.state.participation == Participation(
        participating_rank=0, num_participants=2
    )
    round_.give_up()
    asking(round_)
    assert round_.answered(QUORUM) == (MeetMembers(anew=False),)
    assert not round_.has_connected
    assert round_.met(None) == (ExpectNoState(), BeginTraining())


def test_connections_that_broke_are_an_error_of_the_step_and_not_met_under_the_same_id() -> None:
    round_ = training()
    round_.give_up()
    asking(round_)
    assert round_.answered(QUORUM) == (MeetMembers(anew=False),)
    assert round_.met(BROKEN) == (ExpectNoState(), LeaveMembers(BROKEN), BeginTraining())
    assert round_.step.state.error is BROKEN
    assert round_.error is None, "there is a quorum"


def test_who_knows_of_a_loss_already_does_not_meet_the_others() -> None:
    round_ = asking(worker())
    assert round_.peers.lost("b:1", "killed", 7) is None
    round_.answered(QUORUM)
    _, leave, begin = round_.entered()
    assert isinstance(leave, LeaveMembers)
    assert str(leave.reason) == "no quorum: b:1 is out: killed"
    assert begin == BeginTraining()


def test_a_loss_before_the_question_may_be_in_the_answer() -> None:
    round_ = worker()
    round_.peers.lost("b:1", "killed", 70)
    asking(round_)
    round_.answered(QUORUM)
    assert round_.entered() == (MeetMembers(anew=True),)


def test_a_loss_while_training_is_told_to_the_process_group() -> None:
    peers = training().peers
    assert peers.lost("b:1", "killed", 6) is None, "it is back in this quorum"
    assert peers.lost("c:1", "killed", 7) is None
    assert peers.lost("b:1", "killed", 7) == LoseMember(7, "b:1 is out: killed")
    assert peers.who_is_lost() == "lost group b: killed"


def test_a_line_that_ends_puts_out_who_is_not_alone() -> None:
    assert worker().peers.cut() is None
    alone = dataclasses.replace(QUORUM, replica_ids=("a:1",), replica_world_size=1)
    assert training(quorum=alone).peers.cut() is None
    cut = training().peers.cut()
    assert cut is not None
    assert cut.quorum_id == 7


STEADY = dataclasses.replace(QUORUM, steady=True)


@pytest.mark.parametrize("group_world_size", [1, 2])
@pytest.mark.parametrize(
    ("quorum", "goes_on"), [(STEADY, True), (QUORUM, False)], ids=["in a term", "each step asks"]
)
def test_e7_a_group_survives_its_manager_in_a_term_only(
    quorum: QuorumResult, group_world_size: int, goes_on: bool
) -> None:
    round_ = training(worker(group_world_size=group_world_size), quorum)
    assert (round_.line_broke() is None) == goes_on
    resumed = Resumed(replica_id="a:1", quorum_id=7, step=3, num_groups=2)
    assert round_.resumed() == (resumed if goes_on else None)


@pytest.mark.parametrize(("group_world_size", "reached"), [(1, 4), (2, 3)])
def test_e7_one_of_several_workers_does_not_know_what_its_group_has_reached(
    group_world_size: int, reached: int
) -> None:
    round_ = training(worker(group_world_size=group_world_size), STEADY)
    round_.summed(0.0)
    round_.vote(101.0, 60.0)
    round_.decide(Decide(True, fate=Fate.GOES_ON))
    round_.step.end_update()
    round_.begin(RoundRequest(timeout_s=60.0))
    resumed = round_.resumed()
    assert resumed is not None
    assert resumed.step == reached


def test_e7_who_asks_is_not_resumed() -> None:
    """Its group may be another incarnation by then."""
    round_ = training(quorum=STEADY)
    round_.vote(101.0, 60.0)
    round_.decide(Decide(False))
    assert asking(round_).resumed() is None


def test_only_the_group_that_was_assigned_counts_as_a_lost_source() -> None:
    peers = Peers()
    quorum = dataclasses.replace(BEHIND, replica_ids=("a:1", "b:1", "c:1"))
    peers.lost("c:1", "its session ended", 7)
    peers.lost("b:1", "its session ended", 6)  # it came back for this quorum
    peers.check_source(quorum)
    peers.lost("b:1", "no sign of life for 5 s", 7)
    with pytest.raises(QuorumFailed, match="b:1 is out: no sign of life for 5 s"):
        peers.check_source(quorum)
    peers.check_source(dataclasses.replace(quorum, replica_ids=()))


def test_a_group_may_be_out_itself_until_a_later_quorum() -> None:
    peers = Peers()
    peers.lost("a:1", "it hangs: training in step 1 for 9.0 s", 7)
    with pytest.raises(QuorumFailed, match="a:1 is out: it hangs"):
        peers.check_losses(QUORUM)
    peers.check_losses(dataclasses.replace(QUORUM, quorum_id=8))


def test_why_there_is_no_quorum_is_said_once_until_it_changes() -> None:
    peers = Peers()
    assert peers.no_quorum_yet("late news", 100) == "", "nobody has asked"
    peers.asks(100)
    assert peers.no_quorum_yet("b is slow", 104.9) == "", "as in many a step"
    assert peers.no_quorum_yet("b is slow", 105) == "no quorum for 5 s: b is slow"
    assert peers.no_quorum_yet("b is slow", 134.9) == ""
    assert peers.no_quorum_yet("b is slow", 135) == "no quorum for 35 s: b is slow"
    assert peers.no_quorum_yet("c is slow", 139.9) == "", "it may change all the time"
    peers.asks(139.9)  # the last question got an error
    unknown = "the lighthouse gave no reason"
    assert peers.no_quorum_yet("", 140) == f"no quorum for 40 s: {unknown}"
    peers.answered(QUORUM)
    assert peers.no_quorum_yet("", 300) == ""
    peers.asks(300)
    assert peers.no_quorum_yet("", 305) == f"no quorum for 5 s: {unknown}"
    peers.answered(QUORUM)
    peers.asks(305)
    assert peers.no_quorum_yet("", 311) == "", "each step takes so long"


def test_who_waits_to_join_is_counted_until_it_is_in() -> None:
    peers = Peers()
    peers.waits("b:1")
    peers.waits("c:1")
    peers.waits("c:1")
    assert peers.num_waiting == 2
    peers.answered(QUORUM)
    assert peers.num_waiting == 1
    peers.asks(1.0)
    assert peers.num_waiting == 0


# -- healing -----------------------------------------------------------------------------------


def test_who_is_behind_fetches_while_it_trains_and_contributes_nothing() -> None:
    round_ = asking(worker(1))
    assert meeting(round_, BEHIND) == [BeginTraining(), FetchState()]
    assert round_.step.state.phase is Phase.HEALING
    assert round_.step.state.participation.participating_rank is None
    assert not round_.heals_first
    round_.fetched()
    assert round_.step.state.phase is Phase.TRAINING


@pytest.mark.parametrize(
    ("step", "rules", "quorum"),
    [
        (0, {}, dataclasses.replace(BEHIND, max_step=0)),
        (1, {"use_async_quorum": False}, BEHIND),
    ],
)
def test_who_heals_first_contributes(
    step: int, rules: dict[str, object], quorum: QuorumResult
) -> None:
    round_ = asking(worker(step, **rules))
    assert round_.waits_for_heal
    assert meeting(round_, quorum) == [BeginTraining(), FetchState()]
    assert round_.heals_first
    assert round_.step.state.participation.participating_rank == 0


def test_who_is_not_believed_has_begun_too_early() -> None:
    """At step 0 all contribute, but this worker did not know that it is one of those."""
    round_ = asking(worker(9))
    orders = meeting(round_, dataclasses.replace(BEHIND, max_step=0))
    assert kinds(orders) == [Warn, LeaveMembers, BeginTraining, FetchState]
    assert "step 9 of this group is not believed" in str(orders[0])
    assert isinstance(round_.step.state.error, QuorumFailed)


def test_a_heal_that_is_put_off_disturbs_nobody() -> None:
    round_ = asking(worker(1), allow_heal=False)
    orders = meeting(round_, BEHIND)
    assert kinds(orders) == [ExpectNoState, Warn, BeginTraining]
    assert round_.step.state.unhealed


def test_a_heal_that_is_put_off_with_broken_connections_leaves() -> None:
    round_ = asking(worker(1), allow_heal=False)
    assert LeaveMembers in kinds(meeting(round_, BEHIND, BROKEN))


def test_state_is_offered_by_who_is_whole() -> None:
    source = dataclasses.replace(
        QUORUM, recover_dst_replica_ranks=(1,), recover_extra_dst_replica_ranks=(2,)
    )
    round_ = asking(worker())
    offer = OfferState((1,), (2,), at_once=False)
    assert meeting(round_, source) == [ExpectNoState(), BeginTraining(), offer]
    at_once = OfferState((1,), (2,), at_once=True)
    round_ = asking(worker(0))
    assert meeting(round_, dataclasses.replace(source, max_step=0))[-1] == at_once
    round_ = asking(worker(), allow_heal=False)
    assert meeting(round_, source) == [ExpectNoState(), BeginTraining()]


def test_state_is_refused_by_who_spoiled_it() -> None:
    round_ = training()
    round_.step.begin_vote()
    round_.decide(Decide(True))
    round_.step.lose_update("it raised")
    asking(round_)
    round_.answered(dataclasses.replace(QUORUM, recover_dst_replica_ranks=(1,)))
    orders = round_.met(None)
    assert kinds(orders) == [ExpectNoState, LeaveMembers, BeginTraining, RefuseState]


# -- what an error becomes ----------------------------------------------------------------------


def test_without_a_quorum_the_members_of_the_last_one_are_left() -> None:
    first = asking(worker())
    assert first.unanswered(FAILED, 101.0) == (), "it has met nobody"
    round_ = training()
    round_.give_up()
    asking(round_)
    assert round_.unanswered(FAILED, 101.0) == (LeaveMembers(FAILED),)
    assert round_.step.state.error is FAILED


def test_a_heal_that_fails_is_owed_and_leaves_nobody() -> None:
    round_ = training(worker(1), BEHIND)
    lost = CheckpointError("b", "it is gone")
    assert round_.failed(lost) == ()
    assert (round_.step.state.error, round_.step.state.unhealed) == (lost, True)
    assert round_.error is None


def test_a_heal_that_fails_where_all_contribute_leaves() -> None:
    round_ = training(worker(0), dataclasses.replace(BEHIND, max_step=0))
    assert kinds(round_.failed(CheckpointError("b", "it is gone"))) == [LeaveMembers]


def test_an_offer_that_fails_is_an_error_of_the_step() -> None:
    round_ = training()
    assert round_.failed(BROKEN) == (LeaveMembers(BROKEN),)
    assert round_.step.state.error is BROKEN


def test_an_error_of_a_step_is_told_to_those_that_count_on_it() -> None:
    round_ = training()
    epoch = round_.step.state.epoch
    assert round_.broke(BROKEN, epoch - 1) == ()
    assert round_.step.state.error is None
    assert round_.broke(BROKEN, epoch) == (LeaveMembers(BROKEN),)
    healing = training(worker(1), BEHIND)
    assert healing.broke(BROKEN, healing.step.state.epoch) == ()
    differs = OperationsDiffer("a sum here, nothing there")
    assert healing.broke(differs, healing.step.state.epoch) == (LeaveMembers(differs),)
    healing.step.fail_heal(BROKEN)
    healing.step.begin_vote()
    assert healing.broke(differs, healing.step.state.epoch) == (), "its sums are over"


def test_a_step_that_is_given_up_leaves_its_members() -> None:
    round_ = training()
    assert kinds(round_.give_up()) == [LeaveMembers]
    round_.step.begin_vote()
    round_.decide(Decide(False))
    assert round_.give_up() == ()


def test_a_round_that_nobody_carries_out_has_no_quorum() -> None:
    round_ = worker()
    round_.begin(RoundRequest(timeout_s=1.0))
    round_.withdraw(FAILED)
    assert round_.error is FAILED
    assert round_.step.state.phase is Phase.TRAINING
    assert round_.step.state.error is FAILED


# -- the end of a group ---------------------------------------------------------------------------


def test_a_group_that_has_left_ends_without_leaving_its_members_in_a_hurry() -> None:
    round_ = training()
    round_.give_up()
    asking(round_)
    assert round_.unanswered(GroupLeft("drained"), 101.0) == ()
    with pytest.raises(Drained, match="drained"):
        round_.check_left()


def test_who_has_said_that_it_ends_does_not_wait_for_a_manager_that_is_gone() -> None:
    told_late = asking(worker())
    told_late.drain("SIGTERM")
    told_late.unanswered(FAILED, 101.0)
    told_late.check_left()  # its peers may wait for it
    told = worker()
    told.drain("SIGTERM")
    asking(told).unanswered(FAILED, 101.0)
    with pytest.raises(Drained, match="SIGTERM; it could not leave: "):
        told.check_left()


def test_who_is_refused_goes_on_only_if_trying_again_may_help() -> None:
    refused = asking(worker())
    refused.unanswered(RequestRefused("wrong rank"), 101.0)
    with pytest.raises(RequestRefused, match="wrong rank"):
        refused.check_next()
    over = asking(worker())
    ends = GivenUp("manager", "b:1", "it ends again and again")
    over.unanswered(ends, 101.0, is_manager_over=True)
    with pytest.raises(GivenUp, match="again and again"):
        over.check_next()
    stranger = asking(worker())
    stranger.unanswered(Unauthorized("set TORCHFT_TOKEN"), 101.0)
    with pytest.raises(Unauthorized):
        stranger.check_next()
    known = training()
    known.give_up()
    asking(known).unanswered(Unauthorized("set TORCHFT_TOKEN"), 101.0)
    known.check_next()
    unlucky = asking(worker())
    unlucky.unanswered(FAILED, 101.0)
    unlucky.check_next()


# -- the vote ------------------------------------------------------------------------------------


def test_a_worker_that_is_alone_decides() -> None:
    assert training().vote(100.0, 10.0) == (Decide(True, fate=Fate.ENDS),)
    failed = training()
    failed.failed(BROKEN)
    assert failed.vote(100.0, 10.0) == (Decide(False),)


def voting(*, well: bool, timeout_s: float = 10.0) -> Round:
    round_ = training(worker(group_world_size=2, group_rank=1))
    if not well:
        round_.failed(BROKEN)
    assert round_.vote(100.0, timeout_s) == (AskDecision(0.0, 100.0 + timeout_s),)
    assert round_.ballot() == Vote(group_rank=1, step=3, should_commit=well)
    return round_


@pytest.mark.parametrize("well", [True, False])
def test_a_decision_and_a_refusal_are_final(well: bool) -> None:
    for committed in (True, False):
        assert voting(well=well).voted(committed, Fate.ENDS) == (Decide(committed, fate=Fate.ENDS),)
    gave_up = CommitFailed("group rank 0 gave up")
    assert voting(well=well).vote_failed(gave_up, 101.0) == (Decide(False, gave_up),)


@pytest.mark.parametrize("error", [DeadlineExceeded("vote", 10.0), RequestRefused("no round")])
def test_a_yes_whose_decision_is_lost_ends_the_worker_and_a_no_decides(
    error: DeadlineExceeded | RequestRefused,
) -> None:
    assert voting(well=True).vote_failed(error, 101.0) == (LoseDecision(error),)
    assert voting(well=False).vote_failed(error, 101.0) == (Decide(False, error),)


@pytest.mark.parametrize(
    ("well", "timeout_s", "lost_at"),
    [(True, 60.0, 116.0), (True, 10.0, 110.0), (False, 60.0, 106.0)],
)
def test_a_manager_that_is_started_anew_is_asked_for_the_decision_again(
    well: bool, timeout_s: float, lost_at: float
) -> None:
    """Longer by a worker that would have to end."""
    round_, asks = voting(well=well, timeout_s=timeout_s), AskDecision(RETRY_S, 100.0 + timeout_s)
    assert round_.vote_failed(GONE, 101.0) == (asks,)
    assert round_.vote_failed(GONE, lost_at - 0.1) == (asks,)
    last = round_.vote_failed(GONE, lost_at)
    assert last == ((LoseDecision(GONE) if well else Decide(False, GONE)),)


def test_a_commit_counts_in_the_quorum_of_its_round() -> None:
    round_ = training()
    round_.vote(100.0, 10.0)
    round_.decide(Decide(True))
    assert (round_.step.state.step, round_.step.state.quorum_id) == (4, 7)
