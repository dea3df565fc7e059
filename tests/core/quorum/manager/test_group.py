"""A group's quorum barrier and its workers' streams: what each receives, what the group asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.core.barriers import (
    QUORUM,
    AwaitOwner,
    TimelessGroup,
    answered,
    asks,
    in_round,
    request,
    vote,
)
from support.core.scenes import Refused, plain

from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, RefuseWorker
from torchft_svc.core.quorum.manager.ended import MAX_MISSED
from torchft_svc.core.quorum.manager.group import AnswerWorker, StopAsking
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.core.quorum.term import Fate
from torchft_svc.core.quorum.types import WorkerRequest
from torchft_svc.errors import (
    CommitFailed,
    ConfigError,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unreachable,
)


def test_the_group_asks_once_all_workers_have() -> None:
    group = TimelessGroup(3)
    assert group.quorum_requested(request(2), 10) == ()
    assert group.quorum_requested(request(0), 11) == ()
    assert group.why() == "group rank 1 of 3 workers has not asked for a quorum"
    assert group.quorum_requested(request(1), 12) == (asks(),)
    assert group.why() == "the lighthouse has not answered yet"
    assert group.lighthouse_answered(1, QUORUM) == (
        answered(10, request(2), 1),
        answered(11, request(0), 1),
        answered(12, request(1), 1),
    )
    assert group.lighthouse_answered(1, QUORUM) == ()


def test_the_group_speaks_for_all_its_workers() -> None:
    """Trap: only the last-arriving rank's step and failures are forwarded."""
    group = TimelessGroup(3)
    group.quorum_requested(request(0, shrink_only=True, commit_failures=1), 10)
    group.quorum_requested(request(1, commit_failures=4, last_quorum_id=7, last_num_groups=2), 11)
    assert group.quorum_requested(request(2, last_quorum_id=3, last_num_groups=5), 12) == (
        asks(shrink_only=True, commit_failures=4, seen_quorum_id=7, seen_num_groups=2),
    )


@pytest.mark.parametrize("steps", [(5, 5, 6), (7, 5, 6), (5, 7, 7)])
def test_workers_at_different_steps_ask_as_one_that_is_behind(steps: tuple[int, ...]) -> None:
    """A heal has failed for some: all heal again, to the step 7 of the quorum."""
    group = TimelessGroup(3)
    for rank, step in enumerate(steps):
        orders = group.quorum_requested(request(rank, step), 10 + rank)
    assert orders == (asks(step=5),)
    answers = group.lighthouse_answered(1, QUORUM)
    assert [order.caller for order in answers if isinstance(order, AnswerWorker)] == [10, 11, 12]
    # Whose heal fails again votes at its own step.
    for rank, step in enumerate(steps[:2]):
        assert group.vote_received(vote(rank, step=step), 20 + rank) == ()
    assert group.vote_received(vote(2, yes=False, step=steps[2]), 22) == tuple(
        AnswerVote(caller, should_commit=False) for caller in (20, 21, 22)
    )


@pytest.mark.parametrize("steps", [(5, 5, 8), (8, 7, 7)])
def test_workers_at_different_steps_that_nobody_can_mend_all_get_the_error(
    steps: tuple[int, ...],
) -> None:
    group = TimelessGroup(3)
    for rank, step in enumerate(steps):
        group.quorum_requested(request(rank, step), 10 + rank)
    places = ", ".join(f"rank {rank} at step {step}" for rank, step in enumerate(steps))
    sentence = f"the workers of this group are at different steps: {places}"
    assert plain(group.lighthouse_answered(1, QUORUM)) == [
        Refused(who, "RequestRefused", sentence) for who in (10, 11, 12)
    ]
    assert group.lighthouse_answered(1, QUORUM) == ()
    for rank in range(3):
        orders = group.quorum_requested(request(rank, step=6), 13 + rank)
    assert orders == (asks(2, step=6),)


def test_every_worker_receives_the_error_of_a_failed_round_at_once() -> None:
    group = TimelessGroup(2)
    group.quorum_requested(request(0), 10)
    group.quorum_requested(request(1), 11)
    orders = group.lighthouse_answered(1, Unreachable("lighthouse", "host:1", "refused"))
    sentence = "lighthouse at host:1 cannot be reached: refused"
    assert plain(orders) == [Refused(who, "Unreachable", sentence) for who in (10, 11)]
    assert group.lighthouse_answered(1, QuorumFailed("again")) == ()
    group.quorum_requested(request(0), 12)
    assert group.quorum_requested(request(1), 13) == (asks(2),)


