"""Tests of a worker's round: what follows from each input, and what an error becomes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.term import Fate
from torchft_svc.core.quorum.types import Resumed, Vote, WorkerRequest
from torchft_svc.core.quorum.worker.peers import LoseMember, Peers
from torchft_svc.core.quorum.worker.round import (
    NOTHING,
    AskDecision,
    AskManager,
    Decide,
    EnterQuorum,
    FetchPreview,
    FetchState,
    LoseDecision,
    MeetMembers,
    OfferState,
    Prepare,
    Ready,
    RefuseState,
    Round,
    RoundRequest,
    WorkerCalls,
    WorkerRules,
)
from torchft_svc.core.quorum.worker.step import Participation, StepMachine
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


ENTER = Ready(then=EnterQuorum())
MEET_ANEW, CHECK_CONNECTIONS = (Ready(then=MeetMembers(anew=anew)) for anew in (True, False))
TRAIN = Ready(expects_no_state=True, begins_training=True)
TRAIN_AND_HEAL = Ready(begins_training=True, then=FetchState())


def worker(step: int = 3, **rules: object) -> Round:
    machine = StepMachine()
    machine.restore(step, step)
    return Round(WorkerRules(**rules), machine)  # type: ignore[arg-type]


def asking(round_: Round, **request: object) -> Round:
    """Begin a step at 100 s, whose quorum is asked for."""
    is_first = round_.peers.quorum is None
    ready = round_.begin_step(RoundRequest(timeout_s=60.0, **request), 100.0)  # type: ignore[arg-type]
    if is_first:
        assert ready == Ready(then=Prepare(expects_state=bool(request.get("allow_heal", True))))
        ready = round_.prepared(100.0)
    assert ready == Ready(then=AskManager(0.0, 160.0))
    round_.question("here", are_connections_broken=False)
    return round_


def meeting(
    round_: Round, quorum: QuorumResult = QUORUM, problem: Exception | None = None
) -> Ready:
    """Enter ``quorum``; returns what follows when its members are met."""
    assert round_.quorum_received(quorum) == ENTER
    assert round_.quorum_entered() == MEET_ANEW
    return round_.members_met(problem)


def training(round_: Round | None = None, quorum: QuorumResult = QUORUM) -> Round:
    """Enter ``quorum``, and meet its members."""
    round_ = asking(round_ or worker())
    meeting(round_, quorum)
    return round_


# -- the preview -------------------------------------------------------------------------------


def test_k1_a_worker_that_starts_fetches_a_preview_before_it_asks() -> None:
    round_ = worker(catches_up=True)
    request = RoundRequest(timeout_s=60.0)
    assert round_.begin_step(request, 100.0) == Ready(then=Prepare(expects_state=True))
    assert round_.prepared(101.0) == Ready(then=FetchPreview())
    # The deadline of the question begins when nobody is waited for any more.
    assert round_.preview_fetched(500.0) == Ready(then=AskManager(0.0, 560.0))


def test_k1_only_the_first_question_waits_for_a_preview() -> None:
    round_ = worker(catches_up=True)
    request = RoundRequest(timeout_s=60.0)
    round_.begin_step(request, 100.0)
    round_.prepared(100.0)
    round_.preview_fetched(100.0)
    meeting(round_)
    round_.abandon_step()
    assert round_.begin_step(request, 200.0) == Ready(then=AskManager(0.0, 260.0))


def test_a_worker_that_may_not_heal_fetches_no_preview() -> None:
    round_ = worker(catches_up=True)
    round_.begin_step(RoundRequest(timeout_s=60.0, allow_heal=False), 100.0)
    assert round_.prepared(100.0) == Ready(then=AskManager(0.0, 160.0))


# -- a prepared spare ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "wanted", "waits"),
    [
        ({"is_spare": True}, {"may_compute_ahead": True}, False),
        ({"is_spare": True}, {}, True),
        ({}, {"may_compute_ahead": True}, True),
        ({"is_spare": True, "group_world_size": 2}, {"may_compute_ahead": True}, True),
        ({"is_spare": True, "use_async_quorum": False}, {"may_compute_ahead": True}, True),
        ({"is_spare": True}, {"may_compute_ahead": True, "allow_heal": False}, True),
    ],
)
def test_g7_a_spare_computes_its_first_step_while_it_stands_by(
    rules: dict[str, Any], wanted: dict[str, Any], waits: bool
) -> None:
    round_ = worker(0, **rules)
    round_.begin_step(RoundRequest(timeout_s=60.0, **wanted), 100.0)
    assert round_.waits_for_quorum == waits
    assert round_.computes_ahead == (not waits)


def test_g7_only_the_first_step_of_a_spare_does_not_wait() -> None:
    round_ = worker(0, is_spare=True)
    request = RoundRequest(timeout_s=60.0, may_compute_ahead=True)
    round_.begin_step(request, 100.0)
    round_.prepared(100.0)
    meeting(round_, BEHIND)
    assert not round_.waits_for_quorum, "it has not waited when it began"
    round_.state_fetched()
    round_.abandon_step()
    round_.begin_step(request, 200.0)
    assert round_.waits_for_quorum


def test_g7_a_spare_that_has_computed_ahead_begins_anew_if_the_job_is_at_step_0() -> None:
    # There all groups contribute, from equal weights: it would have had to heal first.
    round_ = worker(0, is_spare=True)
    round_.begin_step(RoundRequest(timeout_s=60.0, may_compute_ahead=True), 100.0)
    round_.prepared(100.0)
    at_0 = dataclasses.replace(BEHIND, max_step=0)
    assert "began before its heal" in str(meeting(round_, at_0).leave)


# -- the question ------------------------------------------------------------------------------


def test_the_question_reports_the_step_and_the_outcome_of_those_before() -> None:
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


def test_preparing_for_the_first_quorum_is_no_part_of_the_wait_for_it() -> None:
    round_ = worker()
    round_.begin_step(RoundRequest(timeout_s=60.0), 100.0)
    assert round_.prepared(190.0) == Ready(then=AskManager(0.0, 250.0))
    assert round_.peers.record_no_quorum("nobody asks", 194.0) == "", "a wait of 4 s"


def test_only_a_worker_that_had_connections_asks_for_new_ones() -> None:
    round_ = asking(worker())
    assert round_.question("", are_connections_broken=True).commit_failures == 0
    meeting(round_)
    round_.abandon_step()
    asking(round_)
    assert round_.question("", are_connections_broken=False).commit_failures == 0
    assert round_.question("", are_connections_broken=True).commit_failures == 1


def test_a_restarted_manager_is_asked_again_while_patience_lasts() -> None:
    round_ = asking(worker(patience_s=5.0))
    again = Ready(then=AskManager(RETRY_S, 160.0))
    assert round_.question_failed(GONE, 110.0) == again
    assert round_.question_failed(GONE, 114.9) == again
    assert round_.question_failed(GONE, 114.96) == NOTHING
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
def test_after_any_other_failure_the_manager_is_not_asked_again(
    error: Exception, now: float, is_over: bool
) -> None:
    round_ = asking(worker(patience_s=1000.0))
    assert round_.question_failed(error, now, is_manager_over=is_over) == NOTHING
    assert round_.error is error
    assert round_.step.state.phase is Phase.TRAINING
    assert not round_.may_reduce


def test_a_repeated_question_may_differ_from_the_first_one() -> None:
    round_ = asking(worker())
    round_.drain("SIGTERM")
    assert round_.question("", are_connections_broken=False).drain_reason == "SIGTERM"


def test_calls_repeat_the_last_quorum_and_round_for_a_restarted_manager() -> None:
    calls = WorkerCalls("w")
    calls.record_answer(9, 4, 100)
    calls.record_answer(8, 3, 101)
    asked = calls.sign_question(WorkerRequest(group_rank=0, step=1))
    assert (asked.worker_id, asked.last_quorum_id, asked.last_num_groups) == ("w", 9, 4)
    vote = calls.sign_ballot(Vote(group_rank=0, step=1, should_commit=True))
    assert (vote.worker_id, vote.round) == ("w", 101)


# -- when the program waits -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "rules", "has_to_end", "waits"),
    [
        (0, {}, False, True),
        (0, {"init_sync": False}, False, False),
        (3, {}, False, False),
        (3, {"use_async_quorum": False}, False, True),
        (3, {}, True, True),
        (3, {"group_world_size": 2}, True, False),
    ],
)
def test_when_the_program_waits_for_the_quorum(
    step: int, rules: dict[str, object], has_to_end: bool, waits: bool
) -> None:
    round_ = worker(step, **rules)
    if has_to_end:
        assert round_.drain("it may end")
        assert round_.drain_until == math.inf
        assert not round_.drain("again", 60.0)
        assert not round_.drain("again", 70.0)
        assert (round_.drain_reason, round_.drain_until) == ("it may end", 60.0)
    round_.begin_step(RoundRequest(timeout_s=1.0), 100.0)
    assert round_.waits_for_quorum is waits
    assert round_.drain_reason == ("it may end" if has_to_end else None)


def test_a_step_that_may_not_begin_changes_nothing() -> None:
    round_ = training()
    round_.step.begin_vote()
    round_.apply_decision(Decide(True))
    round_.step.lose_update("it raised")
    asking(round_)
    round_.quorum_received(QUORUM)
    round_.members_met(None)
    quorum, state = round_.quorum, round_.step.state
    assert isinstance(state.error, RequestRefused), "nobody heals it"
    with pytest.raises(RequestRefused):
        round_.begin_step(RoundRequest(timeout_s=1.0), 100.0)
    assert (round_.quorum, round_.step.state) == (quorum, state)


# -- the members -------------------------------------------------------------------------------


def test_members_are_met_once_for_each_quorum_id() -> None:
    round_ = asking(worker())
    assert round_.quorum_received(QUORUM) == ENTER
    assert round_.peers.describe_change() == "2 groups: a, b"
    assert round_.has_connected
    assert round_.quorum_entered() == MEET_ANEW
    assert round_.members_met(None) == TRAIN
    assert round_.step.state.participation == Participation(
        participating_rank=0, num_participants=2
    )
    round_.abandon_step()
    asking(round_)
    assert round_.quorum_received(QUORUM) == CHECK_CONNECTIONS
    assert not round_.has_connected
    assert round_.members_met(None) == TRAIN


def test_broken_connections_fail_the_step_and_are_not_made_again_under_the_same_id() -> None:
    round_ = training()
    round_.abandon_step()
    asking(round_)
    assert round_.quorum_received(QUORUM) == CHECK_CONNECTIONS
    assert round_.members_met(BROKEN) == dataclasses.replace(TRAIN, leave=BROKEN)
    assert round_.step.state.error is BROKEN
    assert round_.error is None, "there is a quorum"


def test_members_are_not_met_if_a_loss_is_already_known() -> None:
    round_ = asking(worker())
    assert round_.peers.record_loss("b:1", "killed", 7) is None
    round_.quorum_received(QUORUM)
    ready = round_.quorum_entered()
    assert str(ready.leave) == "no quorum: b:1 is out: killed"
    assert ready == dataclasses.replace(TRAIN, leave=ready.leave)


def test_a_group_lost_before_the_question_may_be_in_the_answer() -> None:
    round_ = worker()
    round_.peers.record_loss("b:1", "killed", 70)
    asking(round_)
    round_.quorum_received(QUORUM)
    assert round_.quorum_entered() == MEET_ANEW


def test_a_loss_while_training_ends_operations_of_its_quorum_only() -> None:
    peers = training().peers
    assert peers.record_loss("b:1", "killed", 6) is None, "it is back in this quorum"
    assert peers.record_loss("c:1", "killed", 7) is None
    assert peers.record_loss("b:1", "killed", 7) == LoseMember(7, "b:1 is out: killed")
    assert peers.who_is_lost() == "lost group b: killed"


def test_the_end_of_the_stream_removes_a_group_that_is_not_alone() -> None:
    assert worker().peers.stream_ended() is None
    alone = dataclasses.replace(QUORUM, replica_ids=("a:1",), replica_world_size=1)
    assert training(quorum=alone).peers.stream_ended() is None
    cut = training().peers.stream_ended()
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
    assert (round_.stream_lost() is None) == goes_on
    resumed = Resumed(replica_id="a:1", quorum_id=7, step=3, num_groups=2)
    assert round_.membership_to_resume() == (resumed if goes_on else None)


@pytest.mark.parametrize(("group_world_size", "reached"), [(1, 4), (2, 3)])
def test_e7_one_of_several_workers_does_not_know_what_its_group_has_reached(
    group_world_size: int, reached: int
) -> None:
    round_ = training(worker(group_world_size=group_world_size), STEADY)
    round_.record_wishes(0.0)
    round_.begin_vote(101.0, 60.0)
    round_.apply_decision(Decide(True, fate=Fate.CONTINUES))
    round_.step.end_update()
    round_.begin_step(RoundRequest(timeout_s=60.0), 100.0)
    resumed = round_.membership_to_resume()
    assert resumed is not None
    assert resumed.step == reached


def test_e7_a_worker_that_asks_has_no_membership_to_resume() -> None:
    """The worker's group may be another incarnation when the answer comes."""
    round_ = training(quorum=STEADY)
    round_.begin_vote(101.0, 60.0)
    round_.apply_decision(Decide(False))
    assert asking(round_).membership_to_resume() is None


