"""What a job did in the last hour: samples of it, a few seconds apart."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from torchft_svc.core.quorum.lighthouse.overview import JobSample

SAMPLE_S = 5.0
# An hour. A point has 48 bytes, so a thousand jobs have 35 MB.
MAX_POINTS = 720


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """A job at ``at`` (unix seconds), and what it did since the point before.

    ``steps_per_s`` is 0 at the first point, and where the job has gone back. ``goodput``: the share
    of the time since then that ended in committed steps (None: not known).
    """

    at: float
    committed_step: int
    steps_per_s: float
    num_groups: int
    num_in_quorum: int
    num_heals: int
    num_discarded: int
    goodput: float | None


class Timeline:
    """The points of one job; each field is kept in an array of its own."""

    def __init__(self) -> None:
        self._at = array("d")
        self._wall_s = array("d")
        self._committed_s = array("d")
        self._steps = array("q")
        self._counts = tuple(array("i") for _ in range(4))

    def record_sample(self, sample: JobSample, at: float) -> None:
        """Record what the job was ``at`` that instant."""
        self._at.append(at)
        self._wall_s.append(sample.goodput.wall_s)
        self._committed_s.append(sample.goodput.committed_s)
        self._steps.append(sample.committed_step)
        counted = (
            sample.num_groups,
            sample.num_in_quorum,
            sample.num_heals,
            sample.num_discarded,
        )
        for column, count in zip(self._counts, counted, strict=True):
            column.append(count)
        if len(self._at) > MAX_POINTS:
            columns: tuple[array[Any], ...]
            columns = (self._at, self._wall_s, self._committed_s, self._steps, *self._counts)
            for each in columns:
                del each[0]

    def points(self) -> tuple[TimelinePoint, ...]:
        """All points, the oldest first."""
        return tuple(map(self._point, range(len(self._at))))

    def last_point(self) -> TimelinePoint | None:
        """The newest point (None: there is none yet)."""
        return self._point(len(self._at) - 1) if self._at else None

    def _point(self, index: int) -> TimelinePoint:
        before = max(index - 1, 0)
        passed_s = self._at[index] - self._at[before]
        num_steps = max(0, self._steps[index] - self._steps[before])
        wall_s = self._wall_s[index] - self._wall_s[before]
        committed_s = self._committed_s[index] - self._committed_s[before]
        num_groups, num_in_quorum, num_heals, num_discarded = (
            column[index] for column in self._counts
        )
        return TimelinePoint(
            at=self._at[index],
            committed_step=self._steps[index],
            steps_per_s=num_steps / passed_s if passed_s > 0 else 0.0,
            num_groups=num_groups,
            num_in_quorum=num_in_quorum,
            num_heals=num_heals,
            num_discarded=num_discarded,
            goodput=min(1.0, max(0.0, committed_s / wall_s)) if wall_s > 0 else None,
        )