def test_an_outcome_of_an_earlier_round_changes_nothing() -> None:
    group = TimelessGroup(1)
    group.quorum_requested(request(0), 10)
    assert group.call_withdrawn(10) == (StopAsking(1),)
    assert group.quorum_requested(request(0), 11) == (asks(2),)
    assert group.lighthouse_answered(1, QUORUM) == ()
    assert group.lighthouse_answered(1, QuorumFailed("late")) == ()
    assert group.lighthouse_answered(2, QUORUM) == (answered(11, request(0), 2),)


def test_a_worker_that_gives_up_releases_the_others() -> None:
    group = TimelessGroup(3)
    group.quorum_requested(request(0), 10)
    group.quorum_requested(request(1), 11)
    sentence = "no quorum: group rank 1 gave up waiting"
    assert plain(group.call_withdrawn(11)) == [Refused(10, "QuorumFailed", sentence)]
    assert group.call_withdrawn(11) == ()
    assert group.call_withdrawn(10) == ()


def test_a_worker_that_gives_up_while_the_lighthouse_is_asked() -> None:
    group = TimelessGroup(2)
    group.quorum_requested(request(0), 10)
    group.quorum_requested(request(1), 11)
    sentence = "no quorum: group rank 0 gave up waiting"
    assert plain(group.call_withdrawn(10)) == [StopAsking(1), Refused(11, "QuorumFailed", sentence)]
    assert group.lighthouse_answered(1, QUORUM) == ()


SUPERSEDED = "no quorum: a newer call of group rank 0 has taken the place of this one"


def test_a_repeated_request_takes_the_place_of_the_first() -> None:
    group = TimelessGroup(2)
    group.quorum_requested(request(0, worker_id="x"), 10)
    again = group.quorum_requested(request(0, worker_id="x"), 11)
    assert plain(again) == [Refused(10, "QuorumFailed", SUPERSEDED)]
    group.quorum_requested(request(1), 12)
    again = group.quorum_requested(request(0, worker_id="x"), 13)
    assert plain(again) == [Refused(11, "QuorumFailed", SUPERSEDED)]
    answers = group.lighthouse_answered(1, QUORUM)
    assert {order.caller for order in answers if isinstance(order, AnswerWorker)} == {12, 13}


def test_a_repeated_request_for_another_step_is_not_mixed_in() -> None:
    group = TimelessGroup(2)
    group.quorum_requested(request(0), 10)
    group.quorum_requested(request(1), 11)
    assert plain(group.quorum_requested(request(0, step=6), 12)) == [
        Refused(10, "QuorumFailed", SUPERSEDED),
        StopAsking(1),
        asks(2, step=5),
    ]
    assert group.lighthouse_answered(1, QUORUM) == ()


def test_a_repeated_request_that_says_something_new_is_asked_anew() -> None:
    group = TimelessGroup(1)
    group.quorum_requested(request(0), 10)
    assert plain(group.quorum_requested(request(0, step=6, commit_failures=2), 11)) == [
        Refused(10, "QuorumFailed", SUPERSEDED),
        StopAsking(1),
        asks(2, step=6, commit_failures=2),
    ]
    assert group.lighthouse_answered(1, QUORUM) == ()


def test_two_workers_with_one_rank() -> None:
    group = TimelessGroup(2)
    group.quorum_requested(request(0, worker_id="x"), 10)
    with pytest.raises(RequestRefused) as refused:
        group.quorum_requested(request(0, worker_id="y"), 11)
    assert str(refused.value) == (
        "group rank 0 is taken: another worker with this rank already waits; "
        "give every worker of the group a rank of its own"
    )
    assert group.quorum_requested(request(1, worker_id="z"), 12) == (asks(),)


