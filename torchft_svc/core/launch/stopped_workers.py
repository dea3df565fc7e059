"""Decides which workers have been stopped for too long, as by SIGSTOP."""

from __future__ import annotations

import math
from collections.abc import Collection

from torchft_svc.core.pausable_clock import PausableClock
from torchft_svc.errors import ConfigError

# How often to look: often enough for the shortest timeout, and at no cost.
LOOKS_PER_TIMEOUT = 8
MAX_LOOK_S = 1.0


class StoppedWorkers:
    """How long each worker has been stopped, on a clock that stops with the agent.

    An agent that was stopped together with its workers sees them continue, and ends nobody.

    Args:
        timeout_s: seconds until a stopped worker has failed; 0: it never has.
        now: the current time, in monotonic seconds.
    """

    def __init__(self, timeout_s: float, now: float) -> None:
        if not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise ConfigError("stopped_timeout_s", timeout_s, "use a finite number, 0 or more")
        self.timeout_s = timeout_s
        self._look_s = min(timeout_s / LOOKS_PER_TIMEOUT, MAX_LOOK_S)
        self._clock = PausableClock(self._look_s, now)
        self._look_at = now + self._look_s if timeout_s else math.inf
        self._since: dict[int, float] = {}

    @property
    def look_at(self) -> float:
        """The time to call `overdue` next, in monotonic seconds."""
        return self._look_at

    def overdue(self, stopped: Collection[int], now: float) -> list[int]:
        """Which of the processes that are ``stopped`` now have been for too long."""
        at = self._clock.now(now)
        self._look_at = now + self._look_s
        self._since = {pid: self._since.get(pid, at) for pid in stopped}
        return sorted(pid for pid in stopped if at - self._since[pid] >= self.timeout_s)
