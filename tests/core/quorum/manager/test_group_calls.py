"""A group's calls and news: until when calls wait, and which news its workers receive."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from support.core.barriers import QUORUM, request, vote

from torchft_svc.core.link import Absence
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, RefuseWorker
from torchft_svc.core.quorum.manager.group import (
    ANSWER_MARGIN_S,
    HOLD_S,
    MISSED_NEWS_S,
    OWNER_SILENCE_S,
    AnswerWorker,
    AskLighthouse,
    EndGroup,
    Group,
    ManagerOver,
    NotifyWorkers,
    Orders,
    OwnGroupLost,
    StopAsking,
)
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Departure,
    Drain,
    Kill,
    Leave,
    LighthouseNews,
    Lost,
    NoQuorumYet,
)
from torchft_svc.core.quorum.tally import (
    MAX_EVENTS_KEPT,
    MAX_EVENTS_SENT,
    EventKind,
    GroupEvent,
    StepTimes,
    Tally,
)
from torchft_svc.core.quorum.term import Fate, TermEnds
from torchft_svc.core.quorum.types import (
    MAX_DIFFERENCES,
    DifferenceReport,
    Member,
    Vote,
    WorkerRequest,
)
from torchft_svc.errors import DeadlineExceeded, QuorumFailed, RequestRefused

FAILED = QuorumFailed("nobody else is there")


class CalledGroup(Group):
    """A group at 100 s that numbers its calls, as a shell does; it is "a" in quorum 9."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size, first_round=7, now=100.0)
        self.callers = itertools.count()

    def ask(self, asked: WorkerRequest, timeout_s: float, now: float) -> tuple[int, Orders]:
        caller = next(self.callers)
        return caller, self.quorum_requested(asked, caller, timeout_s, now)

    def vote(self, cast: Vote, timeout_s: float, now: float) -> tuple[int, Orders]:
        caller = next(self.callers)
        return caller, self.vote_received(cast, caller, timeout_s, now)

    def receive(self, news: LighthouseNews, replica_id: str = "a", quorum_id: int = 9) -> Orders:
        return self.news_received(news, replica_id, quorum_id)


def called(world_size: int = 1, attached: int = 0) -> CalledGroup:
    """A group whose first ``attached`` workers have a stream."""
    made = CalledGroup(world_size)
    for rank in range(attached):
        assert made.worker_attached(rank, f"w{rank}") == ()
    return made


def asks(rank: int, **fields: object) -> WorkerRequest:
    return request(rank, worker_id=f"w{rank}", **fields)


# -- calls ---------------------------------------------------------------------------------------


def test_the_lighthouse_is_asked_within_the_first_deadline_of_those_that_ask() -> None:
    made = called(2)
    assert made.ask(asks(0), 10.0, 100.0) == (0, ())
    caller, orders = made.ask(asks(1), 60.0, 104.0)
    (ask,) = orders
    assert caller == 1
    assert isinstance(ask, AskLighthouse)
    assert (ask.request.round, ask.timeout_s) == (7, pytest.approx(6.0 - ANSWER_MARGIN_S))
    answers = made.lighthouse_answered(7, QUORUM, "a", 105.0)
    assert [type(each) for each in answers] == [AnswerWorker, AnswerWorker]
    assert made.next_deadline() == math.inf
    assert made.call_withdrawn(caller) == (), "it is answered"


def test_a_call_ends_at_its_deadline_for_all_of_its_barrier() -> None:
    made = called(2)
    made.ask(asks(0), 10.0, 100.0)
    assert made.next_deadline() == 110.0
    assert made.tick(109.9) == ()
    (refusal,) = made.tick(110.0)
    assert isinstance(refusal, RefuseWorker)
    assert str(refusal.error) == str(
        DeadlineExceeded("quorum", 10.0, "group rank 1 of 2 workers has not asked for a quorum")
    )
    assert made.next_deadline() == math.inf


