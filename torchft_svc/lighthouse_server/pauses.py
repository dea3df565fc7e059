"""Says in the log why a job stands still: what its groups wait for, and when that changes."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

# Groups wait for one another in every step; what lasts longer than this, people want to know.
SAY_AFTER_S = 2.0
# What changes all the time is no other reason.
_FOR_HOW_LONG = re.compile(r" since \d+ s\b")


@dataclass(slots=True)
class _Pause:
    since: float
    num_waiting: int = 0
    said: str = ""
    timer: asyncio.TimerHandle | None = None


class Pauses:
    """To be used on one event loop; ``why(job)`` tells what a job waits for."""

    def __init__(self, why: Callable[[str], str]) -> None:
        self._why = why
        self._pauses: dict[str, _Pause] = {}  # of the jobs in which somebody waits

    def began(self, job: str) -> None:
        """One more waits for a quorum of ``job``."""
        pause = self._pauses.get(job)
        if pause is None:
            pause = self._pauses[job] = _Pause(time.monotonic())
            self._look_later(job, pause)
        pause.num_waiting += 1

    def ended(self, job: str) -> None:
        """One that waited does so no longer."""
        pause = self._pauses[job]
        pause.num_waiting -= 1
        if pause.num_waiting == 0:
            del self._pauses[job]
            if pause.timer is not None:
                pause.timer.cancel()

    def _look_later(self, job: str, pause: _Pause) -> None:
        pause.timer = asyncio.get_running_loop().call_later(SAY_AFTER_S, self._look, job, pause)

    def _look(self, job: str, pause: _Pause) -> None:
        now = time.monotonic()
        why = self._why(job)
        reason = _FOR_HOW_LONG.sub("", why)
        if reason != pause.said:
            log.warning("no quorum job=%s for %.0f s: %s", job, now - pause.since, why)
            pause.said = reason
        self._look_later(job, pause)
