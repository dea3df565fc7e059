"""Tests each worker's part of a quorum: tables, and what holds for every quorum (I2)."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.core import twin
from support.core.scenes import member, quorum

from torchft_svc.core.quorum.assignment import (
    MAX_HEAL_SOURCES,
    QuorumResult,
    assign,
    check_answer,
    heal_plan,
)
from torchft_svc.core.quorum.types import Member, Quorum
from torchft_svc.errors import QuorumFailed

# a and c are at step 5, b, d and e are behind.
MIXED = quorum(
    7,
    member("a", 5),
    member("b", 2, commit_failures=3),
    member("c", 5, commit_failures=1),
    member("d", 0),
    member("e", 4),
)
AT_START = quorum(1, member("a"), member("b"), member("c"))


def test_the_part_of_a_member_that_is_up_to_date() -> None:
    assert assign(MIXED, "c", group_rank=0) == QuorumResult(
        quorum_id=7,
        group_rank=0,
        replica_rank=2,
        replica_world_size=5,
        max_step=5,
        max_replica_rank=1,
        max_world_size=2,
        store_address="a:2",
        recover_src_replica_rank=None,
        recover_src_manager_address="",
        recover_dst_replica_ranks=(3,),
        recover_extra_src_manager_addresses=(),
        recover_extra_dst_replica_ranks=(1, 4),
        commit_failures=3,
        replica_ids=("a", "b", "c", "d", "e"),
    )


def test_the_part_of_a_member_that_is_behind() -> None:
    assert assign(MIXED, "d", group_rank=1) == QuorumResult(
        quorum_id=7,
        group_rank=1,
        replica_rank=3,
        replica_world_size=5,
        max_step=5,
        max_replica_rank=None,
        max_world_size=2,
        store_address="c:2",
        recover_src_replica_rank=0,
        recover_src_manager_address="a:1",
        recover_dst_replica_ranks=(),
        recover_extra_src_manager_addresses=("c:1",),
        recover_extra_dst_replica_ranks=(),
        commit_failures=3,
        replica_ids=("a", "b", "c", "d", "e"),
    )


@pytest.mark.parametrize(
    ("group_rank", "plan"),
    [(0, {1: 0, 3: 2, 4: 0}), (1, {1: 2, 3: 0, 4: 2}), (2, {1: 0, 3: 2, 4: 0})],
)
def test_who_heals_from_whom(group_rank: int, plan: dict[int, int]) -> None:
    assert heal_plan(5, [0, 2], group_rank, from_one=False) == plan
    for init_sync in (True, False):
        parts = [assign(MIXED, name, group_rank, init_sync) for name in "abcde"]
        assert {part.replica_rank: part.recover_src_replica_rank for part in parts} == {
            0: None,
            2: None,
        } | plan


@pytest.mark.parametrize("group_rank", [0, 1, 2, 5])
def test_at_step_0_all_take_one_and_the_same_state(group_rank: int) -> None:
    parts = [assign(AT_START, name, group_rank) for name in "abc"]
    assert [part.recover_src_replica_rank for part in parts] == [None, 0, 0]
    assert [part.recover_src_manager_address for part in parts] == ["", "a:1", "a:1"]
    assert [part.recover_dst_replica_ranks for part in parts] == [(1, 2), (), ()]
    assert [part.max_replica_rank for part in parts] == [0, 1, 2]
    assert {part.store_address for part in parts} == {f"{'abc'[group_rank % 3]}:2"}


def test_at_step_0_without_init_sync_nobody_heals() -> None:
    for name in "abc":
        part = assign(AT_START, name, 0, init_sync=False)
        assert (part.recover_src_replica_rank, part.recover_dst_replica_ranks) == (None, ())


def test_i3_a_group_that_was_left_out_heals_though_its_step_is_the_same() -> None:
    # a committed step 6 and was frozen; b had discarded it, and did it again alone.
    parts = [assign(joined("a", "b", "c", steps=(6, 6, 5), joining="a"), name, 0) for name in "abc"]
    assert [part.recover_src_replica_rank for part in parts] == [1, None, 1]
    assert [part.recover_dst_replica_ranks for part in parts] == [(), (0, 2), ()]
    assert [part.max_replica_rank for part in parts] == [None, 0, None]
    assert {part.max_world_size for part in parts} == {1}
    assert {part.store_address for part in parts} == {"b:2"}


def test_groups_that_join_count_where_no_other_is_as_far() -> None:
    parts = [assign(joined("a", "b", steps=(6, 5), joining="a"), name, 0) for name in "ab"]
    assert [part.recover_src_replica_rank for part in parts] == [None, 0]
    at_start = [
        assign(joined("a", "b", steps=(0, 0), joining="b"), name, 0, False) for name in "ab"
    ]
    assert [part.recover_src_replica_rank for part in at_start] == [None, None]
    assert [part.max_world_size for part in at_start] == [2, 2]


def joined(*names: str, steps: tuple[int, ...], joining: str) -> Quorum:
    members = [member(name, step) for name, step in zip(names, steps, strict=True)]
    return replace(quorum(3, *members), joining=frozenset(joining))


def test_alone_nobody_heals() -> None:
    part = assign(quorum(1, member("a")), "a", 3)
    assert (part.replica_rank, part.max_replica_rank, part.max_world_size) == (0, 0, 1)
    assert (part.recover_src_replica_rank, part.recover_dst_replica_ranks, part.store_address) == (
        None,
        (),
        "a:2",
    )


def test_stores_are_spread_over_those_that_are_up_to_date() -> None:
    stores = [assign(MIXED, "b", group_rank).store_address for group_rank in range(4)]
    assert stores == ["a:2", "c:2", "a:2", "c:2"]


@pytest.mark.parametrize(
    ("failures", "store"), [(0, "a:2"), (1, "a:2"), (2, "b:2"), (3, "c:2"), (4, "a:2")]
)
def test_after_more_than_one_failure_another_store_is_tried(failures: int, store: str) -> None:
    """All groups choose the same one, by the failures of whoever has the most."""
    failed = quorum(9, member("a"), member("b", commit_failures=failures), member("c"))
    assert {assign(failed, name, 0).store_address for name in "abc"} == {store}


@pytest.mark.parametrize(
    ("members", "is_steady"),
    [
        ("a5 b5 c5", True),
        ("a5", False),  # alone
        ("a5 b5 c4", False),  # c heals
        ("a5 b5 c5!", False),  # so it does here: it was not in the quorum before
        ("a5 b5 c5?", False),  # c asks before each step
        ("a0 b0 c0", False),  # b and c may heal from a
    ],
)
@pytest.mark.parametrize("init_sync", [True, False])
def test_a_quorum_is_steady_for_all_members_alike(
    members: str, is_steady: bool, init_sync: bool
) -> None:
    """The lighthouse, which does not know who wants one state at step 0, sees the same."""
    names = members.split()
    asked = (member(each[0], int(each[1]), steady=each[2:] != "?") for each in names)
    joining = frozenset(each[0] for each in names if each[2:] == "!")
    seen = replace(quorum(7, *asked), joining=joining)
    assert seen.steady == is_steady
    assert {assign(seen, each[0], 0, init_sync).steady for each in names} == {is_steady}


def test_who_is_not_a_member_gets_no_part() -> None:
    with pytest.raises(QuorumFailed) as refused:
        assign(MIXED, "f", 0)
    assert str(refused.value) == "no quorum: quorum 7 was formed without 'f'"


def test_a_part_among_ten_thousand_groups_is_quick() -> None:
    seen = quorum(1, *(member(f"g{number:05}", 5) for number in range(10_000)))
    started = time.process_time()
    part = assign(seen, "g00007", 0)
    assert time.process_time() - started < 0.5  # it takes 20 ms; with a square in it, seconds
    assert part.replica_rank == 7


def test_a_plan_for_ten_thousand_groups_is_quick() -> None:
    started = time.process_time()
    plan = heal_plan(10_000, list(range(1, 10_000, 2)), 0, from_one=False)
    assert time.process_time() - started < 0.1  # it takes 3 ms; with a square in it, 0.5 s
    assert len(plan) == 5000


BUSY = [HealthCheck.too_slow]  # on a busy machine, slow is no sign of a fault
groups = st.builds(
    lambda name, step, failures, steady: member(
        name, step, commit_failures=failures, steady=steady
    ),
    st.text("abc:12", min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from((True, True, True, False)),
)


def some_join(members: list[Member]) -> st.SearchStrategy[Quorum]:
    ids = [each.replica_id for each in members]
    return st.frozensets(st.sampled_from(ids)).map(
        lambda joining: replace(quorum(3, *members), joining=joining)
    )


quorums = st.lists(groups, min_size=1, max_size=8, unique_by=lambda each: each.replica_id).flatmap(
    some_join
)


@settings(max_examples=150, deadline=None, suppress_health_check=BUSY)
@given(seen=quorums, group_rank=st.integers(0, 9), init_sync=st.booleans(), data=st.data())
def test_i2_agreement(seen: Quorum, group_rank: int, init_sync: bool, data: st.DataObject) -> None:
    """All members compute one plan, in whatever order the members reach them."""
    ids = sorted(each.replica_id for each in seen.participants)
    parts = []
    for replica_id in ids:
        order = data.draw(st.permutations(seen.participants))
        shuffled = replace(seen, participants=tuple(order))
        part = assign(shuffled, replica_id, group_rank, init_sync)
        assert part == twin.assign(seen, replica_id, group_rank, init_sync)
        parts.append(part)
    assert [part.replica_rank for part in parts] == list(range(len(ids)))
    assert all(part.replica_ids == tuple(ids) for part in parts)
    shared = {(part.max_step, part.max_world_size, part.store_address) for part in parts}
    assert len(shared) == 1
    check_healing(seen, parts, init_sync)


def check_healing(seen: Quorum, parts: list[QuorumResult], init_sync: bool) -> None:
    """Sources and targets are inverse; every member that is behind has one source; fair loads."""
    members = sorted(seen.participants, key=lambda each: each.replica_id)
    top = max(each.step for each in members)
    current = {rank for rank, each in enumerate(members) if each in seen.up_to_date}
    pairs = {
        (part.recover_src_replica_rank, part.replica_rank)
        for part in parts
        if part.recover_src_replica_rank is not None
    }
    assert pairs == {
        (part.replica_rank, target) for part in parts for target in part.recover_dst_replica_ranks
    }
    extras = {
        (address, part.replica_rank)
        for part in parts
        for address in part.recover_extra_src_manager_addresses
    }
    assert extras == {
        (members[part.replica_rank].address, target)
        for part in parts
        for target in part.recover_extra_dst_replica_ranks
    }
    healing = {target for _, target in pairs}
    if top == 0:
        assert healing == (set(range(1, len(members))) if init_sync else set())
        return
    assert healing == set(range(len(members))) - current
    for part in parts:
        if part.recover_src_replica_rank is not None:
            sources = [part.recover_src_manager_address, *part.recover_extra_src_manager_addresses]
            assert len(sources) == min(MAX_HEAL_SOURCES, len(current))
            assert set(sources) <= {members[rank].address for rank in current}
    assert all(members[source or 0].step == top for source, _ in pairs)
    loads = Counter(dict.fromkeys(current, 0))
    loads.update(source for source, _ in pairs if source is not None)
    assert max(loads.values()) - min(loads.values()) <= 1


def test_four_groups_at_most_serve_one_that_heals_and_it_begins_at_its_own_source() -> None:
    seen = quorum(7, *(member(name, 5) for name in "abcdef"), member("g", 1))
    part = assign(seen, "g", group_rank=4)
    assert part.recover_src_manager_address == "e:1"
    assert part.recover_extra_src_manager_addresses == ("f:1", "a:1", "b:1")
    assert [assign(seen, name, 4).recover_extra_dst_replica_ranks for name in "abcdef"] == [
        (6,), (6,), (), (), (), (6,)
    ]  # fmt: skip


def test_at_the_start_nobody_but_the_primary_serves() -> None:
    parts = [assign(AT_START, name, group_rank=1) for name in "abc"]
    assert all(
        part.recover_extra_src_manager_addresses == part.recover_extra_dst_replica_ranks == ()
        for part in parts
    )


@settings(max_examples=50, deadline=None, suppress_health_check=BUSY)
@given(seen=quorums, group_ranks=st.integers(1, 6))
def test_the_ranks_of_one_group_load_different_sources(seen: Quorum, group_ranks: int) -> None:
    parts = [assign(seen, seen.participants[0].replica_id, rank) for rank in range(group_ranks)]
    if parts[0].recover_src_replica_rank is not None and seen.max_step > 0:
        sources = {part.recover_src_replica_rank for part in parts}
        assert len(sources) == min(group_ranks, parts[0].max_world_size)
    else:
        assert len({part.recover_src_replica_rank for part in parts}) == 1


@pytest.mark.parametrize(
    ("seen", "answered", "ids_grow"), [(0, 1, True), (7, 7, True), (7, 8, True), (7, 1, False)]
)
def test_i1_a_quorum_that_is_taken(seen: int, answered: int, ids_grow: bool) -> None:
    asked = member("a", seen_quorum_id=seen)
    check_answer(asked, quorum(answered, asked, member("b")), ids_grow=ids_grow)


def test_i1_a_quorum_of_a_lighthouse_that_leads_no_more() -> None:
    asked = member("a", seen_quorum_id=7)
    with pytest.raises(QuorumFailed, match="quorum 6 is older than quorum 7"):
        check_answer(asked, quorum(6, asked), ids_grow=True)


@pytest.mark.parametrize("ids_grow", [True, False])
def test_a_quorum_without_the_group_that_asked(ids_grow: bool) -> None:
    with pytest.raises(QuorumFailed, match="quorum 1 was formed without 'a'"):
        check_answer(member("a"), quorum(1, member("b")), ids_grow=ids_grow)
