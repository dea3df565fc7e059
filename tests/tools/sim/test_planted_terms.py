"""Each planted fault in the rules of terms (E1 to E9) is found by some seed (rule X3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sim.test_planted import INVARIANTS, MAX_SEEDS, Plant
from tools.sim.fleet import Fleet
from tools.sim.scenario import Scenario, draw_long_terms, draw_returns, draw_steady
from tools.sim.site import Site
from tools.sim.trainer_actor import WorkerActor
from torchft_svc.core.quorum.activity import Activity
from torchft_svc.core.quorum.lighthouse.jobs import Job, Jobs
from torchft_svc.core.quorum.lighthouse.lighthouse import Sessions
from torchft_svc.core.quorum.lighthouse.membership import Gathering, Membership
from torchft_svc.core.quorum.manager import group
from torchft_svc.core.quorum.manager.commit_barrier import CommitBarrier
from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.core.quorum.manager.lighthouse_link import Incarnation, ManagerLink
from torchft_svc.core.quorum.session_messages import NewcomerWaits
from torchft_svc.core.quorum.term import RunningTerm, TermEnds
from torchft_svc.core.quorum.worker.round import Ready, Round

NUM_GROUPS = 3  # few: such runs are short
Draw = Callable[[int, int], Scenario]

# -- who may go on (E1, E3) ----------------------------------------------------------------------


def a_lone_member_goes_on(plant: pytest.MonkeyPatch) -> None:
    real = group.assign

    def assign(quorum: Any, *what: Any) -> Any:
        part = real(quorum, *what)
        is_alone = len(quorum.participants) == 1
        return dataclasses.replace(part, steady=True) if is_alone else part

    plant.setattr(group, "assign", assign)


def who_has_lost_its_connections_goes_on(plant: pytest.MonkeyPatch) -> None:
    real = Round._why_not_kept
    plant.setattr(Round, "_why_not_kept", lambda self, request, broken: real(self, request, None))


def who_has_lost_its_update_goes_on(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Round, "_why_not_kept", lambda self, request, broken: broken)


def one_of_several_workers_asks_alone(plant: pytest.MonkeyPatch) -> None:
    """One worker asks instead of going on and voting no."""
    real = Round.begin_step

    def begin_step(self: Any, *what: Any) -> Ready:
        rules, self._rules = self._rules, dataclasses.replace(self._rules, group_world_size=1)
        try:
            return real(self, *what)
        finally:
            self._rules = rules

    plant.setattr(Round, "begin_step", begin_step)


# -- the wish (E2) -------------------------------------------------------------------------------


def a_wish_is_lost(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Round, "wants_question", False)


def what_the_sum_of_the_wishes_says_is_ignored(plant: pytest.MonkeyPatch) -> None:
    real = Round.record_wishes
    plant.setattr(Round, "record_wishes", lambda self, wishes: real(self, 0.0))


def each_worker_goes_by_its_own_wish(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(
        Round, "record_wishes", lambda self, wishes: _see(self, float(self.wants_question))
    )


def _see(round_: Any, wishes: float) -> None:
    round_._wishes = wishes


def who_drains_does_not_say_so(plant: pytest.MonkeyPatch) -> None:
    real = Round.wants_question
    assert isinstance(real, property)
    plant.setattr(
        Round, "wants_question", property(lambda self: self._asked_for_in or self.peers.num_waiting)
    )


def a_session_that_begins_does_not_learn_of_newcomers(plant: pytest.MonkeyPatch) -> None:
    _leave_out_missed(plant, NewcomerWaits)


# -- the end of a term (E4) ----------------------------------------------------------------------


def nobody_is_informed_that_a_member_asks(plant: pytest.MonkeyPatch) -> None:
    real = Job.end_term_for_request

    def end_term_for_request(self: Any, member: Any, *, agreed: bool) -> tuple[str, ...]:
        real(self, member, agreed=agreed)
        return ()

    plant.setattr(Job, "end_term_for_request", end_term_for_request)


def a_session_that_begins_does_not_learn_of_the_end(plant: pytest.MonkeyPatch) -> None:
    _leave_out_missed(plant, TermEnds)


def _leave_out_missed(plant: pytest.MonkeyPatch, kind: type) -> None:
    real = Jobs.missed_news

    def missed_news(self: Any, *what: Any) -> list[Any]:
        return [each for each in real(self, *what) if not isinstance(each, kind)]

    plant.setattr(Jobs, "missed_news", missed_news)


def a_worker_ignores_the_end(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Round, "record_term_end", lambda self, news: None)


def the_end_of_an_earlier_quorum_counts(plant: pytest.MonkeyPatch) -> None:
    def is_over_at(self: Any, quorum_id: int, step: int) -> bool:
        return self.step is not None and step >= self.step

    plant.setattr(TermEnds, "is_over_at", is_over_at)


def a_group_always_says_that_all_know(plant: pytest.MonkeyPatch) -> None:
    real = Group.combine_requests

    def combine(self: Any, requests: Any) -> Any:
        return dataclasses.replace(real(self, requests), agreed=True)

    plant.setattr(Group, "combine_requests", combine)


def an_agreement_from_before_the_term_counts(plant: pytest.MonkeyPatch) -> None:
    real = RunningTerm.ends_with
    plant.setattr(
        RunningTerm,
        "ends_with",
        lambda self, step, *, agreed: not agreed and real(self, step, agreed=False),
    )


def a_quorum_that_was_left_keeps_its_id(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Job, "is_id_spent", False)


def a_quorum_that_a_member_has_left_keeps_its_id(plant: pytest.MonkeyPatch) -> None:
    real = Job.end_term_for_request

    def end_term_for_request(self: Any, member: Any, *, agreed: bool) -> tuple[str, ...]:
        spent_id = self.spent_id
        uninformed = real(self, member, agreed=agreed)
        self.spent_id = spent_id
        return uninformed

    plant.setattr(Job, "end_term_for_request", end_term_for_request)


# -- the step of the job (E5) --------------------------------------------------------------------


def what_beats_report_is_not_recorded(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Job, "record_progress", lambda self: None)


def a_session_begins_with_the_step_of_the_quorum(plant: pytest.MonkeyPatch) -> None:
    real = ManagerLink._connect

    def connect(self: Any, now: float) -> None:
        self.reached = int
        real(self, now)

    plant.setattr(ManagerLink, "_connect", connect)


def an_update_that_is_under_way_counts_as_done(plant: pytest.MonkeyPatch) -> None:
    """The lighthouse counts it so: the ledgers of the simulator read `Activity.reached`, too."""
    real = Job.record_reached

    def record_reached(self: Any, replica_id: str, activity: Activity) -> None:
        real(self, replica_id, replace(activity, step=activity.step + 1))

    plant.setattr(Job, "record_reached", record_reached)


def a_newcomer_asks_before_the_members_are_back(plant: pytest.MonkeyPatch) -> None:
    """A newcomer asks too early at a lighthouse that was restarted (rule F8)."""
    real = Incarnation.opened
    plant.setattr(Incarnation, "opened", lambda self, **how: 0.0 * real(self, **how))


# -- stragglers (E6) -----------------------------------------------------------------------------


def who_does_not_begin_a_step_is_waited_for(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Job, "late_in_term", lambda *_: [])


def who_was_late_in_a_term_is_waited_for_again(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Job, "leave_out_late", lambda self, late: None)


# -- sessions, and a worker's round --------------------------------------------------------------


def a_second_session_receives_nothing(plant: pytest.MonkeyPatch) -> None:
    """The one that is open may be the second, if the end of the first was not noticed."""
    real = Sessions.streams_of

    def streams_of(self: Any, job: str, replica_ids: Any) -> tuple[int, ...]:
        return tuple(stream for each in replica_ids for stream in real(self, job, (each,))[:1])

    plant.setattr(Sessions, "streams_of", streams_of)


def the_end_of_any_session_is_the_end_of_the_group(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Sessions, "has_session", lambda self, job, replica_id: False)


def who_breaks_off_says_that_all_know(plant: pytest.MonkeyPatch) -> None:
    real = Round.begin_step

    def begin_step(self: Any, *what: Any) -> Ready:
        ready: Ready = real(self, *what)
        self._agreed = True
        return ready

    plant.setattr(Round, "begin_step", begin_step)


def the_end_is_forgotten_between_two_steps(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Round, "_check_term", lambda self, quorum: None)


def a_worker_that_cannot_go_on_contributes(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Round, "_why_not_kept", lambda self, request, broken: None)


def who_has_lost_its_update_votes_on_the_step_before(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Round, "_group_step", property(lambda self: self.step.state.step))


# -- a lighthouse that is restarted (Q11, E4) ----------------------------------------------------


def who_comes_first_waits_for_nobody(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Gathering, "after_request", lambda self, *what: self)


def the_end_of_a_reported_quorum_counts_for_a_newer_one(plant: pytest.MonkeyPatch) -> None:
    real = Jobs.opened

    def opened(self: Any, job: str, *what: Any, **more: Any) -> None:
        term = self._jobs[job].term if job in self._jobs else None
        real(self, job, *what, **more)
        self._jobs[job].term = term or self._jobs[job].term

    plant.setattr(Jobs, "opened", opened)


# -- sessions that end (E7) ----------------------------------------------------------------------


def the_end_of_a_session_is_a_loss(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Job, "may_return", lambda self, replica_id: False)


def another_manager_is_another_incarnation(plant: pytest.MonkeyPatch) -> None:
    real = Site._start_manager
    plant.setattr(Site, "_start_manager", lambda self, resumed=None: real(self))


# -- a lighthouse that is new to the job (E8) -------------------------------------------------


def members_are_believed_for_ever_after_newcomers(plant: pytest.MonkeyPatch) -> None:
    real = Membership.view

    def view(self: Membership, now: float) -> Any:
        return dataclasses.replace(real(self, now), begun_anew=self._begun_anew)

    plant.setattr(Membership, "view", view)


def nobody_misses_who_has_not_come_back(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Job, "waits_for_unreported", lambda self, *what: False)


def what_a_worker_has_begun_is_ignored(plant: pytest.MonkeyPatch) -> None:
    """Another manager, which does not know the decision before (rule M4), ignores it."""
    plant.setattr(CommitBarrier, "step_begun", lambda self, group_rank, step: [])


# -- a step that is summed again (E9) ------------------------------------------------------------


def a_sum_that_is_made_again_is_divided_by_the_old_number(plant: pytest.MonkeyPatch) -> None:
    real_sum_again, real_num_groups = WorkerActor._sum_again, WorkerActor._num_groups
    old: dict[WorkerActor, tuple[int, int]] = {}  # the epoch, and the number in the sum before

    def sum_again(self: WorkerActor, step: Any) -> None:
        num_groups = real_num_groups(self)
        real_sum_again(self, step)
        old[self] = self._step.epoch, num_groups

    def num_groups(self: WorkerActor) -> int:
        epoch, before = old.get(self, (-1, 0))
        return before if epoch == self._step.epoch else real_num_groups(self)

    plant.setattr(WorkerActor, "_sum_again", sum_again)
    plant.setattr(WorkerActor, "_num_groups", num_groups)


def one_of_several_workers_sums_again(plant: pytest.MonkeyPatch) -> None:
    real = Round.may_sum_again.fget
    assert real is not None

    def may_sum_again(self: Any) -> bool:
        rules, self._rules = self._rules, dataclasses.replace(self._rules, group_world_size=1)
        try:
            return bool(real(self))
        finally:
            self._rules = rules

    plant.setattr(Round, "may_sum_again", property(may_sum_again))


def draw_long_terms_of_four(seed: int, _: int | None = None) -> Scenario:
    """Enough groups that one loses its answer while another one joins."""
    return draw_long_terms(seed, NUM_GROUPS + 1)


# Each with the scenarios to search, and the first seed of the search: near the first one that
# finds it.
PLANTS: dict[Plant, tuple[Draw, int]] = {
    a_lone_member_goes_on: (draw_steady, 10),
    who_has_lost_its_connections_goes_on: (draw_long_terms, 33),
    who_has_lost_its_update_goes_on: (draw_long_terms, 0),
    one_of_several_workers_asks_alone: (draw_long_terms, 25),
    a_wish_is_lost: (draw_long_terms, 1),
    what_the_sum_of_the_wishes_says_is_ignored: (draw_long_terms, 1),
    each_worker_goes_by_its_own_wish: (draw_long_terms, 9),
    who_drains_does_not_say_so: (draw_long_terms, 9),
    a_session_that_begins_does_not_learn_of_newcomers: (draw_long_terms, 42),
    nobody_is_informed_that_a_member_asks: (draw_long_terms, 0),
    a_session_that_begins_does_not_learn_of_the_end: (draw_long_terms, 134),
    a_worker_ignores_the_end: (draw_long_terms, 0),
    the_end_of_an_earlier_quorum_counts: (draw_long_terms, 5),
    a_group_always_says_that_all_know: (draw_long_terms, 0),
    an_agreement_from_before_the_term_counts: (draw_long_terms, 600),
    a_quorum_that_was_left_keeps_its_id: (draw_long_terms, 5),
    a_quorum_that_a_member_has_left_keeps_its_id: (draw_long_terms, 13),
    what_beats_report_is_not_recorded: (draw_steady, 209),
    a_session_begins_with_the_step_of_the_quorum: (draw_long_terms, 9),
    a_second_session_receives_nothing: (draw_long_terms, 622),
    the_end_of_any_session_is_the_end_of_the_group: (draw_long_terms, 620),
    who_breaks_off_says_that_all_know: (draw_long_terms, 623),
    the_end_is_forgotten_between_two_steps: (draw_long_terms, 12),
    a_worker_that_cannot_go_on_contributes: (draw_long_terms, 623),
    who_has_lost_its_update_votes_on_the_step_before: (draw_long_terms, 629),
    who_does_not_begin_a_step_is_waited_for: (draw_long_terms, 141),
    who_was_late_in_a_term_is_waited_for_again: (draw_long_terms, 104),
    an_update_that_is_under_way_counts_as_done: (draw_steady, 5),
    a_newcomer_asks_before_the_members_are_back: (draw_long_terms, 83),
    who_comes_first_waits_for_nobody: (draw_returns, 46),
    the_end_of_a_reported_quorum_counts_for_a_newer_one: (draw_returns, 79),
    members_are_believed_for_ever_after_newcomers: (draw_returns, 122),
    the_end_of_a_session_is_a_loss: (draw_steady, 15),
    another_manager_is_another_incarnation: (draw_steady, 15),
    nobody_misses_who_has_not_come_back: (draw_long_terms_of_four, 90),
    what_a_worker_has_begun_is_ignored: (draw_long_terms, 59),
    a_sum_that_is_made_again_is_divided_by_the_old_number: (draw_long_terms, 0),
    one_of_several_workers_sums_again: (draw_long_terms, 0),
}


@pytest.mark.parametrize(
    ("planted", "draw", "first"),
    [(planted, draw, first) for planted, (draw, first) in PLANTS.items()],
    ids=[plant.__name__ for plant in PLANTS],
)
def test_it_is_found(
    planted: Plant, draw: Draw, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch)
    outcomes = (Fleet(draw(seed, NUM_GROUPS)).run() for seed in range(first, first + MAX_SEEDS))
    found = next(outcome for outcome in outcomes if outcome.fell is not None)
    assert found.fell in INVARIANTS, found.what  # an exception shows nothing: the plant may raise
    monkeypatch.undo()
    assert Fleet(found.scenario).run().fell is None, "it falls without the fault, too"
