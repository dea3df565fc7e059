"""One timer for the next deadline of a core."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable


class DeadlineTimer:
    """Calls ``tick`` at the earliest instant that it was told; to be used on one event loop."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._timer: asyncio.TimerHandle | None = None
        self._at = math.inf

    def set(self, at: float | None) -> None:
        """Tick ``at`` this instant, or earlier; too early is harmless, too late is not."""
        if at is None or at >= self._at:
            return
        self.stop()
        self._at = at
        delay_s = max(0.0, at - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._elapsed)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._at = None, math.inf

    def _elapsed(self) -> None:
        self._timer, self._at = None, math.inf
        self._tick()
