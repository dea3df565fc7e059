"""Tests which workers have been stopped for too long."""

from __future__ import annotations

import pytest

from torchft_svc.core.launch.stopped_workers import StoppedWorkers
from torchft_svc.errors import ConfigError


def looks(stopped: StoppedWorkers, pids: list[int], since: int, until: int) -> list[list[int]]:
    """What is overdue at each second."""
    return [stopped.overdue(pids, float(now)) for now in range(since, until)]


def test_a_worker_is_overdue_after_the_timeout() -> None:
    stopped = StoppedWorkers(10.0, 0.0)
    assert looks(stopped, [7], 1, 11) == [[]] * 10
    assert stopped.overdue([7, 8], 11.0) == [7]


def test_a_worker_that_continued_begins_anew() -> None:
    stopped = StoppedWorkers(10.0, 0.0)
    assert looks(stopped, [7], 1, 9) == [[]] * 8
    assert stopped.overdue([], 9.0) == []
    assert looks(stopped, [7], 10, 20) == [[]] * 10
    assert stopped.overdue([7], 20.0) == [7]


def test_time_in_which_the_agent_was_stopped_does_not_count() -> None:
    stopped = StoppedWorkers(10.0, 0.0)
    assert stopped.overdue([7], 1.0) == []
    assert stopped.overdue([7], 500.0) == []


def test_without_a_timeout_nobody_looks() -> None:
    assert StoppedWorkers(0.0, 0.0).look_at == float("inf")


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf")])
def test_timeouts_that_cannot_work(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="stopped_timeout_s"):
        StoppedWorkers(timeout_s, 0.0)