def test_a_vote_ends_at_its_deadline() -> None:
    made = called(2)
    for rank in range(2):
        made.ask(asks(rank), 10.0, 100.0)
    made.lighthouse_answered(7, QUORUM, "a", 101.0)
    caller, orders = made.vote(vote(0, worker_id="w0"), 5.0, 102.0)
    assert orders == ()
    assert made.next_deadline() == 107.0
    refusals = made.tick(107.0)
    assert [each.caller for each in refusals if isinstance(each, RefuseWorker)] == [caller]
    assert isinstance(refusals[0], RefuseWorker)
    assert isinstance(refusals[0].error, DeadlineExceeded)


def test_all_votes_are_answered_at_once() -> None:
    made = called(1)
    made.ask(asks(0), 10.0, 100.0)
    made.lighthouse_answered(7, QUORUM, "a", 101.0)
    assert made.vote(vote(0, worker_id="w0"), 5.0, 102.0) == (1, (AnswerVote(1, True, Fate.ENDS),))


def test_what_the_barriers_refuse_is_an_answer() -> None:
    caller, orders = called(1).ask(asks(5), 10.0, 100.0)
    (refusal,) = orders
    assert isinstance(refusal, RefuseWorker)
    assert refusal.caller == caller
    assert isinstance(refusal.error, RequestRefused)


def test_the_request_of_who_gives_up_is_withdrawn_from_the_lighthouse() -> None:
    made = called(1)
    caller, _ = made.ask(asks(0), 10.0, 100.0)
    assert made.call_withdrawn(caller) == (StopAsking(7),)
    assert made.lighthouse_answered(7, FAILED, "a", 102.0) == ()


def test_an_error_of_the_lighthouse_reaches_every_worker() -> None:
    made = called(1)
    caller, _ = made.ask(asks(0), 10.0, 100.0)
    assert made.lighthouse_answered(7, FAILED, "a", 101.0) == (RefuseWorker(caller, FAILED),)


def test_the_successor_of_a_silent_worker_is_let_in_after_a_while() -> None:
    made = called(1)
    made.ask(asks(0), 10.0, 100.0)
    made.lighthouse_answered(7, QUORUM, "a", 101.0)
    _, orders = made.ask(request(0, worker_id="new"), 60.0, 102.0)
    assert orders == ()
    assert made.next_deadline() == 102.0 + OWNER_SILENCE_S
    (ask,) = made.tick(102.0 + OWNER_SILENCE_S)
    assert isinstance(ask, AskLighthouse)
    assert ask.request.new_incarnation


# -- what workers do -----------------------------------------------------------------------------


def test_only_attached_workers_report_what_the_group_does() -> None:
    made = called(2, attached=1)
    made.phase_reported(0, PhaseReport(Phase.TRAINING, 3), 101.0)
    made.phase_reported(1, PhaseReport(Phase.VOTING, 3), 101.0)
    assert made.make_beat(101.25) == Beat(Phase.TRAINING, 3, 0.25)


def test_a_group_does_not_hang_while_one_of_its_workers_fetches_a_preview() -> None:
    """The question of the other one has failed, and it waits in a collective of the group."""
    made = called(2, attached=2)
    made.ask(asks(0, step=4), 5.0, 100.0)
    made.tick(105.0)
    made.phase_reported(0, PhaseReport(Phase.TRAINING, 4), 105.0)
    assert made.make_beat(150.0) == Beat()
    made.ask(asks(1, step=4), 5.0, 160.0)
    made.phase_reported(1, PhaseReport(Phase.TRAINING, 4), 160.0)
    assert made.make_beat(161.0) == Beat(Phase.TRAINING, 4, 1.0), "it could come no earlier"


