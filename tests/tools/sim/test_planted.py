"""Each planted fault is found by some seed (rule X3); else the simulator would prove nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from tools.sim.fleet import Fleet
from tools.sim.scenario import Fault, draw, draw_asking
from torchft_svc.core.pausable_clock import PausableClock
from torchft_svc.core.quorum import activity, assignment, names
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse import jobs, lighthouse, overview, quorum
from torchft_svc.core.quorum.lighthouse.jobs import Job, Jobs
from torchft_svc.core.quorum.lighthouse.lighthouse import Lighthouse, Session, Sessions
from torchft_svc.core.quorum.lighthouse.membership import GroupState, JobView, Membership
from torchft_svc.core.quorum.manager import commit_barrier
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, CommitBarrier
from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.core.quorum.manager.lighthouse_link import ManagerLink
from torchft_svc.core.quorum.types import GroupRequest, Member, QuorumConfig
from torchft_svc.core.quorum.worker import round as core_round
from torchft_svc.core.quorum.worker import step
from torchft_svc.core.quorum.worker.round import Decide, Ready, Round, WorkerCalls
from torchft_svc.core.quorum.worker.step import StepMachine
from torchft_svc.core.route import AttachRetry, CallRetry

# A fault that needs more seeds than this is not found: the simulator looks in the wrong places.
MAX_SEEDS = 40

# What a fault has to violate, to count as found.
INVARIANTS = (*(f"I{number}" for number in range(1, 8)), "F4")

Plant = Callable[[pytest.MonkeyPatch], None]


def changed_list_keeps_its_id(plant: pytest.MonkeyPatch) -> None:
    """Incarnations are forgotten where two member lists are compared."""
    place = property(lambda self: names.stable_name(self.replica_id))
    plant.setattr(Member, "place", place)


def discarded_step_keeps_the_id(plant: pytest.MonkeyPatch) -> None:
    real = Jobs.request

    def request(self: Any, job: str, member: Member, *more: Any, **how: Any) -> Any:
        return real(self, job, dataclasses.replace(member, commit_failures=0), *more, **how)

    plant.setattr(Jobs, "request", request)


def seen_ids_are_ignored(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Job, "record_quorum_id", lambda self, reported_id: None)


def what_workers_were_sent_is_ignored(plant: pytest.MonkeyPatch) -> None:
    real = WorkerCalls.sign_question

    def question(self: Any, request: Any) -> Any:
        return dataclasses.replace(real(self, request), last_quorum_id=0, step_quorum_id=0)

    plant.setattr(WorkerCalls, "sign_question", question)


def withdrawals_are_lost(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Jobs, "withdraw", lambda self, job, caller, now: None)


def joining_is_ignored(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(jobs, "joining", lambda members, previous: frozenset())


def the_silent_never_die(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Membership, "dead", lambda self, now: [])
    plant.setattr(Membership, "next_death", lambda self: None)


def lost_steps_are_not_noticed(plant: pytest.MonkeyPatch) -> None:
    def unchecked(view: JobView, config: QuorumConfig, members: list[Member]) -> quorum.Formed:
        return quorum.Formed(tuple(sorted(members, key=lambda each: each.replica_id)))

    plant.setattr(quorum, "check_progress", unchecked)


def a_loss_is_reported_where_there_is_none(plant: pytest.MonkeyPatch) -> None:
    real = quorum.check_progress

    def report(view: JobView, config: QuorumConfig, members: list[Member]) -> Any:
        decision = real(view, config, members)
        if isinstance(decision, quorum.Formed):
            return quorum.Formed(decision.members, lost_from=view.committed_step)
        return decision

    plant.setattr(quorum, "check_progress", report)


def veterans_are_forgotten(plant: pytest.MonkeyPatch) -> None:
    real = quorum.is_loss_allowed

    def is_allowed(view: JobView, config: QuorumConfig) -> bool:
        return real(dataclasses.replace(view, num_veterans=0), config)

    plant.setattr(quorum, "is_loss_allowed", is_allowed)


def a_survivor_counts_as_a_restart(plant: pytest.MonkeyPatch) -> None:
    """A survivor that does not report the quorum that it was in counts as a restart."""
    real = Membership.asked

    def asked(self: Any, member: Member, caller: int, now: float) -> Any:
        return real(self, dataclasses.replace(member, has_history=False), caller, now)

    plant.setattr(Membership, "asked", asked)


def who_is_far_ahead_is_believed(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(quorum, "doubted_steps", lambda view, config, candidates: {})


def every_job_that_ends_has_finished(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(overview.History, "end", lambda self: True)


def what_groups_report_is_ignored(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Membership, "reported", lambda self, replica_id, last: None)


def heal_from_the_wrong_source(plant: pytest.MonkeyPatch) -> None:
    def plan(world_size: int, current: list[int], group_rank: int, from_one: bool) -> Any:
        behind = sorted(set(range(world_size)) - set(current))
        if from_one:
            return {rank: current[0] for rank in range(world_size) if rank != current[0]}
        return {rank: (rank + 1) % world_size for rank in behind}

    plant.setattr(assignment, "heal_plan", plan)
    plant.setattr(assignment, "extra_plan", lambda sources, current: {})


def at_step_0_nobody_heals(plant: pytest.MonkeyPatch) -> None:
    real = assignment.heal_plan
    plant.setattr(
        assignment,
        "heal_plan",
        lambda size, current, rank, from_one: real(size, current, rank, from_one=False),
    )


def one_yes_is_enough(plant: pytest.MonkeyPatch) -> None:
    real = CommitBarrier.count_vote

    def count(self: Any, *what: Any) -> Any:
        size, self._world_size = self._world_size, 1
        try:
            return real(self, *what)
        finally:
            self._world_size = size

    plant.setattr(CommitBarrier, "count_vote", count)


def a_dead_worker_s_peers_are_not_informed(plant: pytest.MonkeyPatch) -> None:
    real = Group.callers_in_barrier
    plant.setattr(Group, "callers_in_barrier", lambda self: real(self)[:1])


def a_restarted_worker_goes_unnoticed(plant: pytest.MonkeyPatch) -> None:
    real = Group.combine_requests

    def combine(self: Any, requests: Any) -> GroupRequest:
        return dataclasses.replace(real(self, requests), new_incarnation=False)

    plant.setattr(Group, "combine_requests", combine)


def a_discarded_step_counts(plant: pytest.MonkeyPatch) -> None:
    real = StepMachine.decide

    def decide(self: Any, committed: bool, quorum_id: int = 0) -> None:
        before = self.state.step
        real(self, committed, quorum_id)
        if not committed and self.state.failures % 3 == 0:
            self.state = self.state._replace(step=before + 1)

    plant.setattr(StepMachine, "decide", decide)


def an_error_is_forgotten(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(StepMachine, "latch", lambda self, error, epoch=None: True)


def a_late_vote_counts(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(CommitBarrier, "check_round", lambda self, vote: None)
    plant.setattr(CommitBarrier, "find_ended", lambda self, vote, asking: None)


def a_healed_step_counts_at_once(plant: pytest.MonkeyPatch) -> None:
    real = StepMachine.form

    def form(self: Any, participation: Any, heal_to: int | None = None, **how: Any) -> None:
        real(self, participation, heal_to, **how)
        if heal_to is not None:
            self.state = self.state._replace(step=heal_to)

    plant.setattr(StepMachine, "form", form)


def the_dead_are_remembered_for_ever(plant: pytest.MonkeyPatch) -> None:
    real = Membership.gone

    def gone(self: Any, replica_id: str) -> int | None:
        caller = real(self, replica_id)
        self.ahead.add(replica_id)
        return caller

    plant.setattr(Membership, "gone", gone)


def the_dead_are_awaited(plant: pytest.MonkeyPatch) -> None:
    real = Membership.gone

    def gone(self: Any, replica_id: str) -> int | None:
        group = self._known.get(replica_id)
        is_awaited = self.state(replica_id) is GroupState.AWAITED
        caller = real(self, replica_id)
        if is_awaited:
            group.seen_at = math.inf
            self._known[replica_id] = group
            self.groups[GroupState.AWAITED].add(replica_id)
        return caller

    plant.setattr(Membership, "gone", gone)


def stragglers_are_awaited_for_ever(plant: pytest.MonkeyPatch) -> None:
    real = quorum.patience
    never = lambda *what: dict.fromkeys(real(*what), math.inf)  # noqa: E731
    plant.setattr(quorum, "patience", never)


def who_asks_again_has_a_new_patience(plant: pytest.MonkeyPatch) -> None:
    real = Membership.asked

    def asked(self: Any, member: Member, caller: int, now: float) -> int | None:
        self._known[member.replica_id].gave_up = None
        return real(self, member, caller, now)

    plant.setattr(Membership, "asked", asked)


def a_drained_group_is_reported_as_lost(plant: pytest.MonkeyPatch) -> None:
    def how_it_ended(self: Any, replica_id: str, how: Any) -> Any:
        return dataclasses.replace(how, between_steps=False, ends=False)

    plant.setattr(Job, "how_it_ended", how_it_ended)


def a_group_that_drains_stays(plant: pytest.MonkeyPatch) -> None:
    real = Group.quorum_requested

    def quorum_requested(self: Any, request: Any, *rest: Any) -> Any:
        return real(self, dataclasses.replace(request, drain_reason=""), *rest)

    plant.setattr(Group, "quorum_requested", quorum_requested)
    plant.setattr(Group, "begin_drain", lambda self, reason: None)


def who_was_left_out_is_awaited(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Membership, "evicted", lambda self, replica_ids: None)


def who_heals_is_not_waited_for(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(QuorumConfig, "healing_timeout_s", property(lambda self: self.join_timeout_s))


def who_waits_hangs(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(activity, "HANGING_PHASES", frozenset(Phase))


def who_waits_is_left_out(plant: pytest.MonkeyPatch) -> None:
    """A group that waits is left out with the one that it waits for."""

    real = jobs.to_evict

    def to_evict(members: Membership, hangs: Any, candidates: Any) -> list[str]:
        if hangs.unhandled:
            hangs.unhandled |= members.groups[GroupState.AWAITED]
        return real(members, hangs, candidates)

    plant.setattr(jobs, "to_evict", to_evict)


def who_hangs_is_left_out_though_nobody_waits(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(quorum, "waits_for_others", lambda members, hangs, replica_id: True)


def nobody_is_left_out(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(jobs, "to_evict", lambda members, hangs, candidates: [])


def who_is_left_out_is_not_informed(plant: pytest.MonkeyPatch) -> None:
    real = jobs.ReportEviction
    less = lambda *what: real(*what[:4], what[4][1:])  # noqa: E731
    plant.setattr(jobs, "ReportEviction", less)


def who_was_left_out_stays_out(plant: pytest.MonkeyPatch) -> None:
    """A group that was left out is treated as a newcomer where a member wants none."""
    real = quorum.candidates_of

    def candidates(view: JobView) -> list[Member]:
        return [each for each in real(view) if each.replica_id in view.previous] or real(view)

    plant.setattr(quorum, "candidates_of", candidates)


def who_hangs_is_not_waited_for_again(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Membership, "recalled", lambda self: [])


def who_was_waited_for_again_is_never_left_out(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(activity.HangWatch, "handle_again", lambda self, replica_ids: None)


def who_lost_his_answer_is_sent_no(plant: pytest.MonkeyPatch) -> None:
    def answer(vote: Any, caller: int, ended: Any) -> AnswerVote:
        return AnswerVote(caller, should_commit=False)

    plant.setattr(commit_barrier, "answer_late", answer)


def who_comes_late_waits_for_those_that_have_gone_on(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Group, "late_answer", lambda self, request, caller: None)


def what_holds_up_a_worker_is_ignored(plant: pytest.MonkeyPatch) -> None:
    """The worker's peers wait for it in a collective of the group, which then hangs."""
    plant.setattr(activity, "HELD_UP_PHASES", frozenset())