def test_only_the_assigned_group_counts_as_a_lost_source() -> None:
    peers = Peers()
    quorum = dataclasses.replace(BEHIND, replica_ids=("a:1", "b:1", "c:1"))
    peers.record_loss("c:1", "its session ended", 7)
    peers.record_loss("b:1", "its session ended", 6)  # it came back for this quorum
    peers.check_source(quorum)
    peers.record_loss("b:1", "no sign of life for 5 s", 7)
    with pytest.raises(QuorumFailed, match="b:1 is out: no sign of life for 5 s"):
        peers.check_source(quorum)


def test_a_group_may_be_out_itself_until_a_later_quorum() -> None:
    peers = Peers()
    peers.record_loss("a:1", "it hangs: training in step 1 for 9.0 s", 7)
    with pytest.raises(QuorumFailed, match="a:1 is out: it hangs"):
        peers.check_losses(QUORUM)
    peers.check_losses(dataclasses.replace(QUORUM, quorum_id=8))


def test_why_there_is_no_quorum_is_logged_once_until_it_changes() -> None:
    peers = Peers()
    assert peers.record_no_quorum("late news", 100) == "", "nobody has asked"
    peers.begin_question(100)
    assert peers.record_no_quorum("b is slow", 104.9) == "", "as in many a step"
    assert peers.record_no_quorum("b is slow", 105) == "no quorum for 5 s: b is slow"
    assert peers.record_no_quorum("b is slow", 134.9) == ""
    assert peers.record_no_quorum("b is slow", 135) == "no quorum for 35 s: b is slow"
    assert peers.record_no_quorum("c is slow", 139.9) == "", "it may change all the time"
    peers.begin_question(139.9)  # the last question got an error
    unknown = "the lighthouse gave no reason"
    assert peers.record_no_quorum("", 140) == f"no quorum for 40 s: {unknown}"
    peers.record_answer(QUORUM)
    assert peers.record_no_quorum("", 300) == ""
    peers.begin_question(300)
    assert peers.record_no_quorum("", 305) == f"no quorum for 5 s: {unknown}"
    peers.record_answer(QUORUM)
    peers.begin_question(305)
    assert peers.record_no_quorum("", 311) == "", "each step takes so long"


