"""Tests waits that can be left, and that a program waits at its end for threads that cannot."""

from __future__ import annotations

import threading

import pytest

from torchft_svc.errors import DeadlineExceeded
from torchft_svc.host import uninterruptible


def test_the_end_waits_for_a_thread_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uninterruptible, "_EXIT_WAIT_S", 20)
    may_end, has_ended = threading.Event(), threading.Event()

    def run() -> None:
        may_end.wait()
        has_ended.set()

    uninterruptible.start_uninterruptible(run, "abandoned")
    end = threading.Thread(target=uninterruptible._join)
    end.start()
    may_end.set()
    end.join()
    assert has_ended.is_set()


def test_the_end_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uninterruptible, "_EXIT_WAIT_S", 0.01)
    may_end = threading.Event()
    uninterruptible.start_uninterruptible(may_end.wait, "abandoned")
    uninterruptible._join()
    may_end.set()


def test_a_wait_ends_by_its_event_its_check_or_its_deadline() -> None:
    event = threading.Event()

    def leave() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        uninterruptible.wait_checking(event.wait, leave, check_s=0.001)
    with pytest.raises(DeadlineExceeded, match=r"a rest timed out after 0\.01 s: nobody came"):
        uninterruptible.wait_checking(
            event.wait, uninterruptible.nothing, 0.01, "a rest", "nobody came", check_s=0.001
        )
    event.set()
    uninterruptible.wait_checking(event.wait, leave)