def test_a_beat_shows_how_far_the_heal_is_that_has_lasted_longest() -> None:
    made = called(2, attached=2)
    for group_rank, since in ((0, 101.0), (1, 101.5)):
        made.phase_reported(group_rank, PhaseReport(Phase.HEALING, 0), since)
    for received, at in ((10, 102.0), (60, 103.0)):
        report = PhaseReport(Phase.HEALING, 0, received_bytes=received, state_bytes=80)
        made.phase_reported(0, report, at)
        beat = made.make_beat(at)
        assert (beat.phase, beat.lasts_s) == (Phase.HEALING, at - 101.0), "it is the same heal"
        assert (beat.received_bytes, beat.state_bytes) == (received, 80)
    made.phase_reported(0, PhaseReport(Phase.TRAINING, 4), 104.0)
    assert made.make_beat(104.0) == Beat(Phase.HEALING, 0, 2.5), "of the other worker"


def test_a_question_overtakes_the_phases_before_it_and_its_answer_is_training() -> None:
    made = called(1, attached=1)
    made.ask(asks(0, step=4), 10.0, 100.0)
    made.phase_reported(0, PhaseReport(Phase.APPLYING, 3), 100.1)
    assert made.make_beat(100.5) == Beat(Phase.QUORUM, 4, 0.5)
    made.lighthouse_answered(7, QUORUM, "a", 100.75)
    assert made.make_beat(101.0) == Beat(Phase.TRAINING, 4, 0.25)


def test_a_pause_of_the_process_lasts_no_time() -> None:
    made = called(1, attached=1)
    made.phase_reported(0, PhaseReport(Phase.TRAINING, 3), 100.0)
    assert made.make_beat(160.0).lasts_s == pytest.approx(made.look_s)


# -- news ----------------------------------------------------------------------------------------


def test_news_go_to_those_that_are_attached() -> None:
    loss = Lost("b:1", "killed", 9)
    assert called(2).receive(loss) == ()
    assert called(2, attached=2).receive(loss) == (NotifyWorkers((0, 1), loss),)


TO_END, IS_OVER = TermEnds(9, None, "it moves"), TermEnds(9, 4, "b asks")


def test_that_a_term_is_to_end_does_not_hide_that_it_is_over() -> None:
    """A worker whose stream was broken meanwhile has to receive both."""
    made = called(1)
    assert made.receive(IS_OVER) == made.receive(TO_END) == ()
    assert [each.news for each in made.worker_attached(0, "w0")] == [IS_OVER, TO_END]


@pytest.mark.parametrize(
    ("news", "may_commit"),
    [
        (IS_OVER, [True, False, False]),
        (TO_END, [True, True, True]),
        (dataclasses.replace(IS_OVER, quorum_id=8), [True, True, True]),
        (Lost("a", "it hangs", 9), [False, False, False]),
        (Lost("a", "it hung", 8), [True, True, True]),
        (Lost("a:2", "its session had ended", 9), [True, True, True]),
    ],
    ids=["over from 4", "to end", "an earlier one", "left out", "of an earlier one", "has moved"],
)
def test_e3_workers_that_stood_still_do_not_commit_what_their_manager_knows_to_be_in_vain(
    news: TermEnds | Lost, may_commit: list[bool]
) -> None:
    """The workers vote before they have read the news."""
    for step, expected in zip((3, 4, 5), may_commit, strict=True):
        made = called(1, attached=1)
        made.ask(asks(0, step=step), 10.0, 100.0)
        made.lighthouse_answered(
            7, dataclasses.replace(QUORUM, quorum_id=9, participants=at(step)), "a", 100.1
        )
        made.receive(news, news.replica_id if isinstance(news, Lost) else "a")
        _, (answer,) = made.vote(vote(0, step=step, round=7, worker_id="w0"), 10.0, 101.0)
        assert isinstance(answer, AnswerVote)
        assert answer.should_commit is expected


