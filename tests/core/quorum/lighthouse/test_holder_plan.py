"""Tests what a holder copies, keeps and frees (rules B1, B4 and B6)."""

from __future__ import annotations

from typing import Any

import pytest

from torchft_svc.core.quorum.lighthouse.common_steps import LEAD_S, PATIENCE_S
from torchft_svc.core.quorum.lighthouse.copies import HeldCopy, MembersAndCopies, StateKey
from torchft_svc.core.quorum.lighthouse.holder_plan import (
    BEHIND_S,
    HistoryWatch,
    HolderPlan,
    NextCopy,
    choose_buddy,
)

QUORUM = 7


def key(step: int, size: int = 1) -> StateKey:
    return StateKey(step, QUORUM, size)


def view_of(
    *whole_steps: int, step: int = 100, size: int = 1, members: Any = None, **fields: Any
) -> MembersAndCopies:
    """What a lighthouse answers that knows whole states of ``whole_steps``."""
    copies = tuple(
        HeldCopy(step=each, step_quorum_id=QUORUM, group_rank=rank, group_world_size=size)
        for each in whole_steps
        for rank in range(size)
    )
    members = {"b:1": "address"} if members is None else members
    return MembersAndCopies(members=members, committed_step=step, copies=copies, **fields)


@pytest.fixture
def lone() -> HolderPlan:
    """A holder of the copies of a group of one worker."""
    return HolderPlan("a", [0], 1)


@pytest.fixture
def part() -> HolderPlan:
    """A holder of the copies of the second of two workers."""
    return HolderPlan("a", [1], 2)


def add(plan: HolderPlan, step: int, now: float = 0.0) -> None:
    plan.record_copy(1, key(step, 2), step - 1, 0.1, now)


def steps(plan: HolderPlan, rank: int = 1) -> list[int]:
    return [each.step for each in plan.kept(rank)]


@pytest.mark.parametrize(
    ("beside", "buddy"), [("a", "b:2"), ("b", "c:3"), ("c", "a:1"), ("", "a:1"), ("bb", "c:3")]
)
def test_b1_the_buddy_is_the_next_group(beside: str, buddy: str) -> None:
    members = dict.fromkeys(("c:3", "a:1", "b:2"), "address")
    assert choose_buddy(members, beside) == buddy


def test_b1_a_lone_group_is_its_own_buddy() -> None:
    assert choose_buddy({"a:1": "address"}, "a") == "a:1"


def test_b1_nothing_is_copied_until_a_group_trains(lone: HolderPlan) -> None:
    assert lone.begin_copy(0) is None
    lone.record_view("l", view_of(step=0), 1.0)
    assert lone.begin_copy(0) == NextCopy("b:1", "address", 0)


def test_b2_the_lighthouse_that_knows_most_is_followed(lone: HolderPlan) -> None:
    lone.record_view("first", view_of(members={"b:1": "b"}), 1.0)
    lone.record_view("other", view_of(members={"c:1": "c", "d:1": "d"}), 1.0)
    lone.record_view("first", view_of(members={"b:1": "b"}), 2.0)
    assert lone.begin_copy(0) == NextCopy("c:1", "c", 0)
    lone.record_silence("other")
    assert lone.begin_copy(0) == NextCopy("b:1", "b", 0)
    lone.record_silence("first")
    assert lone.begin_copy(0) == NextCopy("b:1", "b", 0), "nobody knows better"


def test_b4_the_copy_of_a_lone_worker_takes_the_place_of_the_one_before(lone: HolderPlan) -> None:
    lone.record_view("l", view_of(), 1.0)
    for step in (5, 10):
        lone.record_copy(0, key(step), step - 1, 0.1, now=2.0)
        assert steps(lone, 0) == [step]
    assert not lone.awaits_other_workers(0, 2.0)
    assert lone.begin_copy(0) == NextCopy("b:1", "address", 10)


