"""Asks a lighthouse again and again on a thread, so that the screen never waits for an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import click

from torchft_svc.core.launch.launched_run import RunStatus
from torchft_svc.core.quorum.lighthouse.incidents import Incident
from torchft_svc.core.quorum.lighthouse.overview import JobStatus

# Steps are counted over this time, so that the rate does not jump with each answer.
RATE_OVER_S = 10.0
# More than a screen shows of one job.
MAX_INCIDENTS_KEPT = 10
# The thread is in a call for at most the timeout of an operator's question, for each address.
_JOIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a lighthouse reports at one moment.

    ``incidents``: the last ones of some jobs, by the name of the job, the oldest first; a job
    whose records were not asked for, or that has none, is absent.
    """

    jobs: tuple[JobStatus, ...] = ()
    runs: tuple[RunStatus, ...] = ()
    incidents: dict[str, tuple[Incident, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is known: the last answer, and since when there is none (``error``: why).

    Instants are of the monotonic clock; ``answered_at``: None before the first answer.
    ``steps_per_s``: of each job, over the last seconds.
    """

    answer: Answer = Answer()
    answered_at: float | None = None
    error: str = ""
    failing_since: float | None = None
    steps_per_s: dict[str, float] = field(default_factory=dict)


def sort_jobs(jobs: Iterable[JobStatus]) -> list[JobStatus]:
    """Sort jobs for people: first those that wait, last those that have ended."""
    return sorted(jobs, key=lambda job: (job.ended_s is not None, not job.waiting_for, job.job))


class RecentIncidents:
    """Asks for the last records of a job, and only once for those before them.

    ``ask`` receives the job and a number, and returns the records with higher numbers. Records that
    are under way change: the last ones are asked for again each time.
    """

    def __init__(self, ask: Callable[[str, int], Sequence[Incident]]) -> None:
        self._ask = ask
        self._after: dict[str, int] = {}

    def list_last(self, job: str) -> tuple[Incident, ...]:
        """Return the last records of ``job``, the oldest first."""
        records = tuple(self._ask(job, self._after.get(job, 0)))[-MAX_INCIDENTS_KEPT:]
        if len(records) == MAX_INCIDENTS_KEPT:
            self._after[job] = records[0].number - 1
        return records


class StatusFeed:
    """Keeps a `View` up to date while its block runs.

    ``ask`` receives the name of the job that is shown in full (empty: the first one), and returns
    an answer or raises `click.ClickException`; ``wake`` is called after each.
    """

    def __init__(
        self, ask: Callable[[str], Answer], every_s: float, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._ask, self._every_s, self._wake = ask, every_s, wake
        self._stop = threading.Event()
        self._steps: dict[str, list[tuple[float, int]]] = {}
        self.view = View()
        self.chosen_job = ""
        self._thread = threading.Thread(target=self._run, name="lighthouse-top", daemon=True)

    def __enter__(self) -> StatusFeed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            self.ask_once()
            self._wake()
            if self._stop.wait(self._every_s):
                return

    def ask_once(self) -> None:
        """Ask now, and keep the answer, or why there is none."""
        try:
            answer = self._ask(self.chosen_job)
        except click.ClickException as error:
            now = time.monotonic()
            since = now if self.view.failing_since is None else self.view.failing_since
            self.view = replace(self.view, error=error.format_message(), failing_since=since)
            return
        now = time.monotonic()
        rates = self._count_steps(answer.jobs, now)
        self.view = View(answer=answer, answered_at=now, steps_per_s=rates)

    def _count_steps(self, jobs: tuple[JobStatus, ...], now: float) -> dict[str, float]:
        rates = {}
        self._steps = {job.job: self._steps.get(job.job, []) for job in jobs}
        for job in jobs:
            # In a quorum that stays in force only the groups show how far they are.
            step = max([job.committed_step, *(group.step for group in job.groups)])
            points = self._steps[job.job]
            if points and step < points[-1][1]:
                points.clear()  # it went back, or another run has its name
            points.append((now, step))
            while len(points) > 2 and points[1][0] < now - RATE_OVER_S:
                del points[0]
            (first_at, first), (last_at, last) = points[0], points[-1]
            if last_at > first_at:
                rates[job.job] = (last - first) / (last_at - first_at)
        return rates
