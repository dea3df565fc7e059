"""Tests that a process ends if a collective can neither end nor be abandoned."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from support.endings import DEADLINE_S, running
from support.running import eventually
from support.training import lighthouse

from torchft_svc.client.process.watchdog import STANDSTILL_S, Watchdog


@pytest.mark.processes
def test_a_collective_that_never_ends_ends_the_process() -> None:
    with lighthouse() as address, running("sticks_in_a_collective", address) as trainer:
        trainer.read_until("training")
        assert trainer.process.wait(DEADLINE_S) == 1
        trainer.check_children()
        log = trainer.errors()
        assert "the watchdog has waited" in log
        assert "for a collective to end" in log
        assert "in sticks_in_a_collective" in log, "where its main thread stands"


def test_what_ends_in_time_is_left_alone() -> None:
    watchdog = Watchdog(DEADLINE_S)  # it would end the tests
    for _ in range(100):
        with watchdog.watching("something quick"):
            pass
    with watchdog.watching("something with more time", 2 * DEADLINE_S):
        pass
    assert watchdog._timer._due == []
    watchdog.close()
    watchdog.close()


def test_who_stood_still_with_the_process_gets_its_time_once_more() -> None:
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    watchdog = Watchdog(0.2, ended.put)
    goes_on = threading.Event()
    with watchdog.watching("something stuck"):
        late_at = time.monotonic() + 0.2 + STANDSTILL_S
        watchdog._timer.call_at(0.0, lambda: goes_on.wait(DEADLINE_S) and None)  # stopped
        eventually(lambda: time.monotonic() > late_at)
        began_at = time.monotonic()
        goes_on.set()
        assert "0.2 s for something stuck" in ended.get(timeout=DEADLINE_S)
        assert time.monotonic() - began_at >= 0.2
    assert watchdog._timer._due == []
    watchdog.close()


def test_nothing_is_watched_unless_it_is_asked_for() -> None:
    watchdog = Watchdog(None)
    with watchdog.watching("anything"):
        assert watchdog._timer._due == []
    watchdog.close()
