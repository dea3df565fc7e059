"""Chooses the steps whose states are copied, so that all workers' copies are of the same ones.

Each worker's copies are fetched by a thread of its own, perhaps in another process. If each of them
took whatever is offered when it is free, they would hold different steps, and no state as a whole.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# A step is chosen so long before the job reaches it: others learn of the job's step a second late.
LEAD_S = 2.0
# How long a copy is kept for those of the other workers, and as many times as it took to fetch it.
PATIENCE_S, PATIENCE_SHARE = 5.0, 4.0
# The rate of the job's steps is that of the last seconds.
_WINDOW_S = 10.0


class StepRate:
    """How many steps a second the job makes, by what was reported of it."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def record_step(self, step: int, now: float) -> None:
        """Record that the job was at ``step``."""
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()  # another run
        self._seen.append((now, step))
        while now - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()

    def per_second(self) -> float:
        """Return the mean rate of the last seconds (0: not known)."""
        if len(self._seen) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0


@dataclass(slots=True)
class CopiedSteps:
    """Which steps of one worker are copied; ``fetched_in_s``: how long the last copy took."""

    fetched_in_s: float = 0.0
    _late: int = 0  # how many steps after the chosen one a state was offered, at most

    def step_to_wait_above(self, held: int, job_step: int, per_second: float) -> int:
        """Return the step above which the next copy is asked for.

        It is the last one before a multiple of a power of two. The power is so high that a copy is
        offered, fetched, and waited for, between two of them. A worker whose copies take longer has
        a higher one, and so a part of the others' multiples.
        """
        between_s = LEAD_S + self.fetched_in_s + self.patience_s()
        spacing = 1
        while spacing < per_second * between_s + self._late:
            spacing *= 2
        earliest = job_step + 1 + int(per_second * LEAD_S)
        return max(held, -(-earliest // spacing) * spacing - 1)

    def record_copy(self, step: int, above: int, fetched_in_s: float) -> None:
        """Record that a copy of ``step`` was the first one above ``above``."""
        self.fetched_in_s = fetched_in_s
        self._late = max(self._late, step - above - 1)

    def patience_s(self) -> float:
        """Return how long a copy is kept for those of the other workers before it is given up."""
        return PATIENCE_S + PATIENCE_SHARE * self.fetched_in_s