def test_a_vote_that_is_repeated_when_its_step_has_come_to_be_in_vain_is_answered_with_no() -> None:
    """The voter's stream has broken meanwhile, as the manager was frozen."""
    made = called(2, attached=2)
    for rank in (0, 1):
        made.ask(asks(rank), 10.0, 100.0)
    made.lighthouse_answered(7, QUORUM, "a", 100.1)
    first, _ = made.vote(vote(0, round=7, worker_id="w0"), 10.0, 101.0)
    orders = made.receive(TermEnds(QUORUM.quorum_id, 5, "b asks"), quorum_id=QUORUM.quorum_id)
    assert AnswerVote(first, False) in orders
    for rank in (0, 1):
        again, (answer,) = made.vote(vote(rank, round=7, worker_id=f"w{rank}"), 10.0, 103.0)
        assert answer == AnswerVote(again, False)


def at(step: int) -> tuple[Member, ...]:
    return tuple(dataclasses.replace(each, step=step) for each in QUORUM.participants)


@pytest.mark.parametrize("is_asking", [False, True])
def test_what_is_in_vain_is_over_with_the_next_question(is_asking: bool) -> None:
    """The news may also come while that waits at the lighthouse."""
    made = called(1, attached=1)
    if is_asking:
        made.ask(asks(0), 10.0, 100.0)
    made.receive(Lost("a:1", "it hangs", 2), "a:1", 2)
    if not is_asking:
        made.ask(asks(0), 10.0, 100.0)
    made.lighthouse_answered(7, QUORUM, "a", 100.1)
    _, (answer,) = made.vote(vote(0, round=7, worker_id="w0"), 10.0, 101.0)
    assert answer == AnswerVote(1, True, Fate.ENDS)


def test_a_worker_that_is_gone_makes_the_group_leave_and_the_others_receive_news() -> None:
    made = called(2, attached=2)
    send, leave = made.worker_detached(1, "w1", "it died", 101.0)
    reason = "group rank 1 is gone: it died"
    assert send == NotifyWorkers((0,), OwnGroupLost(reason))
    assert leave == Leave(reason)


def test_a_worker_that_was_considered_gone_receives_the_news_that_its_group_has_left() -> None:
    made = called(1, attached=1)
    made.worker_detached(0, "w0", "it does not answer", 101.0)
    lost = OwnGroupLost("group rank 0 is gone: it does not answer")
    assert NotifyWorkers((0,), lost) in made.worker_attached(0, "w0")


def test_an_order_that_comes_between_two_lives_is_for_the_next_one() -> None:
    made = called(1, attached=1)
    made.worker_detached(0, "w0", "it died", 101.0)
    made.receive(Drain("SIGTERM"))
    assert made.worker_attached(0, "next") == (NotifyWorkers((0,), Drain("SIGTERM")),)


def test_an_order_to_end_reaches_workers_that_attach_later_until_all_are_gone() -> None:
    made = called(2, attached=1)
    assert made.receive(Drain("SIGTERM")) == (NotifyWorkers((0,), Drain("SIGTERM")),)
    assert made.worker_attached(1, "w1") == (NotifyWorkers((1,), Drain("SIGTERM")),)
    made.worker_detached(0, "w0", "it has shut down", 102.0, ends=True)
    made.worker_detached(1, "w1", "it has shut down", 102.0, ends=True)
    assert made.worker_attached(0, "next") == ()


def test_a_group_that_is_killed_ends_once_and_leaves_with_the_reason() -> None:
    made = called(1, attached=1)
    assert made.receive(Kill("by hand")) == (NotifyWorkers((0,), Kill("by hand")), EndGroup())
    assert made.receive(Kill("again")) == (NotifyWorkers((0,), Kill("again")),)
    assert made.kill_reason == "killed: by hand"
    orders = made.worker_detached(0, "w0", "it died", 101.0)
    killed = Departure.KILLED
    assert orders == (Leave("killed: by hand", ends=True, departure=killed),)
    assert made.worker_attached(0, "w1") == (NotifyWorkers((0,), Kill("again")),), (
        "it has to end as well"
    )


