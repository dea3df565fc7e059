"""Tests that the end of a program waits for threads that cannot be interrupted."""

from __future__ import annotations

import threading

import pytest

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