def who_puts_its_heal_off_votes_yes(plant: pytest.MonkeyPatch) -> None:
    real = StepMachine.form

    def form(
        self: Any, participation: Any, heal_to: int | None = None, *, may_heal: bool = True
    ) -> None:
        real(self, participation, heal_to if may_heal else None)

    plant.setattr(StepMachine, "form", form)


def an_update_that_was_lost_counts(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(StepMachine, "lose_update", lambda self, spoiled_by="": self.end_update())


def an_update_that_was_spoiled_counts_as_lost(plant: pytest.MonkeyPatch) -> None:
    """The weights, of which a part was changed, count as those of the step before."""
    real = StepMachine.lose_update
    plant.setattr(StepMachine, "lose_update", lambda self, spoiled_by="": real(self))


# -- a worker's round ---------------------------------------------------------------------------


def who_has_missed_a_quorum_keeps_its_connections(plant: pytest.MonkeyPatch) -> None:
    """A worker that has missed a quorum sums as if it had it."""
    plant.setattr(Round, "record_failure", _fail_quietly(Round.record_failure))
    plant.setattr(Round, "may_reduce", True)


def _fail_quietly(real: Any) -> Any:
    def record_failure(self: Any, error: Any) -> Any:
        real(self, error)
        self.step.state = self.step.state._replace(error=None)
        return Ready()

    return record_failure


def who_is_behind_contributes(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(core_round, "participation", _all_contribute)


def _all_contribute(part: Any, **how: Any) -> Any:
    how["heals_first"] = True
    return step.participation(part, **how)


def spoiled_weights_count(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(StepMachine, "check_whole", lambda self: None)


def who_is_asked_to_end_trains_on(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Round, "check_left", lambda self: None)


def a_vote_names_the_round_before(plant: pytest.MonkeyPatch) -> None:
    real = WorkerCalls.sign_ballot

    def ballot(self: Any, vote: Any) -> Any:
        signed = real(self, vote)
        return dataclasses.replace(signed, round=max(0, signed.round - 1))

    plant.setattr(WorkerCalls, "sign_ballot", ballot)


def a_manager_that_is_restarted_is_not_asked_again(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(CallRetry, "pause_s", lambda self, error, now, is_over: None)


def a_manager_that_is_gone_is_asked_for_ever(plant: pytest.MonkeyPatch) -> None:
    real = CallRetry.__init__

    def begin(self: Any, deadline: float, patience_s: float) -> None:
        real(self, deadline, math.inf)

    plant.setattr(CallRetry, "__init__", begin)


def a_lost_decision_counts_as_no(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(core_round, "LoseDecision", lambda error: Decide(False, error))


def a_step_that_began_too_early_counts(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Round, "_began_too_early", lambda self, quorum: None)


def a_stream_to_the_manager_is_not_opened_again(plant: pytest.MonkeyPatch) -> None:
    real = AttachRetry.ended

    def ended(self: Any, how: Any, now: float) -> Any:
        return dataclasses.replace(real(self, how, now), pause_s=math.inf)

    plant.setattr(AttachRetry, "ended", ended)


# -- the lighthouse's sessions -------------------------------------------------------------------


def an_old_session_s_end_takes_its_group_out(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Sessions, "has_session", lambda self, job, replica_id: False)


def an_answer_has_another_question_s_number(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Session, "answered", property(lambda self: (self.stream, self.number - 1)))


def questions_never_expire(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(lighthouse, "expires_at", lambda asked_at, timeout_s: math.inf)


def the_question_of_a_stream_that_has_ended_stays(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Lighthouse, "withdraw_closed", lambda self, session, at: None)


def who_is_refused_because_its_name_is_taken_is_remembered(plant: pytest.MonkeyPatch) -> None:
    real = Job.forget_group

    def forget_group(self: Any, replica_id: str) -> Any:
        has_name = self.members.names.is_free_for(replica_id)
        return real(self, replica_id) if has_name else None

    plant.setattr(Job, "forget_group", forget_group)


def a_standstill_of_the_lighthouse_counts(plant: pytest.MonkeyPatch) -> None:
    def now(self: Any, at: float) -> float:
        self.skip_to(at)
        return at

    plant.setattr(PausableClock, "now", now)


def who_waits_does_not_learn_why(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Lighthouse, "uninformed", lambda self, pause, reason: [])


def news_come_over_the_newest_session_alone(plant: pytest.MonkeyPatch) -> None:
    real = Sessions.streams_of

    def streams_of(self: Any, job: str, replica_ids: Any) -> tuple[int, ...]:
        return tuple(stream for each in replica_ids for stream in real(self, job, (each,))[-1:])

    plant.setattr(Sessions, "streams_of", streams_of)


def nobody_learns_that_a_term_has_ended(plant: pytest.MonkeyPatch) -> None:
    real = Lighthouse.lead_ended
    plant.setattr(Lighthouse, "lead_ended", lambda *args: real(*args)[:0])


def who_leaves_is_out_when_his_stream_has_ended(plant: pytest.MonkeyPatch) -> None:
    """A leave counts as a loss, which takes the others' step from them."""

    def leave_session(self: Any, session: Any, leave: Any, at: float) -> None:
        self._sessions.end_stream(session.stream)

    plant.setattr(Lighthouse, "leave_session", leave_session)


# -- a group's manager ---------------------------------------------------------------------------


def who_gives_up_still_asks(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Group, "call_withdrawn", lambda self, caller: ())


def a_worker_that_is_gone_is_not_missed(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Group, "worker_detached", lambda self, *what, **how: ())


def a_restarted_group_keeps_its_replica_id(plant: pytest.MonkeyPatch) -> None:
    real = ManagerLink._begin_incarnation

    def begin(self: Any, replica_id: str) -> None:
        before = getattr(self, "_me", None)
        real(self, replica_id)
        if before is not None:
            self._me.replica_id = before.replica_id

    plant.setattr(ManagerLink, "_begin_incarnation", begin)


def no_beats_are_sent(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(ManagerLink, "_send_beat", lambda self, connection, now: None)


def a_session_that_broke_is_not_opened_again(plant: pytest.MonkeyPatch) -> None:
    real = ManagerLink._lose_connection

    def lose(self: Any, error: Any, now: float) -> None:
        real(self, error, now)
        if self._attempts.was_open:
            self._attempts.retry_at = math.inf

    plant.setattr(ManagerLink, "_lose_connection", lose)


def nobody_goes_back_to_an_earlier_lighthouse(plant: pytest.MonkeyPatch) -> None:
    real = ManagerLink.probed
    plant.setattr(
        ManagerLink, "probed", lambda self, number, takers, now: real(self, number, (), now)
    )


def who_has_no_answer_waits_for_those_that_have_one(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Group, "answered_before", lambda self, request: None)


# Each with the first seed of the search: near the first one that finds it soon, as fleets that try
# again and again, or stand still until the end of a run, take seconds.
PLANTS: dict[Plant, int] = {
    changed_list_keeps_its_id: 92,
    discarded_step_keeps_the_id: 1276,
    seen_ids_are_ignored: 54,
    what_workers_were_sent_is_ignored: 1_795_307_743_873,
    withdrawals_are_lost: 12,
    joining_is_ignored: 120,
    the_silent_never_die: 6,
    lost_steps_are_not_noticed: 9,
    a_loss_is_reported_where_there_is_none: 0,
    veterans_are_forgotten: 86,
    a_survivor_counts_as_a_restart: 46,
    every_job_that_ends_has_finished: 4,
    who_is_far_ahead_is_believed: 76,
    what_groups_report_is_ignored: 347,
    heal_from_the_wrong_source: 7,
    at_step_0_nobody_heals: 4,
    one_yes_is_enough: 0,
    a_dead_worker_s_peers_are_not_informed: 2,
    a_restarted_worker_goes_unnoticed: 2,
    a_discarded_step_counts: 31,
    an_error_is_forgotten: 29,
    a_late_vote_counts: 8,
    who_lost_his_answer_is_sent_no: 8,
    who_comes_late_waits_for_those_that_have_gone_on: 820,
    what_holds_up_a_worker_is_ignored: 5020,
    a_healed_step_counts_at_once: 77,
    the_dead_are_remembered_for_ever: 8,
    the_dead_are_awaited: 17,
    stragglers_are_awaited_for_ever: 11,
    who_asks_again_has_a_new_patience: 630,
    a_drained_group_is_reported_as_lost: 7,
    a_group_that_drains_stays: 7,
    who_was_left_out_is_awaited: 321,
    who_heals_is_not_waited_for: 35,
    who_waits_hangs: 19,
    who_waits_is_left_out: 5,
    who_hangs_is_left_out_though_nobody_waits: 4,
    nobody_is_left_out: 48,
    who_is_left_out_is_not_informed: 5,
    who_was_left_out_stays_out: 0,
    who_hangs_is_not_waited_for_again: 401,
    who_was_waited_for_again_is_never_left_out: 401,
    who_puts_its_heal_off_votes_yes: 205,
    an_update_that_was_lost_counts: 19,
    an_update_that_was_spoiled_counts_as_lost: 15,
    a_restarted_group_keeps_its_replica_id: 10,
    no_beats_are_sent: 2,
    a_session_that_broke_is_not_opened_again: 29,
    nobody_goes_back_to_an_earlier_lighthouse: 38,
    who_has_missed_a_quorum_keeps_its_connections: 25,
    who_is_behind_contributes: 0,
    spoiled_weights_count: 29,
    who_is_asked_to_end_trains_on: 7,
    a_vote_names_the_round_before: 2,
    a_manager_that_is_restarted_is_not_asked_again: 2,
    a_manager_that_is_gone_is_asked_for_ever: 80,
    a_lost_decision_counts_as_no: 2,
    a_step_that_began_too_early_counts: 252,
    a_stream_to_the_manager_is_not_opened_again: 12,
    an_old_session_s_end_takes_its_group_out: 116,
    an_answer_has_another_question_s_number: 0,
    questions_never_expire: 1,
    the_question_of_a_stream_that_has_ended_stays: 1,
    who_is_refused_because_its_name_is_taken_is_remembered: 38,
    a_standstill_of_the_lighthouse_counts: 1880,
    who_waits_does_not_learn_why: 0,
    news_come_over_the_newest_session_alone: 116,
    nobody_learns_that_a_term_has_ended: 495,
    who_leaves_is_out_when_his_stream_has_ended: 15,
    who_gives_up_still_asks: 4,
    a_worker_that_is_gone_is_not_missed: 2,
    who_has_no_answer_waits_for_those_that_have_one: 4852,
}


@pytest.mark.parametrize(
    ("planted", "first"), PLANTS.items(), ids=[plant.__name__ for plant in PLANTS]
)
def test_it_is_found(planted: Plant, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    # Where each step asks: more questions find more in the rules about them.
    outcomes = (Fleet(draw_asking(seed)).run() for seed in range(first, first + MAX_SEEDS))
    found = next(outcome for outcome in outcomes if outcome.fell is not None)
    assert found.fell in INVARIANTS, found.what  # an exception shows nothing: the plant may raise
    monkeypatch.undo()
    assert Fleet(found.scenario).run().fell is None, "it falls without the fault, too"


@pytest.mark.parametrize("away_s", [0.2, 4.0])
def test_workers_that_lock_are_found_once_another_manager_is_there(
    away_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager has died when one of two workers had the quorum; the question lasts 60 s."""
    drawn = draw(6301686)
    scenario = dataclasses.replace(
        drawn,
        num_groups=1,
        group_world_size=2,
        config=dataclasses.replace(drawn.config, hang_timeout_s=None),
        # The manager dies when the hang is over, ``away_s`` after both were drawn: neither counts
        # as a trouble of the group any more.
        faults=(
            Fault(at=10.0, kind="hang", target=0, seconds=away_s + 1.0),
            Fault(at=10.1, kind="lose_quorum", target=0, seconds=away_s),
        ),
    )
    outcome = Fleet(scenario).run()
    assert outcome.fell is None, outcome.what
    who_has_no_answer_waits_for_those_that_have_one(monkeypatch)
    outcome = Fleet(scenario).run()
    assert outcome.fell == "I5"
    assert "in a collective" in outcome.what
