"""Ends a process in which something does not end that has a deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from torchft_svc.client.process.deadlines import Timer
from torchft_svc.client.process.ending import end_now

_JOIN_S = 0.5
# A watchdog that is late by so much was stopped itself, with the whole process: a batch system has
# suspended it, or its machine slept. What it watches gets its time once more.
STANDSTILL_S = 1.0


class Watchdog:
    """For what cannot be interrupted from outside, such as a library that is stuck.

    ``timeout_s``: so long after its deadline it counts as stuck (None: nothing is watched). The
    process then says where every thread stands and ends, so that a launcher can start it again;
    ``end`` is told why, and does that.
    """

    def __init__(self, timeout_s: float | None, end: Callable[[str], None] = end_now) -> None:
        self._timeout_s = timeout_s
        self._end = end
        self._timer = Timer("torchft-watchdog")  # its thread starts with the first thing watched

    @contextlib.contextmanager
    def watching(self, what: str, limit_s: float = 0.0) -> Iterator[None]:
        """The block, which is ``what``, should end by itself within ``limit_s`` seconds."""
        if self._timeout_s is None:
            yield
            return
        late_s = limit_s + self._timeout_s
        due_at = time.monotonic() + late_s
        number, is_over = 0, False

        def bite() -> None:
            nonlocal due_at, number
            now = time.monotonic()
            if is_over:
                return
            if now > due_at + STANDSTILL_S:
                due_at = now + late_s
                number = self._timer.call_at(due_at, bite)
            else:
                self._end(f"the watchdog has waited {late_s:g} s for {what}")

        number = self._timer.call_at(due_at, bite)
        try:
            yield
        finally:
            is_over = True  # first: this number may just have become an old one
            self._timer.cancel(number)

    def close(self) -> None:
        """Watch no more; may be called twice."""
        self._timer.close(_JOIN_S)
