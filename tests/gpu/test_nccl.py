"""Tests NCCL groups of several processes on one GPU: sums, new members, aborts, dead peers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.collective_calls import expected
from support.gpu.ranks import Group, everyone, group_of, needs_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.processes, needs_gpu, pytest.mark.timeout(180)]

# What is promised for the abort of a hung operation.
ABORT_MS = 1000.0


@pytest.fixture
def pair() -> Iterator[Group]:
    with group_of(2) as group:
        yield group


def test_every_collective_gives_what_arithmetic_says(pair: Group) -> None:
    pair.configure()
    for rank, answer in enumerate(everyone(pair.ranks, "every_collective")):
        assert answer == expected(rank, 2)


def test_reductions_of_all_kinds(pair: Group) -> None:
    pair.configure()
    for op, result in (("SUM", 3.0), ("MAX", 2.0), ("MIN", 1.0), ("PRODUCT", 2.0), ("AVG", 1.5)):
        for rank, member in enumerate(pair.ranks):
            member.ask("allreduce", numel=1 << 20, value=rank + 1.0, op=op)
        for member in pair.ranks:
            answer = member.answer()
            assert answer["ok"], answer
            assert answer["ends"] == [result, result], op


def test_streams_are_ordered_without_waiting_on_the_cpu(pair: Group) -> None:
    pair.configure()
    assert everyone(pair.ranks, "ordered", rounds=50) == [{"wrong": 0}] * 2


def test_members_come_and_go() -> None:
    with group_of(3) as group:
        for members in (
            group.ranks,
            group.ranks[:2],
            group.ranks[:1],
            group.ranks[1:],
            group.ranks,
        ):
            assert all("ms" in answer for answer in group.configure(*members))
            for answer in everyone(list(members), "allreduce", numel=1000, value=1.0):
                assert answer["ok"], answer
                assert answer["ends"] == [len(members)] * 2


def test_a_sum_in_a_cuda_graph_is_refused(pair: Group) -> None:
    pair.configure()
    for answer in everyone(pair.ranks, "capture"):
        assert answer["error"].startswith("ConfigError"), answer
        assert "CUDA graph" in answer["error"], answer
        assert answer["ends"] == [2.0, 2.0], "and nothing is broken"


def test_abort_ends_a_hung_allreduce_within_a_second(pair: Group) -> None:
    pair.configure()
    everyone(pair.ranks, "allreduce", numel=1000, value=1.0)
    found = pair.ranks[0].call("hang", abort_after_s=0.5)
    assert not found["ok"], found
    assert found["abort_ms"] < ABORT_MS, found
    assert found["idle_ms"] < ABORT_MS, found
    # and both can meet again
    assert all("ms" in answer for answer in pair.configure())
    for answer in everyone(pair.ranks, "allreduce", numel=1000, value=1.0):
        assert answer["ends"] == [2.0, 2.0]


def test_a_dead_peer_costs_a_moment_once_its_loss_is_known() -> None:
    with group_of(3) as group:
        group.configure()
        everyone(group.ranks, "allreduce", numel=1000, value=1.0)
        group.ranks[2].child.kill()
        survivors = group.ranks[:2]
        for found in everyone(survivors, "lose", quorum=group.quorum):
            assert not found["ok"], found
            assert found["idle_ms"] < ABORT_MS
        assert all("ms" in answer for answer in group.configure(*survivors))
        for answer in everyone(survivors, "allreduce", numel=1000, value=1.0):
            assert answer["ends"] == [2.0, 2.0]


def test_a_dead_peer_is_noticed_at_the_timeout_if_nobody_reports_it() -> None:
    with group_of(2, timeout_s=3.0) as group:
        group.configure()
        everyone(group.ranks, "allreduce", numel=1000, value=1.0)
        # The other one lives and takes no part; nobody waits on the CPU with a time.
        found = group.ranks[0].call("forget")
        assert 2900 < found["idle_ms"] < 3000 + ABORT_MS, found
        assert "was left" in found["error"]
        eventual = "a collective timed out after 3 s"
        assert eventual in found["errored"], found
        assert all("ms" in answer for answer in group.configure())


def test_a_member_that_dies_before_it_connects_costs_the_timeout_at_most() -> None:
    with group_of(2, timeout_s=4.0) as group:
        # It was seen at the meeting, and never connects.
        found = group.configure_without_peer(group.ranks[0])
        assert "DeadlineExceeded" in found["error"], found
        assert found["stall_ms"] < ABORT_MS
        assert all("ms" in answer for answer in group.configure())
        for answer in everyone(group.ranks, "allreduce", numel=1000, value=1.0):
            assert answer["ends"] == [2.0, 2.0]


def test_use_before_configure_after_abort_and_twice_shut_down(pair: Group) -> None:
    assert (
        "the process group was left" in pair.ranks[0].call("allreduce", numel=1, value=1.0)["error"]
    )
    pair.configure()
    assert everyone(pair.ranks, "shutdown") == [{}, {}]
    assert "left" in pair.ranks[0].call("allreduce", numel=1, value=1.0)["error"]