def test_a_newcomer_is_counted_until_it_is_a_member() -> None:
    peers = Peers()
    peers.record_newcomer("b:1")
    peers.record_newcomer("c:1")
    peers.record_newcomer("c:1")
    assert peers.num_waiting == 2
    peers.record_answer(QUORUM)
    assert peers.num_waiting == 1
    peers.begin_question(1.0)
    assert peers.num_waiting == 0


# -- healing -----------------------------------------------------------------------------------


def test_a_worker_behind_fetches_while_it_trains_and_contributes_nothing() -> None:
    round_ = asking(worker(1))
    assert meeting(round_, BEHIND) == TRAIN_AND_HEAL
    assert round_.step.state.phase is Phase.HEALING
    assert round_.step.state.participation.participating_rank is None
    assert not round_.heals_first
    round_.state_fetched()
    assert round_.step.state.phase is Phase.TRAINING


@pytest.mark.parametrize(
    ("step", "rules", "quorum"),
    [
        (0, {}, dataclasses.replace(BEHIND, max_step=0)),
        (1, {"use_async_quorum": False}, BEHIND),
    ],
)
def test_a_worker_that_heals_before_the_step_contributes(
    step: int, rules: dict[str, object], quorum: QuorumResult
) -> None:
    round_ = asking(worker(step, **rules))
    assert round_.waits_for_heal
    assert meeting(round_, quorum) == TRAIN_AND_HEAL
    assert round_.heals_first
    assert round_.step.state.participation.participating_rank == 0


