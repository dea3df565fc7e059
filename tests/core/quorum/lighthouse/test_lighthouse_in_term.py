"""Tests the lighthouse's part in a term: who is informed of its end, what it knows (E4 to E8)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.core.recorded_jobs import AnswerQuorum, EndTerm, RecordedJobs
from support.core.scenes import JOB, SECONDS, Scene, config, member

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.jobs import (
    MAX_LOSSES_SENT,
    MISSING_AFTER_S,
    ReportEviction,
    ReportLoss,
    ReportStraggler,
)
from torchft_svc.core.quorum.lighthouse.membership import GATHER_S
from torchft_svc.core.quorum.session_messages import Kill, Leave, Lost, NewcomerWaits
from torchft_svc.core.quorum.term import LOOK_S, TermEnds
from torchft_svc.core.quorum.types import LastQuorum, QuorumConfig


class Term(Scene):
    """Groups a, b and c go on in quorum 1, which began at step 5; it is 100 s."""

    def __init__(self, settings: QuorumConfig = SECONDS, *, steady: bool = True) -> None:
        super().__init__(settings)
        self.now = 99.0
        self.beat("a", "b", "c")
        for each in "abc":
            self.asks(each, 5, steady=steady)
        self.now = 100.0
        assert self.pop_quorums() == [(1, ["a", "b", "c"])]

    def asks(self, replica_id: str, step: int, *, agreed: bool = False, **fields: Any) -> None:
        self._caller += 1
        asker = member(replica_id, step, **{"steady": True, "step_quorum_id": 1, **fields})
        self._record(self.jobs.request(JOB, asker, self._caller, self.now, agreed=agreed))

    def pop_term_ends(self) -> list[tuple[int | None, tuple[str, ...]]]:
        """The news that the term ends: from which step on, and for whom."""
        ends = [each for each in self.pop_orders() if isinstance(each, EndTerm)]
        assert all(each.news.quorum_id == 1 for each in ends)
        return [(each.news.step, tuple(sorted(each.recipients))) for each in ends]

    def missed_news(self, replica_id: str, quorum_id: int = 1, num_groups: int = 3) -> list[object]:
        last = LastQuorum(quorum_id, 5)
        return list(self.jobs.missed_news(JOB, replica_id, last, num_groups))


def test_groups_that_go_on_in_an_older_quorum_learn_that_the_job_goes_on_without_them() -> None:
    """The sessions of these groups began in good order, before the newer quorum's group connected.

    They ask nobody.
    """
    scene = Scene(SECONDS)
    for each in "ab":
        scene.opened(each, quorum_id=7, max_step=20)
    scene.report("a", Phase.QUORUM, 21)
    scene.opened("c", quorum_id=8, max_step=1)
    scene.ask("c", 2, seen_quorum_id=8, has_history=True)
    scene.until(60.0)
    reported = [each for each in scene.pop_orders() if isinstance(each, ReportStraggler)]
    assert [(each.replica_id, each.quorum_id, each.recipients) for each in reported] == [
        ("a", 8, ("a",)),
        ("b", 8, ("b",)),
    ]


def test_a_term_ends_if_groups_come_from_a_newer_quorum_and_both_do_not_train_on() -> None:
    """Newcomers had a quorum at another leader, whose clock is behind, before they were back."""
    term = Term()
    for each in "de":
        term.opened(each, quorum_id=9, max_step=40)
    assert term.pop_term_ends() == [(None, ("a", "b", "c"))], "once"
    (news,) = term.missed_news("a")
    assert news == TermEnds(1, None, "d, e trained on in a newer quorum elsewhere")
    for each in "abc":
        term.asks(each, 6, agreed=True)
    reported = [each for each in term.pop_orders() if isinstance(each, ReportStraggler)]
    assert [(each.replica_id, each.quorum_id, each.recipients) for each in reported] == [
        ("d", 9, ("d",)),
        ("e", 9, ("e",)),
    ]


@pytest.mark.parametrize("order", ["abcd", "cdab", "acbd", "cabd"])
def test_two_terms_do_not_last_beside_each_other_at_a_lighthouse_that_is_new_to_both(
    order: str,
) -> None:
    """Newcomers c and d have begun at a lighthouse that a and b could not reach, and that is gone,
    too. Nobody asks."""
    scene = Scene(SECONDS)
    reported: dict[str, list[TermEnds]] = {each: [] for each in order}
    for each in order:
        quorum_id = 9 if each in "cd" else 7
        scene.opened(each, quorum_id, 20, 2)
        for ends in scene.pop_orders():
            for who in ends.recipients:
                reported[who].append(ends.news)
        reported[each] += scene.jobs.missed_news(JOB, each, LastQuorum(quorum_id, 20), 2)
    # Who was in the newest quorum when the news came may learn of a newer one.
    assert all({each.quorum_id for each in reported[who]} == {9} for who in "cd")
    assert all({each.step for each in reported[who]} == {None} for who in "cd")
    assert not any(each.quorum_id == 9 for who in "ab" for each in reported[who])
    for each in "cd":
        scene.ask(each, 20, seen_quorum_id=9, has_history=True, last_num_groups=2, steady=True)
    taken = scene.pop_orders()
    behind = [each for each in taken if isinstance(each, ReportStraggler)]
    assert [(each.replica_id, each.quorum_id) for each in behind] == [("a", 9), ("b", 9)]
    assert [each.quorum.quorum_id for each in taken if isinstance(each, AnswerQuorum)] == [10]


def test_who_asks_at_a_new_lighthouse_ends_no_term_as_a_rival() -> None:
    """The newcomer is announced as one, as anywhere."""
    scene = Scene(SECONDS)
    scene.opened("c", 9, 20, 2)
    scene.ask("a", 20, seen_quorum_id=7, has_history=True)
    scene.opened("a", 7, 20, 2)
    assert scene.pop_orders() == []
    assert scene.pop_newcomers() == ["a"]
    assert scene.jobs.missed_news(JOB, "c", LastQuorum(9, 20), 2) == [NewcomerWaits("a")]


# -- the end (E4) --------------------------------------------------------------------------------


def test_a_member_that_asks_alone_ends_the_term_for_the_others() -> None:
    term = Term()
    term.asks("b", 8)
    assert term.pop_term_ends() == [(8, ("a", "c"))]
    term.asks("a", 8)
    term.asks("c", 9, agreed=True)
    assert [kind for kind in term.pop_orders() if isinstance(kind, EndTerm)] == []


def test_the_quorum_after_a_break_has_another_id() -> None:
    term = Term()
    for each in "abc":
        term.asks(each, 8)
    assert term.pop_quorums() == [(2, ["a", "b", "c"])]


def test_the_quorum_after_a_loss_that_was_announced_has_another_id() -> None:
    """The lost group is back as the same one, and nobody breaks off."""
    term = Term()
    term.leave("c")
    term.opened("c", 1, 5)
    for each in "abc":
        term.asks(each, 8, agreed=True)
    assert term.pop_quorums() == [(2, ["a", "b", "c"])]


def test_if_all_know_the_id_stays() -> None:
    term = Term()
    for each in "abc":
        term.asks(each, 8, agreed=True)
    assert term.pop_quorums() == [(1, ["a", "b", "c"])]


def test_who_is_in_an_earlier_step_may_finish_it_and_one_that_waits_there_is_informed() -> None:
    term = Term()
    term.asks("b", 9)
    term.asks("a", 8)
    assert term.pop_term_ends() == [(9, ("a", "c")), (8, ("b", "c"))]


def test_a_repeated_question_reports_nothing_new() -> None:
    term = Term()
    term.asks("b", 8)
    term.asks("b", 8)
    assert term.pop_term_ends() == [(8, ("a", "c"))]


def test_an_agreement_from_before_the_term_ends_it() -> None:
    """The answer with this quorum was lost, and the question is repeated."""
    term = Term()
    term.asks("b", 5, agreed=True)
    assert term.pop_term_ends() == [(5, ("a", "c"))]


def test_who_was_informed_of_a_loss_asks_and_that_is_no_news() -> None:
    """The others receive nothing, nor does the group that was given up, which learns why."""
    settings = dataclasses.replace(SECONDS, hang_timeout_s=5.0, on_hang="evict")
    term = Term(settings)
    term.report("c", Phase.TRAINING, 7)
    for each in "ab":
        term.report(each, Phase.QUORUM, 7)
    term.until(105.0)
    (evicted,) = (each for each in term.pop_orders() if isinstance(each, ReportEviction))
    assert sorted(evicted.recipients) == ["a", "b", "c"]
    term.asks("a", 7)
    assert term.pop_term_ends() == []


@pytest.mark.parametrize("steady", [True, False])
def test_a_newcomer_ends_nothing(steady: bool) -> None:
    term = Term()
    term.asks("d", 0, steady=steady, step_quorum_id=0)
    assert term.pop_term_ends() == []
    assert term.pop_newcomers() == ["d"]


def test_where_each_step_asks_nobody_is_informed() -> None:
    term = Term(steady=False)
    term.asks("b", 6, steady=False)
    assert term.pop_term_ends() == []


@pytest.mark.parametrize("steps", [(5, 5, 4), (0, 0, 0)])
def test_where_groups_heal_each_step_asks(steps: tuple[int, int, int]) -> None:
    """All may heal from one group at step 0. If that one dies, the others learn of it at once."""
    scene = Scene(SECONDS)
    scene.beat("a", "b", "c")
    for each, step in zip("abc", steps, strict=True):
        scene.ask(each, step, steady=True)
    scene.pop_orders()
    scene.session_ends("a")
    assert lost(scene) == [("a", ("a", "b", "c"))]


def test_a_session_that_begins_learns_what_it_has_missed() -> None:
    term = Term()
    assert term.missed_news("a") == []
    term.asks("d", 0, step_quorum_id=0)
    assert term.missed_news("a") == [NewcomerWaits("d")]
    term.asks("b", 8)
    waits, ends = term.missed_news("a")
    assert waits == NewcomerWaits("d")
    assert isinstance(ends, TermEnds)
    assert (ends.quorum_id, ends.step) == (1, 8)
    assert term.missed_news("a", quorum_id=0) == [], "it was not in this quorum"
    assert term.missed_news("d") == []


def test_a_lighthouse_that_needs_more_groups_wants_the_term_to_end() -> None:
    scene = Scene(config(min_replicas=3))
    scene.opened("a", 7, 5)
    (ends,) = scene.jobs.missed_news(JOB, "a", LastQuorum(7, 5), 2)
    assert isinstance(ends, TermEnds)
    assert (ends.quorum_id, ends.step) == (7, None)
    assert scene.jobs.missed_news(JOB, "a", LastQuorum(7, 5), 3) == []
    assert scene.jobs.missed_news(JOB, "a", LastQuorum(7, 5), 0) == [], "it does not report it"


def test_a_lighthouse_that_is_new_to_the_job_ends_a_term_of_another() -> None:
    scene = Scene()
    for each in "ab":
        scene.opened(each, 7, 5)
    asks = member("b", 6, steady=True)
    orders = scene.jobs.request(JOB, asks, 1, 0.0)
    (ends,) = [each for each in orders if isinstance(each, EndTerm)]
    assert (ends.news.quorum_id, ends.news.step, ends.recipients) == (7, 6, ("a",))


# -- the step of the job (E5) --------------------------------------------------------------------


def committed(term: Term) -> int:
    return term.jobs.committed_step(JOB)


def test_the_job_is_where_all_members_have_reported_to_be() -> None:
    term = Term()
    term.report("a", Phase.TRAINING, 9)
    term.report("b", Phase.TRAINING, 8)
    term.report("c", Phase.VOTING, 9)
    assert committed(term) == 5, "it is noted when a member asks or is gone"
    term.leave("c")
    assert committed(term) == 8


def test_an_update_that_may_be_under_way_is_not_counted() -> None:
    term = Term()
    for each in "abc":
        term.report(each, Phase.IDLE, 9)
    term.asks("a", 9)
    assert committed(term) == 8


@pytest.mark.parametrize("silent", [None, Phase.HEALING])
def test_without_word_of_one_member_the_step_of_the_quorum_stays(silent: Phase | None) -> None:
    term = Term()
    for each in "ab":
        term.report(each, Phase.TRAINING, 9)
    if silent is not None:
        term.report("c", silent, 9)
    term.leave("a")
    assert committed(term) == 5


def test_after_a_member_has_asked_beats_count_no_more() -> None:
    term = Term()
    for each in "abc":
        term.report(each, Phase.TRAINING, 7)
    term.leave("c")
    for each in "ab":
        term.report(each, Phase.TRAINING, 9)
    term.asks("a", 8)
    assert committed(term) == 7


def test_a_member_is_believed_as_far_as_the_slowest_member_shows() -> None:
    term = Term()
    for each, step in {"a": 50, "b": 51, "c": 50}.items():
        term.asks(each, step)
    assert term.pop_quorums() == [(2, ["a", "b", "c"])]
    assert committed(term) == 51


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_member_that_goes_back_to_a_checkpoint_of_the_term_heals(is_reported: bool) -> None:
    """The member committed step 40 in this quorum, too, and so did the others their later ones."""
    term = Term()
    for each in "abc":
        term.report(each, Phase.APPLYING, 51)
    if is_reported:
        term.report("c", Phase.IDLE, 40)
    for each, step in {"c": 40, "a": 51, "b": 51}.items():
        term.asks(each, step)
    (order,) = [each for each in term.pop_orders() if isinstance(each, AnswerQuorum)]
    assert [each.step for each in order.quorum.participants] == [51, 51, 40], "all are believed"


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_member_that_went_back_to_a_checkpoint_does_not_go_on_alone(is_reported: bool) -> None:
    term = Term()
    for each in "abc":
        term.report(each, Phase.APPLYING, 51)
    if is_reported:
        term.report("c", Phase.IDLE, 40)
    for each in "ab":
        term.leave(each)
    term.asks("c", 40)
    assert term.pop_quorums() == []
    assert committed(term) == 51


def test_how_far_the_term_is_need_not_have_been_reported() -> None:
    term = Term()
    for each, step in {"c": 40, "a": 51, "b": 50}.items():
        term.asks(each, step)
    (order,) = [each for each in term.pop_orders() if isinstance(each, AnswerQuorum)]
    assert [each.step for each in order.quorum.participants] == [51, 50, 40]
    assert committed(term) == 51


def test_a_wait_for_the_quorum_that_is_reported_later_is_no_progress_in_it() -> None:
    """The group asked with the lowest step of its workers, and one of them was ahead."""
    term = Term()
    for each in "abc":
        term.report(each, Phase.QUORUM, 6, for_s=2.0)
    term.leave("a")
    assert committed(term) == 5


def test_a_step_of_elsewhere_is_not_believed() -> None:
    """The quorum in which it was committed is not this one."""
    term = Term()
    term.asks("a", 50, step_quorum_id=0)
    term.asks("d", 60)  # of no member, whatever it reports
    term.asks("b", 6, agreed=True)
    term.asks("c", 6, agreed=True)
    (order,) = [each for each in term.pop_orders() if isinstance(each, AnswerQuorum)]
    assert [each.doubted_step for each in order.quorum.participants] == [50, 0, 0, 60]
    assert committed(term) == 6


def test_a_new_lighthouse_does_not_wait_for_a_step_that_one_group_has_committed_alone() -> None:
    """a gets its sums complete, when b has given the step up, and is lost."""
    scene = Scene(SECONDS)
    scene.opened("a", 7, 5, 2)
    scene.report("a", Phase.TRAINING, 9)
    scene.leave("a")
    scene.opened("b", 7, 7, 2)
    scene.ask("b", 8, seen_quorum_id=7, has_history=True, last_num_groups=2)
    scene.until(GATHER_S)
    assert scene.pop_quorums() == [(8, ["b"])]


# -- stragglers (E6) -----------------------------------------------------------------------------


def waiting_for_c(term: Term) -> None:
    """a and b wait in step 7, which c has not begun."""
    term.report("c", Phase.IDLE, 7)
    for each in "ab":
        term.report(each, Phase.QUORUM, 7)


def test_who_does_not_begin_a_step_is_waited_for_as_long_as_if_the_others_had_asked() -> None:
    term = Term()
    waiting_for_c(term)
    term.before(110.0)
    assert term.pop_term_ends() == []
    term.until(110.0)
    term.report("c", Phase.IDLE, 7)
    term.until(110.0 + LOOK_S)
    assert term.pop_term_ends() == [(7, ("a", "b", "c"))]
    term.asks("a", 7)
    term.asks("b", 7)
    assert term.pop_quorums() == [(2, ["a", "b"])], "and the next quorum does not wait for it"


def test_the_quorum_after_a_member_was_late_has_another_id_though_it_asks() -> None:
    term = Term()
    waiting_for_c(term)
    term.until(110.0)
    term.report("c", Phase.IDLE, 7)
    term.until(110.0 + LOOK_S)
    for each in "cab":
        term.asks(each, 7, agreed=True)
    assert term.pop_quorums() == [(2, ["a", "b", "c"])]


def test_a_member_whose_session_has_ended_is_missed_and_not_late() -> None:
    """What it does since is not known."""
    term = Term()
    waiting_for_c(term)
    term.until(110.0)
    term.report("c", Phase.IDLE, 7)
    term.session_ends("c")
    term.until(110.0 + 2 * LOOK_S)
    assert term.pop_orders() == []


def test_waits_that_ended_in_time_do_not_delay_the_news_about_later_ones() -> None:
    term = Term()
    term.report("a", Phase.QUORUM, 6)
    term.until(101.0)
    waiting_for_c(term)  # and the first wait is looked at while these last
    term.before(111.0)
    assert term.pop_term_ends() == []
    term.now = 111.0
    term.report("c", Phase.IDLE, 7)
    term.until(111.0)
    assert term.pop_term_ends() == [(7, ("a", "b", "c"))]


def test_who_has_reported_nothing_since_the_wait_became_too_long_may_have_begun_the_step() -> None:
    """Beats may be rarer than the join timeout is long."""
    term = Term()
    waiting_for_c(term)
    term.until(112.0)
    assert term.pop_term_ends() == []
    term.report("c", Phase.TRAINING, 8)
    term.until(120.0)
    assert term.pop_term_ends() == []


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.VOTING, Phase.HEALING])
def test_who_has_begun_the_step_is_no_straggler(phase: Phase) -> None:
    term = Term()
    waiting_for_c(term)
    term.report("c", phase, 7)
    term.until(110.0 + 5 * LOOK_S)
    assert term.pop_term_ends() == []


def test_who_begins_the_step_in_time_costs_nothing() -> None:
    term = Term()
    waiting_for_c(term)
    term.until(109.0)
    term.report("c", Phase.TRAINING, 7)
    for each in "ab":
        term.report(each, Phase.TRAINING, 8)
    term.until(200.0)
    assert term.pop_term_ends() == []


def test_a_wait_that_ended_with_a_question_counts_for_who_has_not_begun_the_step() -> None:
    """The sums of a and b time out, so they ask before c counts as late."""
    term = Term()
    waiting_for_c(term)
    term.until(109.0)
    term.asks("a", 7)
    term.until(109.5)
    term.asks("b", 7)
    assert term.pop_term_ends() == [(7, ("b", "c"))]
    term.before(110.0)
    assert term.pop_quorums() == []
    term.until(110.0)
    assert term.pop_quorums() == [(2, ["a", "b"])]


def test_a_wait_that_was_over_before_it_is_reported_counts_at_once() -> None:
    """A wait that is over leaves no tick to do: no next deadline is in the past."""
    term = Term()
    term.now = 130.0
    term.report("c", Phase.IDLE, 7)
    term.report("b", Phase.IDLE, 8)
    term.report("a", Phase.QUORUM, 7, for_s=20.0)
    assert term.pop_term_ends() == [(7, ("a", "b", "c"))]
    term = Term()
    waiting_for_c(term)
    term.now = 112.0  # nobody has looked meanwhile
    for each in "ab":
        term.asks(each, 7)
    assert term.pop_quorums() == [(2, ["a", "b"])]


def test_it_does_not_count_for_who_has_begun_the_step() -> None:
    term = Term()
    waiting_for_c(term)
    term.report("c", Phase.TRAINING, 7)
    term.until(109.0)
    for each in "ab":
        term.asks(each, 7)
    term.before(119.0)
    assert term.pop_quorums() == []
    term.until(119.0)
    assert term.pop_quorums() == [(2, ["a", "b"])]


def test_a_wait_in_an_earlier_step_does_not_count() -> None:
    term = Term()
    waiting_for_c(term)
    term.until(109.0)
    term.report("c", Phase.IDLE, 8)  # step 7 was committed, and that is all that was reported
    for each in "ab":
        term.asks(each, 8)
    term.before(119.0)
    assert term.pop_quorums() == []


def test_where_each_step_asks_a_member_that_waits_in_a_sum_ends_nothing() -> None:
    term = Term(steady=False)
    waiting_for_c(term)
    term.until(110.0 + LOOK_S)
    assert term.pop_term_ends() == []


def test_what_is_known_of_an_earlier_quorum_says_nothing_of_a_newer_one() -> None:
    """A restarted lighthouse learns first of a group that the others had left."""
    scene = Scene(SECONDS)
    scene.opened("c", 3, 2)
    asker = member("c", 2, steady=True, last_num_groups=3)
    scene.jobs.request(JOB, asker, 1, scene.now)
    scene.opened("a", 9, 7)
    assert scene.jobs.missed_news(JOB, "a", LastQuorum(9, 7), 2) == [NewcomerWaits("c")]


def test_losses_of_an_earlier_quorum_are_not_counted_in_a_newer_one() -> None:
    """The members of that one had left these behind."""
    scene = Scene(SECONDS)
    early = [f"e{number}" for number in range(MAX_LOSSES_SENT + 2)]
    for each in early:
        scene.opened(each, 5, 3, len(early))
    for each in early[1:]:
        scene.leave(each)
    assert [len(each.recipients) for each in scene.pop_orders()] == [6, 5, 4, 3, 1]
    for each in "abc":
        scene.opened(each, 9, 30, 3)
    scene.pop_orders()
    scene.leave("c")
    (loss,) = scene.pop_orders()
    assert sorted(loss.recipients) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("then", "is_past"),
    [
        ("waits in a sum", True),
        ("heals", False),  # as rule Q4 has it
        ("asks", False),
        ("asks, and gives up", True),
        ("is in the next quorum", False),
    ],
)
def test_who_was_left_out_while_its_line_was_cut_is_informed_over_its_next_session(
    then: str, is_past: bool
) -> None:
    """The last session is still there, as nobody has noticed the cut, and the news went to it."""
    term = Term()
    waiting_for_c(term)
    term.until(110.0)
    term.report("c", Phase.IDLE, 7)
    term.until(111.0)
    for each in "ab":
        term.asks(each, 7)
    assert term.pop_quorums() == [(2, ["a", "b"])]
    if then == "heals":
        term.report("c", Phase.HEALING, 7)
    if then.startswith("asks") or then == "is in the next quorum":
        term.asks("c", 7)
    if then == "asks, and gives up":
        term.withdraw(term._caller)
    if then == "is in the next quorum":
        for each in "ab":
            term.asks(each, 7, agreed=True)
        assert term.pop_quorums() == [(3, ["a", "b", "c"])]
    assert term.jobs.is_past(JOB, "c", LastQuorum(1, 7)) == is_past
    assert not term.jobs.is_past(JOB, "c", LastQuorum(9, 7)), "of elsewhere, and later"


# -- sessions that end (E7) ----------------------------------------------------------------------


def lost(term: Scene) -> list[tuple[str, tuple[str, ...]]]:
    """The groups that are gone, each with those that are informed of it."""
    losses = [each for each in term.pop_orders() if isinstance(each, ReportLoss)]
    return [(each.replica_id, tuple(sorted(each.recipients))) for each in losses]


def test_a_member_without_a_session_stays_while_nobody_misses_it() -> None:
    term = Term()
    term.session_ends("b")
    term.now = 150.0
    term.opened("b", 1, 5)
    assert term.pop_orders() == []
    assert not term.jobs.is_past(JOB, "b", LastQuorum(1, 5))
    for each in "abc":
        term.asks(each, 9, agreed=True)
    assert term.pop_quorums() == [(1, ["a", "b", "c"])]


def test_it_is_gone_when_it_gives_no_sign_of_life() -> None:
    term = Term()
    term.session_ends("b")
    term.now = 150.0
    term.beat("a", "c")
    term.before(199.0)
    assert lost(term) == []
    term.until(199.0)
    assert lost(term) == [("b", ("a", "b", "c"))]


@pytest.mark.parametrize(("agreed", "reported"), [(False, ("a", "b", "c")), (True, ())])
def test_it_is_gone_when_a_member_asks(agreed: bool, reported: tuple[str, ...]) -> None:
    """News would make the members give a step up that all finish, if the term ends by agreement."""
    term = Term()
    term.session_ends("b")
    term.asks("a", 8, agreed=agreed)
    orders = term.pop_orders()
    (loss,) = (each for each in orders if isinstance(each, ReportLoss))
    assert tuple(sorted(loss.recipients)) == reported
    assert not any(isinstance(each, EndTerm) for each in orders)
    term.asks("c", 8, agreed=agreed)
    assert term.pop_quorums() == [(2, ["a", "c"])]


@pytest.mark.parametrize("waited_s", [0.0, 0.5])
def test_it_is_gone_when_others_wait_in_a_step(waited_s: float) -> None:
    """Some backends do not notice that a peer is dead."""
    term = Term()
    term.report("a", Phase.QUORUM, 8, for_s=waited_s)
    term.session_ends("b")
    term.now += 0.9 * MISSING_AFTER_S
    term.report("a", Phase.QUORUM, 8, for_s=waited_s + 0.9 * MISSING_AFTER_S)
    assert lost(term) == []
    term.now += 0.1 * MISSING_AFTER_S
    term.report("a", Phase.QUORUM, 8, for_s=waited_s + MISSING_AFTER_S)
    assert lost(term) == [("b", ("a", "b", "c"))]


def test_it_is_not_missed_by_who_may_not_wait_any_more() -> None:
    """What is known of the others is as old as their last heartbeats."""
    term = Term()
    term.session_ends("b")
    term.report("a", Phase.QUORUM, 8)
    term.until(105.0)
    assert lost(term) == []
    term.report("a", Phase.QUORUM, 50)
    assert lost(term) == []


def test_it_is_gone_when_another_incarnation_is_there() -> None:
    term = Term()
    for step in (6, 7):  # in the second one it is up to date, so that is a term
        for each in ("d:1", *"abc"):
            term.asks(each, step, agreed=True, step_quorum_id=2, seen_quorum_id=step - 5)
        assert term.pop_quorums() == [(2, ["a", "b", "c", "d:1"])]
    term.session_ends("d:1")
    assert lost(term) == []
    term.opened("d:2")
    assert lost(term) == [("d:1", ("a", "b", "c", "d:1"))]


@pytest.mark.parametrize("why", ["each step asks", "a member asks", "it has asked", "killed"])
def test_outside_of_a_term_a_session_that_ends_is_a_loss(why: str) -> None:
    term = Term(steady=why != "each step asks")
    if why == "a member asks":
        term.asks("a", 8)
    if why == "it has asked":
        term.asks("b", 8)
    if why == "killed":
        term.jobs.commanded(JOB, "b", Kill("by an operator"), term.now)
    term.pop_orders()
    term.session_ends("b")
    assert [who for who, _ in lost(term)] == ["b"]


def test_the_last_one_of_a_term_is_gone_with_its_session() -> None:
    """The others have left between two steps, which is no loss that is reported."""
    term = Term()
    for each in "bc":
        term.jobs.leave(JOB, each, Leave("bye", between_steps=True), term.now)
    term.session_ends("a")
    assert lost(term) == [("a", ("a",))]


def test_after_the_end_of_a_term_a_session_that_ends_is_a_loss() -> None:
    term = Term()
    waiting_for_c(term)
    term.until(110.0)
    term.report("c", Phase.IDLE, 7)
    term.until(110.0 + LOOK_S)
    assert term.pop_term_ends() == [(7, ("a", "b", "c"))]
    term.session_ends("b")
    assert lost(term) == [("b", ("a", "b", "c"))]


def test_a_wait_for_the_quorum_is_no_wait_for_a_member_without_a_session() -> None:
    """The member is reported a moment later."""
    term = Term()
    term.session_ends("b")
    term.now += 2 * MISSING_AFTER_S
    term.report("a", Phase.QUORUM, 5, for_s=5.0)  # since before the quorum was formed
    assert lost(term) == []
    term.report("a", Phase.QUORUM, 5, for_s=1.0)
    assert lost(term) == [("b", ("a", "b", "c"))]


def test_what_all_have_reached_is_noted_before_a_silent_member_is_forgotten() -> None:
    term = Term()
    for each in "abc":
        term.report(each, Phase.TRAINING, 9)
    term.session_ends("b")
    term.asks("a", 9)
    assert term.jobs.committed_step(JOB) == 9


def test_what_members_have_reported_before_the_quorum_is_no_progress_in_it() -> None:
    """A worker may be a step ahead of its group, which asks with the lowest step."""
    term = Term()
    for each in "ab":
        term.asks(each, 8)
        term.report(each, Phase.QUORUM, 9)
    term.now += 0.1
    term.session_ends("c")
    assert term.pop_quorums() == [(2, ["a", "b"])]
    term.now += 0.1
    term.asks("a", 8)
    assert term.jobs.committed_step(JOB) == 8


def test_a_loss_is_announced_again_to_a_member_whose_session_was_broken() -> None:
    """The term is not said to be over from a step on: which one is not known, and the member may
    have a whole step."""
    term = Term()
    term.asks("a", 8)
    term.session_ends("b")
    assert term.missed_news("c") == [Lost("b", "its session ended", 1)]


# -- a lighthouse that is new to the job (E8) ----------------------------------------------------


class NewLighthouse(Term):
    """Groups a and b, of three, have come back in quorum 1; a waits in step 8. It is 0 s, and the
    lighthouse was started ``began_s`` ago."""

    def __init__(self, num_groups: int = 3, began_s: float = 0.0) -> None:
        Scene.__init__(self, SECONDS)
        self.jobs = RecordedJobs(SECONDS, now=-began_s)
        for each in "ab":
            self.opened(each, 1, 7, num_groups)
        self.report("b", Phase.TRAINING, 8)
        self.waits()

    def waits(self) -> None:
        self.report("a", Phase.QUORUM, 8, for_s=self.now)
        self.beat("b")

    def waits_until(self, at: float) -> list[tuple[int | None, tuple[str, ...]]]:
        """The ends of terms that the members have received by then."""
        while self.now < at:
            self.until(min(at, self.now + 0.5))
            self.waits()
        return self.pop_term_ends()


@pytest.mark.parametrize("asker", ["c", "d"])
@pytest.mark.parametrize("has_history", [False, True])
def test_who_asks_may_be_the_member_that_has_not_come_back(asker: str, has_history: bool) -> None:
    """The member has not received the answer, so it reports an older quorum, or none."""
    term = NewLighthouse()
    term.asks(asker, 8, step_quorum_id=0, has_history=has_history)
    assert term.waits_until(GATHER_S - 0.5) == []
    assert term.waits_until(GATHER_S + 0.5) == [(8, ("a", "b"))]
    assert term.waits_until(200.0) == []
    (news,) = [each for each in term.missed_news("a") if isinstance(each, TermEnds)]
    assert news.step == 8


def test_a_member_that_has_not_come_back_is_missed_after_the_heartbeat_timeout() -> None:
    term = NewLighthouse()
    assert term.waits_until(99.5) == []
    assert term.waits_until(100.0) == [(8, ("a", "b"))]


def test_members_may_come_back_to_a_lighthouse_that_has_been_up_for_long() -> None:
    """A job moves back so to the first lighthouse of a list, one group after the other."""
    term = NewLighthouse(began_s=3600.0)
    assert term.waits_until(99.5) == []
    assert term.waits_until(100.0) == [(8, ("a", "b"))]


def test_a_lighthouse_that_has_formed_the_quorum_waits_for_nobody_in_it() -> None:
    """Sessions that break report it again, and of how many groups it was."""
    term = Term()
    term.opened("a", 1, 5, num_groups=3)
    while term.now < 250.0:
        term.until(term.now + 0.5)
        term.report("a", Phase.QUORUM, 8, for_s=0.4)
        term.beat("b", "c")
    assert term.pop_term_ends() == []


def test_a_newcomer_ends_no_step_if_all_have_come_back() -> None:
    term = NewLighthouse(num_groups=2)
    term.asks("d", 0, step_quorum_id=0)
    assert term.waits_until(200.0) == []


def test_a_member_that_has_come_back_and_is_gone_is_missed_by_its_loss() -> None:
    term = NewLighthouse()
    term.opened("c", 1, 7, 3)
    term.leave("c")
    assert lost(term) == [("c", ("a", "b", "c"))]
    assert term.waits_until(200.0) == []


def test_who_does_not_wait_loses_no_step_for_one_that_has_not_come_back() -> None:
    term = NewLighthouse()
    term.asks("d", 0, step_quorum_id=0)
    for step in range(9, 300):
        term.until(float(step))
        for each in "ab":
            term.report(each, Phase.QUORUM, step, for_s=0.9 * MISSING_AFTER_S)
    assert term.pop_term_ends() == []


def test_members_of_an_older_quorum_are_not_missed() -> None:
    """The newest quorum that is reported counts, with the number of its groups."""
    term = NewLighthouse()
    for each in "ab":
        term.opened(each, 2, 7, 2)
    term.asks("c", 8, step_quorum_id=0)
    term.pop_orders()
    assert term.waits_until(200.0) == []