def test_a_manager_that_ends_reports_whether_its_owner_meant_to() -> None:
    made = called(2, attached=2)
    over = "the process of group rank 0, which had started it,"
    assert made.manager_stops() == (NotifyWorkers((0, 1), ManagerOver(f"{over} stops or is dead")),)
    assert made.is_over
    made.worker_detached(0, "w0", "it has shut down", 101.0, ends=True)
    assert made.manager_stops() == (NotifyWorkers((1,), ManagerOver(f"{over} has shut down")),)


def test_the_first_worker_that_waits_receives_the_reason() -> None:
    made = called(2, attached=2)
    assert made.explain_wait("late", 101.0) == (), "nobody asks"
    made.ask(asks(1), 60.0, 100.0)
    made.look_s = math.inf
    assert made.explain_wait("", 100.4) == ()
    times = [100.0 + 0.4 * each for each in range(1, 6)]
    orders = [made.explain_wait("", at) for at in times][-1]
    missing = "group rank 0 of 2 workers has not asked for a quorum"
    assert orders == (NotifyWorkers((1,), NoQuorumYet(missing)),)
    made.ask(asks(0), 60.0, 102.1)
    assert made.explain_wait("b is slow", 102.2) == (NotifyWorkers((0,), NoQuorumYet("b is slow")),)


def test_a_refused_attachment_changes_nothing() -> None:
    made = called(1)
    with pytest.raises(RequestRefused):
        made.worker_attached(1, "w1")
    assert made.receive(Lost("b:1", "killed", 9)) == ()


def test_a_worker_whose_answer_was_lost_does_not_go_on_after_its_group_has_left() -> None:
    """The worker receives the quorum again; if it never asked, the group would stay out."""
    made = called(1, attached=1)
    made.ask(asks(0, question=3), 10.0, 100.0)
    made.lighthouse_answered(7, QUORUM, "a", 101.0)
    made.worker_detached(0, "w0", "its stream broke", 102.0)
    why = "group rank 0 is gone: its stream broke"
    ends = TermEnds(QUORUM.quorum_id, QUORUM.max_step + 1, why)
    assert made.worker_attached(0, "w0") == (
        NotifyWorkers((0,), OwnGroupLost(why)),
        NotifyWorkers((0,), ends),
    )
    _, again = made.ask(asks(0, question=3), 10.0, 103.0)
    assert [type(each) for each in again] == [AnswerWorker]
    assert made.worker_attached(0, "w0") == (NotifyWorkers((0,), ends),)
    made.ask(asks(0, question=4), 10.0, 104.0)
    assert made.worker_attached(0, "w0") == (), "until the group asks"


@pytest.mark.parametrize(
    ("is_open", "released_at"),
    [(True, 100.2 + MISSED_NEWS_S), (False, 100.2), (None, 100.0 + HOLD_S)],
    ids=["the session begins", "no lighthouse", "neither"],
)
def test_e3_a_manager_that_continues_a_term_commits_nothing_before_it_knows_of_its_end(
    is_open: bool | None, released_at: float
) -> None:
    made = called(2, attached=2)
    made.term_resumed(100.0)
    votes = [made.vote(vote(rank, round=3, worker_id=f"w{rank}"), 10.0, 100.1) for rank in (0, 1)]
    assert [orders for _, orders in votes] == [(), ()]
    orders = () if is_open is None else made.link_changed(100.2, is_open=is_open)
    if is_open is not False:
        assert orders == ()
        assert made.next_deadline() == pytest.approx(released_at)
        assert made.tick(released_at - 0.01) == ()
        orders = made.tick(released_at)
    assert orders == tuple(AnswerVote(who, True, Fate.ENDS) for who, _ in votes)
    again, (answer,) = made.vote(vote(0, round=3, worker_id="w0"), 10.0, 102.0)
    assert answer == AnswerVote(again, True, Fate.ENDS)