def test_a_worker_whose_step_is_not_believed_has_begun_too_early() -> None:
    """All contribute at step 0, but this worker did not know that it is one of those."""
    round_ = asking(worker(9))
    ready = meeting(round_, dataclasses.replace(BEHIND, max_step=0))
    (warning,), error = ready.warnings, round_.step.state.error
    assert "step 9 of this group is not believed" in warning
    assert isinstance(error, QuorumFailed)
    assert ready == dataclasses.replace(TRAIN_AND_HEAL, warnings=(warning,), leave=error)


def test_a_postponed_heal_disturbs_no_other_group() -> None:
    round_ = asking(worker(1), allow_heal=False)
    ready = meeting(round_, BEHIND)
    assert len(ready.warnings) == 1
    assert ready == dataclasses.replace(TRAIN, warnings=ready.warnings)
    assert round_.step.state.unhealed


def test_a_postponed_heal_with_broken_connections_leaves_the_members() -> None:
    round_ = asking(worker(1), allow_heal=False)
    assert meeting(round_, BEHIND, BROKEN).leave is not None


def serving() -> QuorumResult:
    """A quorum in which one group heals from this worker's group, and another one in part."""
    return dataclasses.replace(
        QUORUM,
        replica_world_size=3,
        replica_ids=("a:1", "b:1", "c:1"),
        recover_dst_replica_ranks=(1,),
        recover_extra_dst_replica_ranks=(2,),
    )


