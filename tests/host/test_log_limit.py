"""Tests which lines of a log are left out, and how that is logged."""

from __future__ import annotations

import pytest
from support.running import lighthouse_process, line_to

from torchft_svc.host.log_limit import MAX_KINDS, MAX_LINES, WINDOW_S, LineLimit
from torchft_svc.proto import torchft_pb2 as pb


def test_the_first_lines_of_a_kind_are_written() -> None:
    limit = LineLimit()
    written = [limit.admit("a", now=1.0) for _ in range(3 * MAX_LINES)]
    assert written == [True] * MAX_LINES + [False] * 2 * MAX_LINES
    assert limit.admit("b", now=1.0)


def test_what_was_left_out_is_reported_once_when_the_window_is_over() -> None:
    limit = LineLimit()
    for _ in range(MAX_LINES + 5):
        limit.admit("a", now=1.0)
    limit.admit("b", now=1.0)
    assert limit.ended(now=0.9 + WINDOW_S) == []
    assert limit.ended(now=1.0 + WINDOW_S) == [("a", 5)]
    assert limit.ended(now=1.0 + WINDOW_S) == []
    assert limit.admit("a", now=1.0 + WINDOW_S)


def test_i7_kinds_without_end_do_not_fill_the_memory() -> None:
    limit = LineLimit()
    written = sum(limit.admit(f"kind {number}", now=1.0) for number in range(10_000))
    assert written == MAX_KINDS + MAX_LINES
    assert limit.ended(now=1.0 + WINDOW_S) == [
        ("lines of other kinds", 10_000 - MAX_KINDS - MAX_LINES)
    ]


@pytest.mark.processes
def test_a_flood_of_deaths_takes_few_lines_and_is_counted() -> None:
    num_deaths = 2000
    with lighthouse_process("--log-level=info") as lighthouse:
        with line_to(lighthouse.address) as line:
            for first in range(0, num_deaths, 100):
                ids = [f"group{number}:1" for number in range(first, first + 100)]
                for replica_id in ids:
                    line.beat(replica_id)
                leaves = [pb.LighthouseLeaveRequest(replica_id=each) for each in ids]
                calls = [line.call("LighthouseService/Leave", each, 20, None) for each in leaves]
                for call in calls:
                    call.result()
        assert lighthouse.end()[0] == 0
        lines = [text for text in lighthouse.errors().splitlines() if "group lost" in text]
    assert MAX_LINES < len(lines) < num_deaths / 10
    left_out = [int(text.split("omitted ")[1].split()[0]) for text in lines if "omitted" in text]
    assert sum(left_out) + len(lines) - len(left_out) == num_deaths