@pytest.mark.parametrize("is_resumed", [True, False])
@pytest.mark.parametrize("last", [9, 0], ids=["as before", "restarted"])
def test_a_worker_that_was_restarted_while_no_manager_lived(last: int, is_resumed: bool) -> None:
    """The others would keep their connections to the incarnation that is continued (M9)."""
    made = called(2, attached=2)
    if is_resumed:
        made.term_resumed(100.0)
    assert made.ask(asks(0, last_quorum_id=9), 10.0, 100.1)[1] == ()
    _, (ask,) = made.ask(asks(1, last_quorum_id=last), 10.0, 100.1)
    assert isinstance(ask, AskLighthouse)
    assert ask.request.new_incarnation is (is_resumed and not last)


def test_e3_what_is_denied_before_the_votes_are_released_is_not_committed() -> None:
    made = called(2, attached=2)
    made.term_resumed(100.0)
    callers = [made.vote(vote(r, round=3, worker_id=f"w{r}"), 10.0, 100.1)[0] for r in (0, 1)]
    made.link_changed(100.2, is_open=True)
    orders = made.receive(Lost("a:1", "it was silent", 9), "a:1")
    assert orders == (
        NotifyWorkers((0, 1), Lost("a:1", "it was silent", 9)),
        *(AnswerVote(each, False) for each in callers),
    )


def test_a_beat_carries_the_differences_since_the_last_one() -> None:
    made = called()
    reports = tuple(DifferenceReport(7, step, "they differ") for step in range(MAX_DIFFERENCES + 2))
    made.difference_reported(reports[0])
    assert made.make_beat(100.0) == Beat(differences=reports[:1])
    assert made.make_beat(100.1) == Beat()
    for report in reports:
        made.difference_reported(report)
    assert made.make_beat(100.2) == Beat(differences=reports[2:]), "as many as a beat may carry"


# -- what the lighthouse learns of time and faults -------------------------------------------------


def an_event(number: int, **fields: Any) -> GroupEvent:
    return GroupEvent(kind=EventKind.DISCARDED, source="w", number=number, **fields)


def test_n6_the_tally_of_group_rank_0_travels_with_each_beat() -> None:
    made = called(2, attached=2)
    made.tally_reported(1, Tally(committed_s=1.0), 100.0)
    assert made.make_beat(100.0).tally is None
    made.tally_reported(0, Tally(committed_s=3.0, away_s=9.0, ago_s=0.5), 100.0)
    assert made.make_beat(100.25).tally == Tally(committed_s=3.0, ago_s=0.75)
    assert made.make_beat(101.0).tally == Tally(committed_s=3.0, ago_s=1.5)


def test_n9_the_step_times_of_the_slowest_worker_travel_with_each_beat() -> None:
    made = called(2, attached=2)
    slow, fast = StepTimes(0.5, 0.0, 0.0, 0.0, 10), StepTimes(0.25, 0.0, 0.0, 0.25, 10)
    made.tally_reported(0, Tally(committed_s=1.0, step_times=fast), 100.0)
    made.tally_reported(1, Tally(committed_s=1.0, step_times=slow), 100.0)
    sent = made.make_beat(100.0).tally
    assert sent is not None
    assert sent.step_times == dataclasses.replace(slow, group_rank=1)
    made.worker_detached(1, "w1", "killed", 101.0)
    sent = made.make_beat(101.0).tally
    assert sent is not None
    assert sent.step_times == fast


def test_n6_the_tally_of_a_dead_worker_is_not_that_of_the_next_incarnation() -> None:
    made = Group(2)
    for rank in (0, 1):
        made.worker_attached(rank, f"x{rank}")
    made.tally_reported(0, Tally(committed_s=3.0), 100.0)
    made.worker_detached(1, "x1", "killed", 101.0)
    assert made.make_beat(101.0).tally is not None
    made.worker_detached(0, "x0", "killed", 101.0)
    assert made.make_beat(101.0).tally is None


