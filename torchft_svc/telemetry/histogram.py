"""A histogram that costs a list's increment for an observation, and needs no library."""

from __future__ import annotations

from bisect import bisect_left

from torchft_svc.telemetry.catalog import DURATION_BUCKETS_S


class DurationHistogram:
    """Counts durations by the bucket that they belong to; for one thread."""

    def __init__(self) -> None:
        self._counts = [0] * (len(DURATION_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(DURATION_BUCKETS_S, duration_s)] += 1
        self.sum_s += duration_s

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many were at most so long, as Prometheus wants them."""
        bounds = [*map(str, DURATION_BUCKETS_S), "+Inf"]
        total, cumulated = 0, []
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            cumulated.append((bound, float(total)))
        return cumulated
