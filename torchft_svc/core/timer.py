"""The one timer of a driver: it calls the driver at the latest when the core has a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol


class _Handle(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], _Handle]


class DeadlineTimer:
    """``call_later`` arranges a call after some seconds. ``act`` may be called too early, because
    a deadline that is over or was put off leaves the timer as it is."""

    def __init__(self, call_later: CallLater, act: Callable[[], object]) -> None:
        self._call_later = call_later
        self._act = act
        self._handle: _Handle | None = None
        self._at = math.inf

    def set(self, deadline: float | None, now: float) -> None:
        """Let `act` be called by ``deadline`` (None, infinite: there is none)."""
        if deadline is None or deadline >= self._at:
            return
        self.stop()
        self._at = deadline
        self._handle = self._call_later(max(0.0, deadline - now), self._fire)

    def stop(self) -> None:
        """Stop the timer, until the next deadline is set."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._at = None, math.inf

    def _fire(self) -> None:
        self._handle, self._at = None, math.inf
        self._act()