def test_n5_an_event_is_sent_once_and_again_to_the_next_lighthouse() -> None:
    made = called()
    for number in range(MAX_EVENTS_KEPT + 2):
        made.event_reported(an_event(number, ago_s=0.25), 100.0)
    sent = [each.number for each in made.make_beat(101.0).events]
    assert sent == list(range(MAX_EVENTS_KEPT + 2))
    assert made.make_beat(101.0).events == ()
    made.event_reported(an_event(50), 102.0)
    made.link_changed(103.0, is_open=False)
    made.link_changed(104.0, is_open=True)
    again = made.make_beat(104.0).events
    assert [each.number for each in again] == [*range(3, MAX_EVENTS_KEPT + 2), 50]
    assert [each.ago_s for each in again][-2:] == [4.25, 2.0]


def test_n1_a_manager_reports_once_that_the_one_before_has_died() -> None:
    made = Group(2)
    made.record_predecessor("was killed by SIGKILL", 100.0)
    (event,) = made.make_beat(101.0).events
    assert (event.kind, event.ago_s) == (EventKind.MANAGER_DIED, 1.0)
    assert event.cause == "its manager was killed by SIGKILL, and was started again"
    assert made.make_beat(101.0).events == ()
    made.link_changed(103.0, is_open=True)
    assert [each.number for each in made.make_beat(104.0).events] == [event.number], "repeated"


def test_n5_events_that_workers_repeat_do_not_take_the_place_of_the_managers_own() -> None:
    """A lighthouse dies right after it has received that the manager before has died."""
    made = called()
    made.record_predecessor("was killed by SIGKILL", 100.0)
    for number in range(MAX_EVENTS_KEPT):
        made.event_reported(an_event(number), 100.5)
    assert len(made.make_beat(101.0).events) == MAX_EVENTS_KEPT + 1
    made.link_changed(103.0, is_open=True)
    again = made.make_beat(104.0).events
    assert [each.kind for each in again].count(EventKind.MANAGER_DIED) == 1
    assert len(again) == MAX_EVENTS_KEPT + 1


def test_n5_where_events_are_too_many_the_newest_of_workers_and_manager_are_sent() -> None:
    made = called()
    for number in range(1, MAX_EVENTS_KEPT + 1):
        made.event_reported(an_event(number), 100.0)
    for _ in range(MAX_EVENTS_SENT):
        made.record_predecessor("was killed by SIGKILL", 101.0)
    made.link_changed(103.0, is_open=True)
    sent = made.make_beat(104.0).events
    assert len(sent) == MAX_EVENTS_SENT
    numbers = [each.number for each in sent if each.kind is EventKind.MANAGER_DIED]
    workers = [each.number for each in sent if each.kind is not EventKind.MANAGER_DIED]
    assert workers == list(range(1, MAX_EVENTS_KEPT + 1))
    assert numbers == list(range(MAX_EVENTS_KEPT + 1, MAX_EVENTS_SENT + 1))


def test_n6_an_absence_counts_while_the_group_asks() -> None:
    made = called(1, attached=1)
    made.tally_reported(0, Tally(committed_s=3.0), 100.0)
    made.link_changed(102.0, is_open=True, absence=Absence(99.0, "it ended"))
    beat = made.make_beat(102.0)
    (event,) = beat.events
    assert (event.kind, event.cause, event.lasts_s) == (
        EventKind.LIGHTHOUSE_AWAY,
        "it ended",
        3.0,
    )
    assert beat.tally is not None
    assert beat.tally.away_s == 0.0, "no step has asked"
    made.ask(asks(0, step=4), 60.0, 110.0)
    made.link_changed(113.0, is_open=True, absence=Absence(108.0, "it ended"))
    tally = made.make_beat(113.0).tally
    assert tally is not None
    assert tally.away_s == pytest.approx(3.0, abs=made.look_s * 10)
