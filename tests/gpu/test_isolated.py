"""Tests NCCL in processes of their own, of several ranks on one GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.collective_calls import expected
from support.gpu.ranks import Group, everyone, group_of, needs_gpu
from support.running import eventually

pytestmark = [pytest.mark.gpu, pytest.mark.processes, needs_gpu, pytest.mark.timeout(180)]

# What is promised for the abort of a hung operation, and for the end of a killed one.
ABORT_MS = 1000.0
# The system takes a context back within this time.
GONE_S = 10.0
# What a device keeps for itself after a process has come and gone.
SLACK_BYTES = 32 << 20


@pytest.fixture
def pair() -> Iterator[Group]:
    with group_of(2, isolated=True) as group:
        yield group


def assert_they_sum(group: Group) -> None:
    assert all("ms" in answer for answer in group.configure())
    for answer in everyone(group.ranks, "allreduce", numel=1000, value=1.0):
        assert answer["ends"] == [2.0, 2.0], answer


def test_every_collective_gives_what_arithmetic_says(pair: Group) -> None:
    pair.configure()
    for rank, answer in enumerate(everyone(pair.ranks, "every_collective")):
        assert answer == expected(rank, 2)


def test_streams_are_ordered_without_waiting_on_the_cpu(pair: Group) -> None:
    pair.configure()
    assert everyone(pair.ranks, "ordered", rounds=50) == [{"wrong": 0}] * 2


def test_members_come_and_go() -> None:
    with group_of(3, isolated=True) as group:
        for members in (group.ranks, group.ranks[:2], group.ranks[1:], group.ranks):
            assert all("ms" in answer for answer in group.configure(*members))
            for answer in everyone(list(members), "allreduce", numel=1000, value=1.0):
                assert answer["ends"] == [len(members)] * 2, answer


def test_a_sum_in_a_cuda_graph_is_refused(pair: Group) -> None:
    pair.configure()
    for answer in everyone(pair.ranks, "capture"):
        assert answer["error"].startswith("ConfigError"), answer
        assert "CUDA graph" in answer["error"], answer
        assert answer["ends"] == [2.0, 2.0], "and nothing is broken"


def test_abort_ends_a_hung_allreduce_within_a_second(pair: Group) -> None:
    assert_they_sum(pair)
    found = pair.ranks[0].call("hang", abort_after_s=0.5)
    assert not found["ok"], found
    assert found["abort_ms"] < ABORT_MS, found
    assert found["idle_ms"] < ABORT_MS, found
    assert_they_sum(pair)


def test_abort_leaves_no_stream_waiting(pair: Group) -> None:
    assert_they_sum(pair)
    assert pair.ranks[0].call("leave_a_sum")["idle_ms"] < ABORT_MS
    assert_they_sum(pair)


@pytest.mark.parametrize("after_s", [0.0, 0.5])  # the kernel waits for the other member then
def test_a_killed_process_is_an_error_and_gives_its_memory_back(
    pair: Group, after_s: float
) -> None:
    first = pair.ranks[0]
    before = first.call("memory")
    assert_they_sum(pair)
    for _ in range(2):
        found = first.call("kill_the_process", after_s=after_s)
        assert "SIGKILL" in found["error"], found
        assert found["error_ms"] < 2 * ABORT_MS, found
        assert found["idle_ms"] < 3 * ABORT_MS, found
        assert_they_sum(pair)
    everyone(pair.ranks, "shutdown")

    def is_given_back() -> bool:
        now = first.call("memory")
        given = now["free"] >= before["free"] - SLACK_BYTES
        return given and now["allocated"] <= before["allocated"]

    eventually(is_given_back, GONE_S, "memory is not given back")
