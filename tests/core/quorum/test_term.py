"""Tests of terms: how a step's end decides how the next one begins (E1 to E6)."""

from __future__ import annotations

import math

import pytest

from torchft_svc.core.quorum.term import LOOK_S, Fate, RunningTerm, TermEnds, Wish, fate

NONE, SOME, ALONE = Wish.NONE, Wish.SOME, Wish.ALONE


@pytest.mark.parametrize(
    ("committed", "wishes", "expected"),
    [
        (True, [NONE], Fate.CONTINUES),
        (True, [NONE, NONE], Fate.CONTINUES),
        (True, [SOME], Fate.ENDS),
        (True, [NONE, SOME], Fate.ENDS),
        (True, [SOME, NONE], Fate.ENDS),
        (True, [ALONE, SOME], Fate.ENDS),
        (True, [NONE, ALONE], Fate.ABORTED),
        (False, [NONE], Fate.ABORTED),
        (False, [NONE, SOME], Fate.ABORTED),
        (False, [], Fate.ABORTED),
    ],
)
def test_the_next_step_goes_on_if_this_one_is_committed_and_nobody_wishes(
    committed: bool, wishes: list[Wish], expected: Fate
) -> None:
    assert fate(committed, wishes) is expected


@pytest.mark.parametrize(
    ("ends", "quorum_id", "step", "is_over"),
    [
        (TermEnds(7, 5, ""), 7, 4, False),
        (TermEnds(7, 5, ""), 7, 5, True),
        (TermEnds(7, 5, ""), 7, 6, True),
        (TermEnds(7, 5, ""), 8, 6, False),  # of an earlier quorum
        (TermEnds(7, None, ""), 7, 6, False),  # it is to end, and is not over
    ],
)
def test_from_which_step_on_a_term_is_over(
    ends: TermEnds, quorum_id: int, step: int, is_over: bool
) -> None:
    assert ends.is_over_at(quorum_id, step) is is_over


def test_the_first_member_that_asks_alone_ends_the_term() -> None:
    term = RunningTerm(began_at=5)
    assert term.ends_with(8, agreed=False)
    assert term.over_from == 8
    assert not term.ends_with(8, agreed=False), "the others know"
    assert not term.ends_with(9, agreed=False)
    assert term.ends_with(7, agreed=False), "one that was in an earlier step waits there"
    assert term.over_from == 7


def test_who_asks_with_all_others_ends_nothing() -> None:
    term = RunningTerm(began_at=5)
    assert not term.ends_with(6, agreed=True)
    assert term.over_from is None


def test_what_was_agreed_before_the_term_does_not_count_in_it() -> None:
    """The question was sent before its answer, with the quorum of this term, got lost."""
    term = RunningTerm(began_at=5)
    assert term.ends_with(5, agreed=True)


def test_a_quorum_whose_steps_ask_has_no_end_to_announce() -> None:
    assert not RunningTerm(may_go_on=False).ends_with(6, agreed=False)


def test_a_lighthouse_that_is_new_to_the_job_takes_the_term_over() -> None:
    assert RunningTerm().ends_with(0, agreed=False)


def test_when_to_look_for_members_that_keep_others_waiting() -> None:
    term = RunningTerm()
    assert not term.is_due(1e9), "nobody waits"
    term.record_wait(since=100.0, patience_s=10.0, now=101.0)
    term.record_wait(since=104.0, patience_s=10.0, now=105.0)
    assert term.look_at == 110.0, "for the first one"
    assert not term.is_due(109.9)
    assert term.is_due(110.0)
    assert term.look_at == 110.0 + LOOK_S


def test_each_look_is_at_all_members_so_it_is_not_repeated_at_once() -> None:
    term = RunningTerm()
    term.record_wait(since=100.0, patience_s=10.0, now=101.0)
    assert term.is_due(110.0)
    term.look_at = math.inf
    term.record_wait(since=90.0, patience_s=10.0, now=110.0 + LOOK_S / 10)
    assert term.look_at == 110.0 + LOOK_S
    assert not term.is_due(110.0 + LOOK_S / 2)


def test_a_term_that_is_over_or_asks_is_not_looked_at() -> None:
    over = RunningTerm()
    over.record_wait(since=100.0, patience_s=10.0, now=101.0)
    over.over_from = 8
    assert not over.is_due(200.0)
    for term in (RunningTerm(over_from=8), RunningTerm(may_go_on=False)):
        term.record_wait(since=100.0, patience_s=10.0, now=101.0)
        assert term.look_at == math.inf
