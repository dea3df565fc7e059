"""Ends a process if an operation exceeds its deadline by too much."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torchft_svc.client.process.deadlines import Timer
from torchft_svc.client.process.ending import end_now

_JOIN_S = 0.5
# A watchdog that is late by this much was stopped together with the whole process: a batch system
# has suspended it, or the machine slept. Then watched operations get their time again.
STANDSTILL_S = 1.0
_UNWATCHED = contextlib.nullcontext()


class Watchdog:
    """Watches operations that cannot be interrupted, such as calls of a library.

    ``timeout_s``: an operation counts as stuck this long after its deadline (None: nothing is
    watched). Then ``end`` is called with the reason: by default it prints all tracebacks and ends
    the process, so that a launcher can restart it.
    """

    def __init__(self, timeout_s: float | None, end: Callable[[str], None] = end_now) -> None:
        self._timeout_s = timeout_s
        self._end = end
        self._timer = Timer("torchft-watchdog")  # its thread starts with the first operation

    def watching(self, what: str, limit_s: float = 0.0) -> AbstractContextManager[None]:
        """Watch the block, named ``what``, which should end within ``limit_s`` seconds."""
        if self._timeout_s is None:
            return _UNWATCHED
        return self._watch(what, limit_s + self._timeout_s)

    @contextlib.contextmanager
    def _watch(self, what: str, late_s: float) -> Iterator[None]:
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
            is_over = True  # first: `bite` may just have replaced the number
            self._timer.cancel(number)

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._timer.close(_JOIN_S)
