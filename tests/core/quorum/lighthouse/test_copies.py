"""Tests what a lighthouse knows of the copies of a job's states."""

from __future__ import annotations

from typing import Any

import pytest

from torchft_svc.core.quorum.lighthouse import copies
from torchft_svc.core.quorum.lighthouse.copies import (
    BEHIND_S,
    REPORT_S,
    REPORT_TIMEOUT_S,
    SILENT_S,
    HeldCopies,
    HeldCopy,
    HistoryWatch,
    MembersAndCopies,
    Start,
    find_start,
    newest_whole,
)
from torchft_svc.errors import RequestRefused


def copy(step: int, rank: int = 0, of: int = 1, quorum: int = 7, address: str = "x") -> HeldCopy:
    return HeldCopy(
        step=step,
        step_quorum_id=quorum,
        group_rank=rank,
        group_world_size=of,
        address=address,
    )


def test_b4_the_newest_state_is_the_one_that_has_a_copy_of_each_worker() -> None:
    old = [copy(10, 0, of=2), copy(10, 1, of=2)]
    assert newest_whole([*old, copy(20, 0, of=2)]) == old
    new = [copy(20, 0, of=2), copy(20, 1, of=2)]
    assert newest_whole([*new[::-1], *old]) == new


def test_b4_copies_of_two_states_of_one_step_do_not_fit_together() -> None:
    """A step that one group has committed alone, and the others have done again."""
    torn = [copy(20, 0, of=2, quorum=7), copy(20, 1, of=2, quorum=8)]
    assert newest_whole(torn) == []
    whole = [*torn, copy(20, 0, of=2, quorum=8)]
    assert [each.step_quorum_id for each in newest_whole(whole)] == [8, 8]


def test_b4_copies_of_groups_of_other_sizes_do_not_fit_together() -> None:
    assert newest_whole([copy(20, 0, of=2), copy(20, 0, of=1)]) == [copy(20, 0, of=1)]
    assert newest_whole([]) == []


def test_b4_one_holder_of_each_copy_is_enough() -> None:
    assert newest_whole([copy(5, address="a"), copy(5, address="b")]) == [copy(5, address="a")]


def test_b2_a_silent_holder_is_forgotten() -> None:
    held = HeldCopies(max_jobs=8, began_at=0.0)
    held.record_report("j", "h1", (copy(4),), now=1.0)
    held.record_report("j", "h2", (), now=3.0)
    assert held.held("j", 3.0) == [copy(4)]
    assert held.num_holders("j", 3.0) == 2
    assert held.held("j", 1.0 + SILENT_S) == [copy(4)]
    assert held.held("j", 1.1 + SILENT_S) == []
    assert held.num_holders("j", 1.1 + SILENT_S) == 1
    assert held.held("another", 3.0) == []


def test_b2_a_report_replaces_the_one_before() -> None:
    held = HeldCopies(max_jobs=8, began_at=0.0)
    held.record_report("j", "h", (copy(4), copy(8)), now=1.0)
    held.record_report("j", "h", (copy(8),), now=2.0)
    assert held.held("j", 2.0) == [copy(8)]


def test_b5_a_lighthouse_knows_all_copies_after_a_while() -> None:
    held = HeldCopies(max_jobs=8, began_at=100.0)
    assert not held.knows_all(100.0 + REPORT_S + REPORT_TIMEOUT_S)
    assert held.knows_all(100.0 + 2 * REPORT_S + REPORT_TIMEOUT_S)


def view_of(**fields: Any) -> MembersAndCopies:
    return MembersAndCopies(copies=(copy(8),), knows_copies=True, **fields)


def test_b5_a_worker_begins_from_a_copy_if_no_member_lives() -> None:
    assert find_start(view_of(), 0, 1, own_step=0) == (Start.FETCH_COPY, copy(8))
    assert find_start(view_of(), 0, 1, own_step=8) == (Start.WITHOUT_COPY, None)
    assert find_start(view_of(is_finished=True), 0, 1, own_step=0) == (Start.WITHOUT_COPY, None)


def test_b5_a_worker_asks_members_that_may_have_a_state() -> None:
    members = {"a:1": "address"}
    asks = find_start(view_of(members=members, committed_step=7), 0, 1, own_step=0)
    assert asks == (Start.ASK_MEMBERS, copy(8))
    begins = find_start(view_of(members=members, committed_step=0), 0, 1, own_step=0)
    assert begins == (Start.FETCH_COPY, copy(8))


def test_b5_members_that_have_reported_to_a_new_lighthouse_live() -> None:
    """The lighthouse has no addresses of groups that have not asked."""
    outcome = find_start(view_of(committed_step=7), 0, 1, own_step=0)
    assert outcome == (Start.WITHOUT_COPY, None)


def test_b5_a_new_lighthouse_is_looked_at_again() -> None:
    outcome = find_start(MembersAndCopies(), 0, 1, own_step=0)
    assert outcome == (Start.LOOK_AGAIN, None)


def test_b6_copies_above_the_step_of_a_job_that_goes_on_are_freed() -> None:
    watch = HistoryWatch()
    behind = MembersAndCopies(members={"a:1": "address"}, committed_step=3)
    assert not watch.is_over(behind, 8, 100.0)
    assert not watch.is_over(behind, 8, 100.0 + BEHIND_S)
    assert watch.is_over(behind, 8, 100.5 + BEHIND_S)
    assert not watch.is_over(MembersAndCopies(), 8, 200.0)
    assert not watch.is_over(behind, 8, 200.0), "nobody lived in between"
    assert watch.is_over(MembersAndCopies(is_finished=True), 8, 201.0)


def test_reports_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MAX_HOLDERS_PER_JOB", 2)
    monkeypatch.setattr(copies, "MAX_COPIES_PER_HOLDER", 2)
    held = HeldCopies(max_jobs=2, began_at=0.0)
    for holder in ("h1", "h2"):
        held.record_report("j", holder, (copy(4),), now=0.0)
    with pytest.raises(RequestRefused, match="2 holders"):
        held.record_report("j", "h3", (copy(4),), now=0.0)
    held.record_report("j", "h3", (copy(4),), now=SILENT_S + 1)
    with pytest.raises(RequestRefused, match="3 copies"):
        held.record_report("j", "h3", (copy(1), copy(2), copy(3)), now=SILENT_S + 1)
    with pytest.raises(RequestRefused, match="holder is empty"):
        held.record_report("j", "", (), now=SILENT_S + 1)
    for job in ("k", "l"):
        held.record_report(job, "h", (copy(4),), now=SILENT_S + 1)
    assert held.held("j", SILENT_S + 1) == [], "the job that nobody has reported of for longest"


@pytest.mark.parametrize(
    "wrong", [copy(-1), copy(1, -1), copy(1, 1, of=1), copy(1, quorum=-3), copy(1, address="\n")]
)
def test_a_copy_of_no_worker_is_refused(wrong: HeldCopy) -> None:
    with pytest.raises(RequestRefused):
        wrong.check()