def test_h12_a_worker_that_ends_knows_who_heals_from_it() -> None:
    round_ = asking(worker())
    meeting(round_, serving())
    assert round_.serves_in is None, "within a step it waits for nobody"
    round_.step.begin_vote()
    round_.apply_decision(Decide(True))
    assert (round_.serves_in, round_.receivers) == (7, ("b:1", "c:1"))
    round_.peers.record_loss("b:1", "killed", 7)
    assert round_.receivers == ("c:1",)
    round_.step.end_update()
    asking(round_)
    round_.question_failed(GroupLeft("drained"), 101.0)
    assert (round_.serves_in, round_.receivers) == (7, ("c:1",)), "b was lost before"


def test_h12_a_worker_from_which_nobody_heals_any_more_waits_for_nobody() -> None:
    round_ = asking(worker())
    for quorum in (serving(), dataclasses.replace(QUORUM, quorum_id=8)):
        meeting(round_, quorum)
        round_.step.begin_vote()
        round_.apply_decision(Decide(True))
        assert (round_.serves_in, len(round_.receivers)) == (
            (7, 2) if quorum.quorum_id == 7 else (None, 0)
        )
        round_.step.end_update()
        asking(round_)


def test_h12_a_worker_waits_for_the_receivers_of_the_others_of_its_group() -> None:
    """Group c heals from b on this group rank, and from this group on another one."""
    some_heal = dataclasses.replace(
        QUORUM, replica_world_size=3, replica_ids=("a:1", "b:1", "c:1"), max_world_size=2
    )
    round_ = training(quorum=some_heal)
    round_.step.begin_vote()
    round_.apply_decision(Decide(True))
    assert (round_.serves_in, round_.receivers) == (7, ())


