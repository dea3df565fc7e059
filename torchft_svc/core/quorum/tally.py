"""What a worker's time was spent on, as its manager and the lighthouse receive it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchft_svc.core.quorum.types import check_count
from torchft_svc.errors import RequestRefused


@dataclass(frozen=True, slots=True)
class Tally:
    """Seconds of a worker's training thread since its first question, up to its last decision.

    ``committed_s`` and ``discarded_s``: of steps with that outcome, without what the thread stood
    still for: ``waiting_s`` for the quorum, or for a group that was lost; ``reconfiguring_s`` while
    the process group was rebuilt; ``healing_s`` while a state was fetched or loaded. ``away_s``: of
    the wait, how long no lighthouse could be reached, as the manager knows.
    """

    committed_s: float = 0.0
    discarded_s: float = 0.0
    waiting_s: float = 0.0
    reconfiguring_s: float = 0.0
    healing_s: float = 0.0
    away_s: float = 0.0
    num_committed: int = 0
    num_discarded: int = 0

    @property
    def total_s(self) -> float:
        """The time that this accounts for."""
        return (
            self.committed_s
            + self.discarded_s
            + self.waiting_s
            + self.reconfiguring_s
            + self.healing_s
        )

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        for field in (
            "committed_s",
            "discarded_s",
            "waiting_s",
            "reconfiguring_s",
            "healing_s",
            "away_s",
        ):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise RequestRefused(f"{field} is {value}, must be 0 or more seconds")
        for field in ("num_committed", "num_discarded"):
            check_count(field, getattr(self, field))


NO_TALLY = Tally()