def test_a_restarted_worker_makes_another_incarnation() -> None:
    group = TimelessGroup(2)
    before: tuple[str, ...] = ("x", "y")
    for round_, ids, restarted in [
        (1, ("x", "y"), False),
        (2, ("x", "y"), False),
        (3, ("x", "new"), True),
        (4, ("x", "new"), False),
        (5, ("new", "newer"), True),
    ]:
        for rank, (old, worker_id) in enumerate(zip(before, ids, strict=True)):
            if old != worker_id:
                group.worker_detached(rank, old, "killed")
            group.worker_attached(rank, worker_id)
        before = ids
        group.quorum_requested(request(0, worker_id=ids[0]), 2 * round_)
        orders = group.quorum_requested(request(1, worker_id=ids[1]), 2 * round_ + 1)
        assert orders == (asks(round_, new_incarnation=restarted),)
        group.lighthouse_answered(round_, QUORUM)


def test_a_restart_is_not_forgotten_when_the_barrier_fails() -> None:
    group = TimelessGroup(2)
    group.quorum_requested(request(0, worker_id="x"), 10)
    group.call_withdrawn(10)
    group.quorum_requested(request(0, worker_id="new"), 11)
    group.owner_was_silent(0, 11)
    group.call_withdrawn(11)
    group.quorum_requested(request(0, worker_id="new"), 12)
    assert group.quorum_requested(request(1), 13) == (asks(new_incarnation=True),)


ANOTHER = "another worker with this rank is there; give every worker of the group a rank of its own"


def trains(*, attached: bool = True, worker_id: str = "x") -> TimelessGroup:
    """A group of one worker, which has received a quorum."""
    group = TimelessGroup(1)
    if attached:
        group.worker_attached(0, worker_id)
    group.quorum_requested(request(0, worker_id=worker_id), 10)
    group.lighthouse_answered(1, QUORUM)
    return group


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("worker_id", ["x", ""])
def test_a_stranger_with_the_rank_of_a_living_worker_is_the_one_refused(
    attached: bool, worker_id: str
) -> None:
    group = trains(attached=attached, worker_id=worker_id)
    may_be_dead = not attached and worker_id
    held = group.quorum_requested(request(0, worker_id="evil", checkpoint_address="evil"), 11)
    assert held == ((AwaitOwner(0, 11),) if may_be_dead else ())
    assert group.why(11) == "group rank 0 belongs to another worker, which may be alive"
    with pytest.raises(RequestRefused, match="group rank 0 is taken: another"):
        group.quorum_requested(request(0, worker_id="worse"), 12)
    with pytest.raises(RequestRefused, match="group rank 0 is taken: another"):
        group.worker_attached(0, "evil")
    with pytest.raises(RequestRefused, match="group rank 0 is taken: another"):
        group.vote_received(vote(0, yes=False, worker_id="evil"), 13)
    refused = Refused(11, "RequestRefused", f"group rank 0 is taken: {ANOTHER}")
    voted = plain(group.vote_received(vote(0, worker_id=worker_id), 14))
    assert voted == [refused, AnswerVote(14, True, Fate.ENDS)]
    group.quorum_requested(request(0, worker_id="evil"), 15)
    asked = plain(group.quorum_requested(request(0, worker_id=worker_id), 16))
    assert asked == [replace(refused, caller=15), asks(2)], "and it is no other incarnation"
    assert group.checkpoint_address(0) != "evil"
    assert group.callers_in_barrier() == [16]


def test_whose_stream_has_ended_is_followed_by_the_one_that_waits() -> None:
    group = trains()
    assert group.quorum_requested(request(0, worker_id="new"), 11) == ()
    again = request(0, worker_id="new", step=7)
    newer = "no quorum: a newer call of group rank 0 has taken the place of this one"
    asked = group.quorum_requested(again, 12)
    assert plain(asked) == [Refused(11, "QuorumFailed", newer)]
    assert group.owner_was_silent(0, 11) == (), "its stream shows that"
    gone = Leave("group rank 0 is gone: killed")
    new = asks(2, new_incarnation=True, step=7)
    assert group.worker_detached(0, "x", "killed") == (gone, new)
    group.worker_attached(0, "new")
    with pytest.raises(RequestRefused, match="is taken"):
        group.worker_attached(0, "x")


def test_a_worker_without_a_stream_is_followed_when_it_was_silent_for_long() -> None:
    """The successor may be less patient, and ask again."""
    group = trains(attached=False)
    assert group.quorum_requested(request(0, worker_id="new"), 11) == (AwaitOwner(0, 11),)
    group.call_withdrawn(11)
    assert group.quorum_requested(request(0, worker_id="new"), 12) == ()
    assert group.owner_was_silent(0, 11) == (asks(2, new_incarnation=True),)
    assert group.owner_was_silent(0, 11) == ()


