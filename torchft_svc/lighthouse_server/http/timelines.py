"""Samples the timelines of all jobs while the lighthouse runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from torchft_svc.core.quorum.lighthouse.overview import JobSample
from torchft_svc.core.quorum.lighthouse.timeline import SAMPLE_S, Timeline, TimelinePoint
from torchft_svc.lighthouse_server.driver import LighthouseDriver


class Timelines:
    """The timelines of the jobs that the lighthouse still shows."""

    def __init__(self, driver: LighthouseDriver) -> None:
        self._driver = driver
        self._by_job: dict[str, Timeline] = {}

    def points(self, job: str) -> tuple[TimelinePoint, ...]:
        """The points of ``job``, the oldest first; none for a job that has just begun."""
        timeline = self._by_job.get(job)
        return timeline.points() if timeline else ()

    def last_point(self, job: str) -> TimelinePoint | None:
        """The newest point of ``job`` (None: there is none yet)."""
        timeline = self._by_job.get(job)
        return timeline.last_point() if timeline else None

    async def sample_forever(self) -> None:
        """Record a point of each job every `SAMPLE_S` seconds."""
        while True:
            self._record_samples(await self._driver.gather_samples(), time.time())
            await asyncio.sleep(SAMPLE_S)

    def _record_samples(self, samples: Mapping[str, JobSample | None], at: float) -> None:
        self._by_job = {job: self._by_job.get(job) or Timeline() for job in samples}
        for job, sample in samples.items():
            if sample is not None:
                self._by_job[job].record_sample(sample, at)
