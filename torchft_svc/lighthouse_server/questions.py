"""The questions for a quorum that wait for their answers, until when, and who hears what."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchft_svc.core.overview import Pause
from torchft_svc.errors import TorchFTError
from torchft_svc.lighthouse_server.pauses import Pauses
from torchft_svc.rpc.codec import no_quorum_yet

# The encoded quorum, or why there is none.
Outcome = bytes | TorchFTError
Hear = Callable[[Outcome], None]
# Encoded news, so that who waits knows why.
HearWhy = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Question:
    """Somebody in ``job`` waits until ``expires_at`` (monotonic seconds); ``hear`` is told once.

    If that takes long, ``hear_why`` is told before why there is no quorum (None: nobody hears).
    """

    job: str
    timeout_s: float
    expires_at: float
    hear: Hear
    hear_why: HearWhy | None = None


class Questions:
    """Each has a number, its caller's. To be used on one event loop."""

    def __init__(self, why: Callable[[str], Pause]) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, Question] = {}
        self._pauses = Pauses(why, self._tell_why)
        # When to ask for `expired`; may be too early, never too late. A timer for each question
        # would cost as much as its answer, and nearly all are answered.
        self.look_at = math.inf

    def open(self, question: Question) -> int:
        """``question`` waits; the number of its caller."""
        caller = next(self._numbers)
        self._open[caller] = question
        self.look_at = min(self.look_at, question.expires_at)
        self._pauses.began(question.job, caller)
        return caller

    def close(self, caller: int) -> Question | None:
        """It waits no longer; None: it did not."""
        question = self._open.pop(caller, None)
        if question is not None:
            self._pauses.ended(question.job, caller)
        return question

    def close_all(self) -> list[Question]:
        return [question for caller in list(self._open) if (question := self.close(caller))]

    def expired(self, now: float) -> dict[int, Question]:
        """Those whose time is up, by caller; they are still open."""
        if now < self.look_at:
            return {}
        expired, later = {}, math.inf
        for caller, question in self._open.items():
            if question.expires_at <= now:
                expired[caller] = question
            else:
                later = min(later, question.expires_at)
        self.look_at = later
        return expired

    def _tell_why(self, callers: Sequence[int], reason: str) -> None:
        news = no_quorum_yet(reason)
        for caller in callers:
            hear_why = self._open[caller].hear_why
            if hear_why is not None:
                hear_why(news)
