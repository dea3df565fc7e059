"""Tests the timer, and futures with a deadline."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from torchft_svc.client.process.deadlines import Timer, guard_future
from torchft_svc.errors import DeadlineExceeded

DEADLINE_S = 10.0


@pytest.fixture
def timer():  # type: ignore[no-untyped-def]
    timer = Timer("torchft-test-timer")
    yield timer
    timer.close(DEADLINE_S)


def test_calls_come_in_the_order_of_their_times(timer: Timer) -> None:
    calls: list[int] = []
    done = threading.Event()
    all_scheduled = threading.Event()
    now = time.monotonic()
    timer.call_at(now, lambda: all_scheduled.wait(DEADLINE_S) and None)
    timer.call_at(now + 0.05, lambda: (calls.append(2), done.set()))
    timer.call_at(now + 0.01, lambda: calls.append(1))
    timer.cancel(timer.call_at(now + 0.02, lambda: calls.append(9)))
    all_scheduled.set()
    assert done.wait(DEADLINE_S)
    assert calls == [1, 2]


def test_a_time_that_never_comes_holds_up_no_other(timer: Timer) -> None:
    """Waiting for it would be more than the system can."""
    timer.call_at(time.monotonic() + 1e13, lambda: None)
    soon = threading.Event()
    timer.call_at(time.monotonic() + 0.01, soon.set)
    assert soon.wait(10)


def test_a_future_that_ends_too_late_changes_nothing(timer: Timer) -> None:
    errors: list[Exception] = []
    source: torch.futures.Future[int] = torch.futures.Future()
    guarded = guard_future(source, -1, 0.01, errors.append, timer)
    assert guarded.wait() == -1
    source.set_result(3)
    assert guarded.value() == -1
    assert isinstance(errors[0], DeadlineExceeded)
    assert len(errors) == 1


def test_i5_a_future_does_not_outlive_who_keeps_its_deadline() -> None:
    timer = Timer("torchft-test-timer")
    errors: list[Exception] = []
    source: torch.futures.Future[int] = torch.futures.Future()
    before = guard_future(source, -1, 60.0, errors.append, timer)
    timer.close(DEADLINE_S)
    after = guard_future(torch.futures.Future(), -2, 60.0, errors.append, timer)
    assert (before.done(), after.done()) == (True, True)
    assert (before.value(), after.value()) == (-1, -2)
    source.set_result(3)
    assert (before.value(), errors) == (-1, [])


def test_a_future_that_ends_in_time_needs_no_timer(timer: Timer) -> None:
    errors: list[Exception] = []
    source: torch.futures.Future[int] = torch.futures.Future()
    guarded = guard_future(source, -1, 60.0, errors.append, timer)
    source.set_result(3)
    assert guarded.wait() == 3
    assert (errors, timer._due) == ([], [])