def test_a_worker_with_whole_weights_offers_its_state() -> None:
    source = serving()
    round_ = asking(worker())
    offer = OfferState((1,), (2,), at_once=False)
    assert meeting(round_, source) == dataclasses.replace(TRAIN, offer=offer)
    at_once = OfferState((1,), (2,), at_once=True)
    round_ = asking(worker(0))
    assert meeting(round_, dataclasses.replace(source, max_step=0)).offer == at_once
    round_ = asking(worker(), allow_heal=False)
    assert meeting(round_, source) == TRAIN


def test_a_worker_with_spoiled_weights_refuses_its_state() -> None:
    round_ = training()
    round_.step.begin_vote()
    round_.apply_decision(Decide(True))
    round_.step.lose_update("it raised")
    asking(round_)
    round_.quorum_received(dataclasses.replace(QUORUM, recover_dst_replica_ranks=(1,)))
    ready, error = round_.members_met(None), round_.step.state.error
    assert isinstance(ready.refusal, RefuseState)
    assert ready == dataclasses.replace(TRAIN, leave=error, refusal=ready.refusal)


# -- what an error becomes ----------------------------------------------------------------------


def test_without_a_quorum_the_members_of_the_last_one_are_left() -> None:
    first = asking(worker())
    assert first.question_failed(FAILED, 101.0) == NOTHING, "it has met nobody"
    round_ = training()
    round_.abandon_step()
    asking(round_)
    assert round_.question_failed(FAILED, 101.0) == Ready(leave=FAILED)
    assert round_.step.state.error is FAILED


def test_a_failed_heal_is_still_due_and_leaves_no_members() -> None:
    round_ = training(worker(1), BEHIND)
    lost = CheckpointError("b", "it is gone")
    assert round_.record_failure(lost) == NOTHING
    assert (round_.step.state.error, round_.step.state.unhealed) == (lost, True)
    assert round_.error is None


def test_a_failed_heal_leaves_the_members_where_all_contribute() -> None:
    round_ = training(worker(0), dataclasses.replace(BEHIND, max_step=0))
    lost = CheckpointError("b", "it is gone")
    assert round_.record_failure(lost) == Ready(leave=lost)


def test_an_offer_that_fails_is_an_error_of_the_step() -> None:
    round_ = training()
    assert round_.record_failure(BROKEN) == Ready(leave=BROKEN)
    assert round_.step.state.error is BROKEN


def test_an_error_of_a_step_leaves_members_that_count_on_this_group() -> None:
    round_ = training()
    epoch = round_.step.state.epoch
    assert round_.record_error(BROKEN, epoch - 1) == NOTHING
    assert round_.step.state.error is None
    assert round_.record_error(BROKEN, epoch) == Ready(leave=BROKEN)
    healing = training(worker(1), BEHIND)
    assert healing.record_error(BROKEN, healing.step.state.epoch) == NOTHING
    differs = OperationsDiffer("a sum here, nothing there")
    assert healing.record_error(differs, healing.step.state.epoch) == Ready(leave=differs)
    healing.step.fail_heal(BROKEN)
    healing.step.begin_vote()
    assert healing.record_error(differs, healing.step.state.epoch) == NOTHING, "its sums are over"


def test_an_abandoned_step_leaves_its_members() -> None:
    round_ = training()
    assert isinstance(round_.abandon_step().leave, QuorumFailed)
    round_.step.begin_vote()
    round_.apply_decision(Decide(False))
    assert round_.abandon_step() == NOTHING


def test_a_cancelled_round_has_no_quorum() -> None:
    round_ = worker()
    round_.begin_step(RoundRequest(timeout_s=1.0), 100.0)
    round_.cancel_round(FAILED)
    assert round_.error is FAILED
    assert round_.step.state.phase is Phase.TRAINING
    assert round_.step.state.error is FAILED


# -- the end of a group ---------------------------------------------------------------------------


def test_a_drained_group_ends_without_aborting_its_connections() -> None:
    round_ = training()
    round_.abandon_step()
    asking(round_)
    assert round_.question_failed(GroupLeft("drained"), 101.0) == NOTHING
    with pytest.raises(Drained, match="drained"):
        round_.check_left()
    assert round_.drain_reason == "drained"