def test_a_worker_without_a_stream_that_has_shown_itself_is_not_followed() -> None:
    group = trains(attached=False)
    group.quorum_requested(request(0, worker_id="new"), 11)
    group.vote_received(vote(0, worker_id="x"), 12)
    assert group.quorum_requested(request(0, worker_id="new"), 13) == (AwaitOwner(0, 13),)
    assert group.owner_was_silent(0, 11) == (), "that was before"
    group.worker_attached(0, "x")
    assert group.owner_was_silent(0, 13) == (), "its stream shows that by now"


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (request(2), "group rank 2 is outside this group of 2 workers"),
        (request(-1), "group rank -1 is outside this group of 2 workers"),
        (request(0, step=-1), "step is -1, must be 0 or more"),
        (request(0, step=2**63), f"step is {2**63}, must be 0 or more"),
        (request(0, commit_failures=-1), "commit_failures is -1, must be 0 or more"),
        (
            request(0, checkpoint_address="x" * 513),
            "checkpoint address has 513 characters, 512 are allowed",
        ),
        (request(0, worker_id="x" * 513), "worker id has 513 characters, 512 are allowed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rejected_request_leaves_the_state_as_it_was(bad: WorkerRequest, sentence: str) -> None:
    group = in_round(2)
    assert group.vote_received(vote(0, round=1), 20) == ()
    with pytest.raises(RequestRefused) as refused:
        group.quorum_requested(bad, 21)
    assert str(refused.value) == sentence
    assert group.vote_received(vote(1, round=1), 22) == (
        AnswerVote(20, True, Fate.ENDS),
        AnswerVote(22, True, Fate.ENDS),
    )


def test_a_group_without_workers_can_not_be() -> None:
    with pytest.raises(ConfigError, match="group_world_size=0 cannot work"):
        TimelessGroup(0)


def test_where_a_worker_serves_its_state() -> None:
    group = TimelessGroup(2)
    with pytest.raises(RequestRefused, match="group rank 0 has not reported where it serves"):
        group.checkpoint_address(0)
    with pytest.raises(RequestRefused, match="group rank 2 is outside this group"):
        group.checkpoint_address(2)
    group.quorum_requested(request(0, checkpoint_address="host:1"), 10)
    assert group.checkpoint_address(0) == "host:1"
    group.quorum_requested(request(0, checkpoint_address="host:2"), 11)
    assert group.checkpoint_address(0) == "host:2"


# -- streams of workers --------------------------------------------------------------------------


def test_a_worker_that_dies_releases_those_that_ask_and_the_group_leaves() -> None:
    group = TimelessGroup(3)
    group.worker_attached(2, "z")
    group.quorum_requested(request(0), 10)
    group.quorum_requested(request(1), 11)
    gone = "group rank 2 is gone: its connection ended"
    assert plain(group.worker_detached(2, "z", "its connection ended")) == [
        Refused(10, "QuorumFailed", f"no quorum: {gone}"),
        Refused(11, "QuorumFailed", f"no quorum: {gone}"),
        Leave(gone),
    ]
    assert group.worker_detached(2, "z", "its connection ended") == ()


def test_a_worker_that_dies_while_the_lighthouse_is_asked() -> None:
    group = TimelessGroup(1)
    group.worker_attached(0, "x")
    group.quorum_requested(request(0, worker_id="x"), 10)
    gone = "group rank 0 is gone: killed"
    assert plain(group.worker_detached(0, "x", "killed")) == [
        StopAsking(1),
        Refused(10, "QuorumFailed", f"no quorum: {gone}"),
        Leave(gone),
    ]
    assert group.lighthouse_answered(1, QUORUM) == ()
    again = group.quorum_requested(request(0, worker_id="y"), 11)
    assert again == (asks(2, new_incarnation=True),)


def test_a_worker_whose_stream_broke_comes_back_as_another_incarnation() -> None:
    """The others know that the group is gone, so it can not continue as the same one."""
    group = TimelessGroup(1)
    group.worker_attached(0, "x")
    group.quorum_requested(request(0, worker_id="x"), 10)
    group.lighthouse_answered(1, QUORUM)
    group.worker_detached(0, "x", "its connection ended")
    group.worker_attached(0, "x")
    again = group.quorum_requested(request(0, worker_id="x"), 11)
    assert again == (asks(2, new_incarnation=True),)


def test_a_worker_that_dies_releases_those_that_vote() -> None:
    group = in_round(2)
    group.worker_attached(1, "")
    group.vote_received(vote(0), 20)
    gone = "group rank 1 is gone: killed"
    assert plain(group.worker_detached(1, "", "killed")) == [
        Refused(20, "CommitFailed", f"no commit decision: {gone}"),
        Leave(gone),
    ]


def test_two_streams_with_one_rank() -> None:
    group = TimelessGroup(2)
    group.worker_attached(0, "x")
    group.worker_attached(0, "x")
    with pytest.raises(RequestRefused, match="group rank 0 is taken"):
        group.worker_attached(0, "y")
    with pytest.raises(RequestRefused, match="group rank 2 is outside this group"):
        group.worker_attached(2, "y")
    assert group.worker_detached(0, "y", "it was refused") == ()
    group.worker_detached(0, "x", "killed")
    group.worker_attached(0, "y")


def asked_in_time(world_size: int = 2) -> TimelessGroup:
    """A group whose workers are all there, and whose rank 1 has asked (caller 11)."""
    group = TimelessGroup(world_size)
    for rank in range(world_size):
        group.worker_attached(rank, f"w{rank}")
    group.quorum_requested(numbered(1, 1), 11)
    return group


def refused(caller: int, error: TorchFTError) -> Refused:
    return Refused(caller, type(error).__name__, str(error))


def numbered(group_rank: int, question: int, **fields: Any) -> WorkerRequest:
    return request(group_rank, worker_id=f"w{group_rank}", question=question, **fields)


def test_a_barrier_that_failed_fails_for_the_worker_that_comes_late() -> None:
    """Rank 1 goes on with its step, and waits for rank 0 in a collective of the group."""
    group = asked_in_time()
    error = QuorumFailed("group rank 1 gave up waiting")
    assert group.call_withdrawn(11) == ()
    assert plain(group.quorum_requested(numbered(0, 1), 10)) == [refused(10, error)]
    assert group.quorum_requested(numbered(0, 2), 12) == ()
    assert group.quorum_requested(numbered(1, 2), 13) == (asks(),)


def test_who_comes_late_receives_the_error_of_each_barrier_that_it_missed() -> None:
    group = asked_in_time()
    group.call_withdrawn(11)
    group.quorum_requested(numbered(1, 2), 12)
    gone = QuorumFailed("group rank 1 is gone: it was frozen")
    orders = group.worker_detached(1, "w1", "it was frozen")
    assert plain(orders[:1]) == [refused(12, gone)]
    errors = [QuorumFailed("group rank 1 gave up waiting"), gone]
    for question, error in enumerate(errors, 1):
        late = group.quorum_requested(numbered(0, question), 20 + question)
        assert plain(late) == [refused(20 + question, error)]
    assert group.quorum_requested(numbered(0, 3), 23) == ()
    assert group.quorum_requested(numbered(1, 3), 24) == (asks(new_incarnation=True),)


def test_a_frozen_worker_that_is_back_receives_the_error_that_it_missed() -> None:
    group = asked_in_time()
    gone = QuorumFailed("group rank 0 is gone: no sign of life")
    assert plain(group.worker_detached(0, "w0", "no sign of life")[:1]) == [refused(11, gone)]
    group.worker_attached(0, "w0")
    assert plain(group.quorum_requested(numbered(0, 1), 12)) == [refused(12, gone)]


def test_a_new_worker_has_missed_nothing() -> None:
    """The worker begins with its first step, whatever the one before it at its rank has missed."""
    group = asked_in_time()
    group.worker_detached(0, "w0", "killed")
    group.quorum_requested(numbered(1, 2), 12)
    group.call_withdrawn(12)
    group.worker_attached(0, "new")
    assert group.quorum_requested(request(0, worker_id="new", question=1), 13) == ()
    assert group.quorum_requested(numbered(1, 3), 14) == (asks(new_incarnation=True),)


def test_workers_that_do_not_count_their_questions_wait_as_before() -> None:
    group = asked_in_time()
    group.call_withdrawn(11)
    assert group.quorum_requested(request(0, worker_id="w0"), 12) == ()


@pytest.mark.parametrize("fails", [False, True])
def test_a_question_whose_answer_was_lost_is_answered_again(fails: bool) -> None:
    group = asked_in_time()
    group.quorum_requested(numbered(0, 1), 10)
    error = Unreachable("lighthouse", "l:1", "refused")
    if fails:
        group.lighthouse_answered(1, error)
        assert plain(group.quorum_requested(numbered(0, 1), 12)) == [refused(12, error)]
    else:
        group.lighthouse_answered(1, QUORUM)
        again = group.quorum_requested(numbered(0, 1), 12)
        assert again == (answered(12, numbered(0, 1), 1),)
        assert group.vote_received(vote(1, worker_id="w1"), 13) == ()
        both = tuple(AnswerVote(who, True, Fate.ENDS) for who in (13, 14))
        assert group.vote_received(vote(0, worker_id="w0"), 14) == both


def test_an_answer_that_was_lost_is_sent_again_also_when_the_round_is_over() -> None:
    """The peer has begun a step with that answer, and waits for the worker."""
    group = asked_in_time()
    group.quorum_requested(numbered(0, 1), 10)
    group.lighthouse_answered(1, QUORUM)
    group.worker_detached(0, "w0", "its stream broke")
    group.worker_attached(0, "w0")
    again = group.quorum_requested(numbered(0, 1), 12)
    assert again == (answered(12, numbered(0, 1), 1),)
    over = CommitFailed("group rank 0 is gone: its stream broke")
    for rank in (0, 1):
        late = group.vote_received(vote(rank, round=1, worker_id=f"w{rank}"), 20 + rank)
        assert plain(late) == [refused(20 + rank, over)]


def test_the_next_question_of_a_worker_ends_the_one_before_for_all() -> None:
    """The withdrawal is on its way, and comes after the next request."""
    group = asked_in_time(3)
    group.quorum_requested(numbered(0, 1), 10)
    error = QuorumFailed("group rank 1 gave up waiting")
    orders = group.quorum_requested(numbered(1, 2), 12)
    assert plain(orders) == [refused(11, error), refused(10, error)]
    assert group.call_withdrawn(11) == ()
    assert plain(group.quorum_requested(numbered(2, 1), 13)) == [refused(13, error)]
    assert group.quorum_requested(numbered(2, 2), 14) == ()
    assert group.quorum_requested(numbered(0, 2), 15) == (asks(),)


def test_who_has_given_up_by_itself_has_missed_nothing() -> None:
    """The request before went to an earlier manager; the worker comes with the next one."""
    group = asked_in_time()
    group.call_withdrawn(11)
    assert group.quorum_requested(numbered(0, 2), 12) == ()
    assert group.quorum_requested(numbered(1, 2), 13) == (asks(),)


def attached(world_size: int) -> TimelessGroup:
    group = TimelessGroup(world_size)
    for rank in range(world_size):
        group.worker_attached(rank, f"w{rank}")
    return group


def after(round_: int, group_rank: int, question: int) -> WorkerRequest:
    """The first question after this round."""
    return numbered(group_rank, question, last_round=round_)


@pytest.mark.parametrize("asked_first", [True, False])
def test_an_answer_of_the_manager_before_fails_the_question_of_those_that_have_none(
    asked_first: bool,
) -> None:
    """The manager died when only rank 1 of three had its answer, and may wait for the others. They
    asked as often as they were there."""
    group = attached(3)
    has_answer = PhaseReport(Phase.TRAINING, 5, round_before=100)
    error = QuorumFailed("the manager died when only group rank 1 had its answer")
    if asked_first:
        assert group.quorum_requested(after(100, 0, 7), 10) == ()
        assert plain(group.phase_reported(1, has_answer)) == [refused(10, error)]
    else:
        assert group.phase_reported(1, has_answer) == ()
        assert plain(group.quorum_requested(after(100, 0, 7), 10)) == [refused(10, error)]
    assert plain(group.quorum_requested(after(100, 2, 5), 12)) == [refused(12, error)]
    assert plain(group.quorum_requested(after(100, 2, 5), 13)) == [refused(13, error)], "repeated"
    assert group.quorum_requested(numbered(0, 8), 20) == ()
    assert group.quorum_requested(after(101, 1, 8), 21) == ()
    assert group.quorum_requested(numbered(2, 6), 22) == (asks(),)


def test_who_has_an_answer_of_the_manager_before_may_ask_the_next_question_first() -> None:
    group = attached(2)
    group.phase_reported(1, PhaseReport(Phase.IDLE, 5, round_before=100))
    assert group.quorum_requested(after(101, 1, 8), 11) == ()
    (late,) = group.quorum_requested(after(100, 0, 7), 10)
    assert isinstance(late, RefuseWorker)
    assert late.caller == 10
    assert group.quorum_requested(numbered(0, 8), 12) == (asks(),)


@pytest.mark.parametrize(
    ("reported", "last"),
    [(100, 101), (0, 0), (100, 0)],
    ids=["both have it", "there was none", "one has given a question up"],
)
def test_other_answers_of_the_manager_before_fail_no_question(reported: int, last: int) -> None:
    """The numbers of questions say nothing: workers may have begun one after the other."""
    group = attached(2)
    assert group.quorum_requested(after(last, 1, 7), 12) == ()
    assert group.phase_reported(0, PhaseReport(Phase.TRAINING, 5, round_before=reported)) == ()
    assert group.quorum_requested(after(last, 0, 8), 13) == (asks(),)


def test_an_answer_that_was_given_here_fails_no_question() -> None:
    group = attached(2)
    group.quorum_requested(after(100, 1, 1), 11)
    group.quorum_requested(after(100, 0, 1), 10)
    group.lighthouse_answered(1, QUORUM)
    assert group.phase_reported(0, PhaseReport(Phase.TRAINING, 5, round_before=100)) == ()
    (again,) = group.quorum_requested(after(100, 1, 1), 12)
    assert isinstance(again, AnswerWorker)


def test_missed_barriers_are_bounded() -> None:
    group = asked_in_time()
    group.call_withdrawn(11)
    for question in range(2, 3 * MAX_MISSED):
        group.quorum_requested(numbered(1, question), 100 + question)
        group.call_withdrawn(100 + question)
    for question in range(1, MAX_MISSED + 1):
        (late,) = group.quorum_requested(numbered(0, question), 1000 + question)
        assert isinstance(late, RefuseWorker)
    assert group.quorum_requested(numbered(0, MAX_MISSED + 1), 2000) == ()


def test_the_next_life_of_a_group_does_not_miss_the_one_before() -> None:
    """All workers were started anew, and one has asked before the old ones' ends are noticed."""
    group = asked_in_time()
    group.quorum_requested(numbered(0, 1), 10)
    group.lighthouse_answered(1, QUORUM)
    old = "w"
    for life in ("x", "y", "new"):
        group.quorum_requested(request(1, worker_id=f"{life}1", question=1), 12)
        for rank in (1, 0):
            orders = group.worker_detached(rank, f"{old}{rank}", "killed")
            assert orders == (Leave(f"group rank {rank} is gone: killed"),)
        old = life
        if life != "new":
            group.worker_attached(0, f"{life}0")
            group.worker_attached(1, f"{life}1")
            group.call_withdrawn(12)
    again = group.quorum_requested(request(0, worker_id="new0", question=1), 13)
    assert again == (asks(2, new_incarnation=True),)


def test_a_rank_that_missed_a_life_is_missed_by_those_that_asked_with_it() -> None:
    """A life of the group was so short that one of its workers never came."""
    group = TimelessGroup(2)
    for rank in range(2):
        group.worker_attached(rank, f"old{rank}")
    for rank in range(2):
        group.worker_detached(rank, f"old{rank}", "killed")
    group.worker_attached(0, "short0")
    group.worker_detached(0, "short0", "killed")
    for rank in range(2):
        group.worker_attached(rank, f"new{rank}")
        asked = group.quorum_requested(request(rank, worker_id=f"new{rank}", question=1), 10 + rank)
    assert asked == (asks(new_incarnation=True),)
    group.call_withdrawn(11)
    group.quorum_requested(request(0, worker_id="new0", question=2), 12)
    gone = QuorumFailed("group rank 1 is gone: its stream broke")
    orders = group.worker_detached(1, "new1", "its stream broke")
    assert plain(orders[:1]) == [refused(12, gone)]
