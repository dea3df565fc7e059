"""Decides when what the learners have delivered is merged: `MergeRule`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchft_svc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """What one learner reports of the fragment that is merged next.

    ``tokens``: how many its delivery stands for; 0: it has delivered none. ``waiting_s``: the time
    since its delivery. ``pace_s``: the time from one of its deliveries to the next; 0: unknown.
    """

    tokens: float
    waiting_s: float
    pace_s: float


@dataclass(frozen=True, slots=True)
class MergeRule:
    """The moment at which a fragment is merged: all living learners have delivered it, or a grace
    window is over since ``min_replicas`` of them have.

    The window is ``grace`` times the usual pace of the learners, so it adapts when they become
    faster or slower. Learners that deliver later are in the next merge.
    """

    min_replicas: int
    grace: float

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise ConfigError("min_replicas", self.min_replicas, "use 1 or more")
        if not 0.0 <= self.grace < float("inf"):
            raise ConfigError("grace", self.grace, "use a number of 0 or more")

    def is_due(self, reports: Sequence[LearnerReport]) -> bool:
        """Whether the fragment is merged now; ``reports`` are those of all living learners."""
        waiting = sorted((each.waiting_s for each in reports if each.tokens > 0), reverse=True)
        if not waiting:
            return False
        if len(waiting) == len(reports):
            return True
        if len(waiting) < self.min_replicas:
            return False
        return waiting[self.min_replicas - 1] >= self.grace * usual_pace_s(reports)


def usual_pace_s(reports: Sequence[LearnerReport]) -> float:
    """The lower median of the paces that are known; 0: none is.

    One learner that is much slower than the others does not change it.
    """
    known = sorted(each.pace_s for each in reports if each.pace_s > 0)
    return known[(len(known) - 1) // 2] if known else 0.0
