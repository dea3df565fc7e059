"""Tests what a lighthouse knows of the copies of a job's states."""

from __future__ import annotations

from typing import Any

import pytest

from torchft_svc.core.quorum.lighthouse import copies
from torchft_svc.core.quorum.lighthouse.copies import (
    REPORT_S,
    REPORT_TIMEOUT_S,
    SILENT_S,
    CopiesSummary,
    CopySearch,
    HeldCopies,
    HeldCopy,
    MembersAndCopies,
    Start,
    whole_states,
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


def newest(*copies: HeldCopy, of: int = 2) -> list[list[HeldCopy]]:
    """The copies of the newest whole state, by rank."""
    states = list(whole_states(copies, of).values())
    return [states[0][rank] for rank in sorted(states[0])] if states else []


def test_b4_the_newest_state_is_the_one_that_has_a_copy_of_each_worker() -> None:
    old = [copy(10, 0, of=2), copy(10, 1, of=2)]
    assert newest(*old, copy(20, 0, of=2)) == [old[:1], old[1:]]
    new = [copy(20, 0, of=2), copy(20, 1, of=2)]
    assert newest(*new[::-1], *old) == [new[:1], new[1:]]
    assert list(whole_states([*old, *new], 2)) == [new[0].state_key, old[0].state_key]


def test_b4_copies_of_two_states_of_one_step_do_not_fit_together() -> None:
    """A step that one group has committed alone, and the others have done again."""
    torn = [copy(20, 0, of=2, quorum=7), copy(20, 1, of=2, quorum=8)]
    assert newest(*torn) == []
    whole = [*torn, copy(20, 0, of=2, quorum=8)]
    assert [each.step_quorum_id for (each,) in newest(*whole)] == [8, 8]


def test_b4_copies_of_groups_of_other_sizes_do_not_fit_together() -> None:
    assert newest(copy(20, 0, of=2), copy(20, 0, of=1), of=1) == [[copy(20, 0, of=1)]]
    assert newest(copy(20, 0, of=2), copy(20, 0, of=1)) == []
    assert newest() == []


def test_b4_one_holder_of_each_copy_is_enough_and_others_are_named_too() -> None:
    both = [copy(5, address="a"), copy(5, address="b")]
    assert newest(*both, of=1) == [both]


def test_b2_a_silent_holder_is_forgotten() -> None:
    held = HeldCopies(max_jobs=8, began_at=0.0)
    held.record_report("j", "h1", (copy(4),), now=1.0)
    held.record_report("j", "h2", (), now=3.0)
    assert held.whole_copies("j", 3.0) == [copy(4)]
    assert held.summarize("j", 3.0) == CopiesSummary(num_holders=2, newest_step=4, age_s=2.0)
    assert held.whole_copies("j", 1.0 + SILENT_S) == [copy(4)]
    assert held.whole_copies("j", 1.1 + SILENT_S) == []
    assert held.summarize("j", 10.0) == CopiesSummary(num_holders=0, newest_step=0, age_s=9.0)
    assert held.whole_copies("another", 3.0) == []
    assert held.summarize("another", 3.0) is None


def test_b2_a_report_replaces_the_one_before() -> None:
    held = HeldCopies(max_jobs=8, began_at=0.0)
    held.record_report("j", "h", (copy(4), copy(8)), now=1.0)
    assert held.whole_copies("j", 1.0) == [copy(8), copy(4)]
    held.record_report("j", "h", (copy(8),), now=2.0)
    assert held.whole_copies("j", 2.0) == [copy(8)]


def test_b4_a_state_of_which_the_only_holder_of_a_part_is_gone_is_not_shown() -> None:
    held = HeldCopies(max_jobs=8, began_at=0.0)
    both = [copy(4, rank, of=2, address=f"h{rank}") for rank in (0, 1)]
    for each in both:
        held.record_report("j", each.address, (each,), now=1.0)
    assert held.whole_copies("j", 1.0) == both
    held.record_report("j", "h0", (both[0],), now=5.0)
    assert held.whole_copies("j", 1.1 + SILENT_S) == []
    held.record_report("j", "h1", (both[1],), now=7.0)
    assert held.whole_copies("j", 7.0) == both


def test_b2_few_holders_and_states_are_shown_and_a_claim_hides_no_other_size() -> None:
    held = HeldCopies(max_jobs=8, began_at=0.0)
    for holder in range(5):
        copies = tuple(copy(step, address=f"h{holder}") for step in range(1, 7))
        held.record_report("j", f"h{holder}", copies, now=1.0)
    pair = tuple(copy(2, rank, of=2) for rank in (0, 1))
    held.record_report("j", "pair", pair, now=1.0)
    shown = [(each.step, each.address) for each in held.whole_copies("j", 1.0)]
    expected = [(step, f"h{holder}") for step in (6, 5, 4) for holder in range(3)]
    assert shown == [*expected, (2, "x"), (2, "x")]


def test_the_age_counts_from_the_newest_whole_state_on() -> None:
    held = HeldCopies(max_jobs=8, began_at=0.0)

    def age(now: float, *copies: HeldCopy) -> float:
        held.record_report("j", "h", copies, now)
        summary = held.summarize("j", now)
        assert summary is not None
        return summary.age_s

    assert age(10.0) == 0.0, "the first report"
    assert age(12.0, copy(4, 0, of=2)) == 2.0, "it is not whole"
    assert age(13.0, copy(4, 0, of=2), copy(4, 1, of=2)) == 0.0
    assert age(15.0, copy(4, 0, of=2), copy(4, 1, of=2), copy(8, 0, of=2)) == 2.0
    assert age(16.0, copy(8, 0, of=2), copy(8, 1, of=2)) == 0.0
    assert age(18.0, copy(4, 0, of=2), copy(4, 1, of=2)) == 2.0, "the newer one is gone"
    assert age(20.0) == 4.0
    assert age(21.0, copy(4, 0, of=2), copy(4, 1, of=2)) == 0.0, "another run, or another holder"


def test_b5_a_lighthouse_knows_all_copies_after_a_while() -> None:
    held = HeldCopies(max_jobs=8, began_at=100.0)
    assert not held.knows_all(100.0 + REPORT_S + REPORT_TIMEOUT_S)
    assert held.knows_all(100.0 + 2 * REPORT_S + REPORT_TIMEOUT_S)


def view_of(*copies: HeldCopy, **fields: Any) -> MembersAndCopies:
    return MembersAndCopies(copies=copies or (copy(8),), knows_copies=True, **fields)


def start(view: MembersAndCopies, own_step: int = 0) -> Start | HeldCopy:
    """How a lone worker at ``own_step`` goes on after its first look."""
    return CopySearch(0, 1, own_step, quorum_s=60.0, now=0.0).choose_start(view, 0.0)


def test_b5_a_worker_begins_from_a_copy_if_no_member_lives() -> None:
    assert start(view_of()) == copy(8)
    assert start(view_of(), own_step=8) is Start.WITHOUT_COPY
    assert start(view_of(is_finished=True)) is Start.WITHOUT_COPY


def test_b5_a_worker_asks_members_that_may_have_a_state() -> None:
    members = {"a:1": "address"}
    assert start(view_of(members=members, committed_step=7)) is Start.ASK_MEMBERS
    assert start(view_of(members=members, committed_step=0)) == copy(8)


def test_b5_members_that_have_reported_to_a_new_lighthouse_live() -> None:
    """The lighthouse has no addresses of groups that have not asked."""
    assert start(view_of(committed_step=7)) is Start.WITHOUT_COPY


def test_b5_a_new_lighthouse_is_looked_at_again() -> None:
    assert start(MembersAndCopies()) is Start.LOOK_AGAIN


def test_b5_each_holder_is_asked_in_turn_and_for_older_states_after_a_while() -> None:
    search = CopySearch(0, 1, 0, quorum_s=60.0, now=100.0)
    new, other, old = copy(8, address="a"), copy(8, address="b"), copy(6, address="c")
    view = view_of(new, other, old)
    asked = [search.choose_start(view, now) for now in (100.0, 101.0, 102.0, 130.0, 131.0, 132.0)]
    assert asked == [new, other, new, other, old, new]
    assert not search.is_over(160.0)
    assert search.is_over(160.5)


def test_b5_a_copy_that_was_not_asked_for_yet_is_waited_for() -> None:
    search = CopySearch(0, 1, 0, quorum_s=60.0, now=100.0)
    search.choose_start(view_of(copy(8, address="a"), copy(8, address="b")), 159.0)
    assert not search.is_over(161.0)
    assert search.is_over(220.5)


def test_b5_a_copy_whose_holder_has_become_silent_is_waited_for() -> None:
    """The job does not begin anew because the only holder is frozen while it is asked."""
    search = CopySearch(0, 1, 0, quorum_s=60.0, now=100.0)
    assert search.choose_start(view_of(), 100.0) == copy(8)
    forgotten = MembersAndCopies(knows_copies=True)
    assert search.choose_start(forgotten, 108.0) is Start.LOOK_AGAIN
    assert search.is_over(160.5)
    assert search.choose_start(view_of(), 120.0) == copy(8)
    for goes_on in ({"committed_step": 1}, {"is_finished": True}):
        view = MembersAndCopies(knows_copies=True, **goes_on)
        assert search.choose_start(view, 121.0) is Start.WITHOUT_COPY


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
    assert held.whole_copies("j", SILENT_S + 1) == [], (
        "the job that nobody has reported of for longest"
    )


@pytest.mark.parametrize(
    "wrong", [copy(-1), copy(1, -1), copy(1, 1, of=1), copy(1, quorum=-3), copy(1, address="\n")]
)
def test_a_copy_of_no_worker_is_refused(wrong: HeldCopy) -> None:
    with pytest.raises(RequestRefused):
        wrong.check()
