"""Says why a job stands still, in the log and to who waits: for what, and when that changes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torchft_svc.core.overview import Pause

log = logging.getLogger(__name__)

# Groups wait for one another in every step; what lasts longer than this, people want to know.
SAY_AFTER_S = 2.0
# Telling ten thousand groups takes longer than the others may be kept waiting: who is not told in
# one look is told in the next.
MAX_TOLD_PER_LOOK = 1000


@dataclass(slots=True)
class _Pause:
    since: float
    waiting: dict[int, str] = field(default_factory=dict)  # callers, and the reason they were told
    said: str = ""
    timer: asyncio.TimerHandle | None = None


class Pauses:
    """To be used on one event loop.

    ``why(job)`` tells what a job waits for; ``tell(callers, reason)`` lets these callers know.
    """

    def __init__(
        self, why: Callable[[str], Pause], tell: Callable[[Sequence[int], str], None]
    ) -> None:
        self._why = why
        self._tell = tell
        self._pauses: dict[str, _Pause] = {}  # of the jobs in which somebody waits

    def began(self, job: str, caller: int) -> None:
        """``caller`` waits for a quorum of ``job``, too."""
        pause = self._pauses.get(job)
        if pause is None:
            pause = self._pauses[job] = _Pause(time.monotonic())
            self._look_later(job, pause)
        pause.waiting[caller] = ""

    def ended(self, job: str, caller: int) -> None:
        """It does so no longer."""
        pause = self._pauses[job]
        del pause.waiting[caller]
        if not pause.waiting:
            del self._pauses[job]
            if pause.timer is not None:
                pause.timer.cancel()

    def _look_later(self, job: str, pause: _Pause) -> None:
        pause.timer = asyncio.get_running_loop().call_later(SAY_AFTER_S, self._look, job, pause)

    def _look(self, job: str, pause: _Pause) -> None:
        now = time.monotonic()
        why = self._why(job)
        reason = why.sentence(with_durations=False)  # what changes all the time is no other one
        if reason != pause.said:
            log.warning("no quorum job=%s for %.0f s: %s", job, now - pause.since, why.sentence())
            pause.said = reason
        untold = (caller for caller, told in pause.waiting.items() if told != reason)
        callers = list(islice(untold, MAX_TOLD_PER_LOOK))
        pause.waiting.update(dict.fromkeys(callers, reason))
        self._tell(callers, reason)
        self._look_later(job, pause)