def test_a_worker_that_reported_its_end_does_not_wait_for_a_lost_manager() -> None:
    reported_late = asking(worker())
    reported_late.drain("SIGTERM")
    reported_late.question_failed(FAILED, 101.0)
    reported_late.check_left()  # its peers may wait for it
    reported = worker()
    reported.drain("SIGTERM")
    asking(reported).question_failed(FAILED, 101.0)
    with pytest.raises(Drained, match="SIGTERM; it could not leave: "):
        reported.check_left()


def test_a_refused_worker_continues_only_if_another_step_may_help() -> None:
    refused = asking(worker())
    refused.question_failed(RequestRefused("wrong rank"), 101.0)
    with pytest.raises(RequestRefused, match="wrong rank"):
        refused.check_next()
    over = asking(worker())
    ends = GivenUp("manager", "b:1", "it ends again and again")
    over.question_failed(ends, 101.0, is_manager_over=True)
    with pytest.raises(GivenUp, match="again and again"):
        over.check_next()
    stranger = asking(worker())
    stranger.question_failed(Unauthorized("set TORCHFT_TOKEN"), 101.0)
    with pytest.raises(Unauthorized):
        stranger.check_next()
    known = training()
    known.abandon_step()
    asking(known).question_failed(Unauthorized("set TORCHFT_TOKEN"), 101.0)
    known.check_next()
    unlucky = asking(worker())
    unlucky.question_failed(FAILED, 101.0)
    unlucky.check_next()


# -- the vote ------------------------------------------------------------------------------------


def test_a_lone_worker_decides() -> None:
    assert training().begin_vote(100.0, 10.0) == Decide(True, fate=Fate.ENDS)
    failed = training()
    failed.record_failure(BROKEN)
    assert failed.begin_vote(100.0, 10.0) == Decide(False)


def voting(*, well: bool, timeout_s: float = 10.0) -> Round:
    round_ = training(worker(group_world_size=2, group_rank=1))
    if not well:
        round_.record_failure(BROKEN)
    assert round_.begin_vote(100.0, timeout_s) == AskDecision(0.0, 100.0 + timeout_s)
    assert round_.ballot() == Vote(group_rank=1, step=3, should_commit=well)
    return round_


@pytest.mark.parametrize("well", [True, False])
def test_a_decision_and_a_refusal_are_final(well: bool) -> None:
    for committed in (True, False):
        assert voting(well=well).vote_decided(committed, Fate.ENDS) == Decide(
            committed, fate=Fate.ENDS
        )
    gave_up = CommitFailed("group rank 0 gave up")
    assert voting(well=well).vote_failed(gave_up, 101.0) == Decide(False, gave_up)


@pytest.mark.parametrize("error", [DeadlineExceeded("vote", 10.0), RequestRefused("no round")])
def test_a_lost_decision_ends_a_worker_that_voted_yes(
    error: DeadlineExceeded | RequestRefused,
) -> None:
    assert voting(well=True).vote_failed(error, 101.0) == LoseDecision(error)
    assert voting(well=False).vote_failed(error, 101.0) == Decide(False, error)


@pytest.mark.parametrize(
    ("well", "timeout_s", "lost_at"),
    [(True, 60.0, 116.0), (True, 10.0, 110.0), (False, 60.0, 106.0)],
)
def test_a_restarted_manager_is_asked_again_for_the_decision(
    well: bool, timeout_s: float, lost_at: float
) -> None:
    """A worker that would have to end asks for longer."""
    round_, asks = voting(well=well, timeout_s=timeout_s), AskDecision(RETRY_S, 100.0 + timeout_s)
    assert round_.vote_failed(GONE, 101.0) == asks
    assert round_.vote_failed(GONE, lost_at - 0.1) == asks
    last = round_.vote_failed(GONE, lost_at)
    assert last == (LoseDecision(GONE) if well else Decide(False, GONE))


def test_a_commit_counts_in_the_quorum_of_its_round() -> None:
    round_ = training()
    round_.begin_vote(100.0, 10.0)
    round_.apply_decision(Decide(True))
    assert (round_.step.state.step, round_.step.state.quorum_id) == (4, 7)
