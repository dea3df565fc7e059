"""What a manager counts for its metrics."""

from __future__ import annotations

from torchft_svc.telemetry.histogram import DurationHistogram


class ManagerCounts:
    """Counts a group's questions to its lighthouse; ``is_connected``: whether one answers."""

    def __init__(self) -> None:
        self.is_connected = False
        self.durations = DurationHistogram()
        self.num_formed = self.num_failed = 0
        self._asked_at: float | None = None

    def record_question(self, now: float) -> None:
        """Record that the group asks; again, while it waits, changes nothing."""
        if self._asked_at is None:
            self._asked_at = now

    def record_outcome(self, now: float, *, is_formed: bool) -> None:
        """Record that the lighthouse has answered, or cannot be asked."""
        if self._asked_at is None:
            return
        self.durations.observe(max(0.0, now - self._asked_at))
        self._asked_at = None
        if is_formed:
            self.num_formed += 1
        else:
            self.num_failed += 1

    def drop_question(self) -> None:
        """Record that nobody waits for an answer any more."""
        self._asked_at = None
