"""Samples the timelines of all jobs while the lighthouse runs."""

from __future__ import annotations

import asyncio
import time

from torchft_svc.core.quorum.lighthouse.overview import JobStatus
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
            jobs = await self._driver.gather_status("", with_paces=False)
            self._record_sample(jobs, time.time())
            await asyncio.sleep(SAMPLE_S)

    def _record_sample(self, jobs: list[JobStatus], at: float) -> None:
        timelines = {job.job: self._by_job.get(job.job) or Timeline() for job in jobs}
        for job in jobs:
            if job.ended_s is None:
                timelines[job.job].record_sample(job, at)
        self._by_job = timelines