def test_b4_the_newest_that_is_whole_stays_until_a_newer_one_is(part: HolderPlan) -> None:
    add(part, 5)
    part.record_view("l", view_of(5, size=2), 1.0)
    part.begin_copy(1)
    assert steps(part) == [5]
    add(part, 10)
    part.record_view("l", view_of(5, size=2), 2.0)
    assert steps(part) == [5, 10]
    part.begin_copy(1)
    assert steps(part) == [5], "another one arrives, and the one of 10 is not whole"
    add(part, 15)
    part.record_view("l", view_of(99, 15, 5, size=2), 3.0)
    assert steps(part) == [15]


def test_b4_without_a_whole_state_the_newest_copy_stays(part: HolderPlan) -> None:
    part.record_view("l", view_of(size=2), 1.0)
    add(part, 5)
    add(part, 10)
    part.begin_copy(1)
    assert steps(part) == [10]


def test_b4_a_copy_is_kept_for_the_other_workers_but_not_for_long(part: HolderPlan) -> None:
    part.record_view("l", view_of(size=2), 1.0)
    add(part, 5, now=1.0)
    assert part.awaits_other_workers(1, 1.0 + PATIENCE_S)
    assert not part.awaits_other_workers(1, 2.0 + PATIENCE_S)
    part.record_view("l", view_of(5, size=2), 1.5)
    assert not part.awaits_other_workers(1, 1.5)


def test_b4_workers_wait_for_steps_that_are_common_to_them(part: HolderPlan) -> None:
    """The steps are multiples of 16 at two steps a second; the next one is not too near."""
    part.record_view("l", view_of(size=2, step=90), 0.0)
    part.record_view("l", view_of(size=2, step=100), 5.0)
    assert 8 < 2 * (LEAD_S + PATIENCE_S) <= 16
    assert part.begin_copy(1) == NextCopy("b:1", "address", 111)


def test_b6_copies_above_the_step_of_a_job_that_goes_on_are_freed() -> None:
    watch = HistoryWatch()
    behind = MembersAndCopies(members={"a:1": "address"}, committed_step=3)
    assert not watch.is_over(behind, 8, 100.0)
    assert not watch.is_over(behind, 8, 100.0 + BEHIND_S)
    assert watch.is_over(behind, 8, 100.5 + BEHIND_S)
    assert not watch.is_over(MembersAndCopies(), 8, 200.0)
    assert not watch.is_over(behind, 8, 200.0), "nobody lived in between"
    assert watch.is_over(MembersAndCopies(is_finished=True), 8, 201.0)


def test_b6_a_holder_is_informed_from_where_the_job_goes_on(lone: HolderPlan) -> None:
    lone.record_copy(0, key(50), 0, 0.1, now=0.0)
    assert lone.record_view("l", view_of(step=3), 1.0) is None
    assert lone.record_view("l", view_of(step=4), 1.5 + BEHIND_S) == 4
    assert steps(lone, 0) == []
    assert lone.record_view("l", view_of(step=5), 2.0 + BEHIND_S) is None, "none are left"


def test_b6_the_copies_of_a_run_are_freed_that_has_finished_at_another_lighthouse(
    lone: HolderPlan,
) -> None:
    """The first one of the list has never had the job."""
    lone.record_copy(0, key(50), 0, 0.1, now=0.0)
    for now in (1.0, 2.0):
        lone.record_view("first", view_of(members={}, knows_copies=True), now)
        lone.record_view("other", view_of(50), now)
    lone.record_view("other", view_of(50, members={}, is_finished=True), 3.0)
    assert steps(lone, 0) == []
    lone.record_copy(0, key(70), 0, 0.1, now=4.0)
    lone.record_view("first", view_of(70), 5.0)
    lone.record_view("first", view_of(70, members={}), 6.0)
    assert steps(lone, 0) == [70], "the next run was at the first one, and has not finished"


def test_b6_the_copies_of_a_finished_run_are_freed(lone: HolderPlan) -> None:
    lone.record_copy(0, key(50), 0, 0.1, now=0.0)
    assert lone.record_view("l", view_of(50, members={}, is_finished=True), 1.0) is None
    assert steps(lone, 0) == []
