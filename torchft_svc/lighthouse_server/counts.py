"""What a lighthouse counts of its orders, for its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torchft_svc.core.launch.launched_run import Cause, ReportRunClosed, ReportWorld
from torchft_svc.core.launch.launched_run import Report as RunReport
from torchft_svc.core.quorum.lighthouse.incidents import Incident, IncidentKind
from torchft_svc.core.quorum.lighthouse.jobs import (
    ReportEviction,
    ReportLeftHealing,
    ReportLoss,
    ReportStraggler,
)
from torchft_svc.core.quorum.lighthouse.lighthouse import Publish, Report
from torchft_svc.telemetry.histogram import DurationHistogram

# If several groups have come and gone between two quorums, the first of these counts.
REASONS = ("lost", "evicted", "left_out", "left", "joined")
# A quorum of the same groups, which have to connect again; and the first one of a job that this
# lighthouse publishes.
AGAIN, FIRST = "connected_again", "first"
_CAUSES = {Cause.START: "started", Cause.LOSS: "node_lost", Cause.JOIN: "node_joined"}


@dataclass(slots=True)
class JobCounts:
    """What is counted of one job. ``missing``: why groups are gone since the last quorum."""

    quorum_id: int = 0
    members: frozenset[str] = frozenset()
    missing: dict[str, str] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    durations: DurationHistogram = field(default_factory=DurationHistogram)


class IncidentCounts:
    """Adds up the records of one job's ledger, each as it is now and once.

    A record grows while it is open, and the ledger keeps the last thousand: what is added up here
    stays.
    """

    def __init__(self) -> None:
        self.discarded: Counter[str] = Counter()  # steps, by the kind of the record
        self.heals: Counter[str] = Counter()  # by the outcome
        self.healed_bytes = 0
        self._open: dict[int, Incident] = {}
        self._seen = 0

    @property
    def after(self) -> int:
        """The number above which records may be new, or have changed."""
        return min((each - 1 for each in self._open), default=self._seen)

    def add(self, incidents: Iterable[Incident]) -> None:
        """Add records with numbers above `after`, the oldest first."""
        before, self._open = self._open, {}
        for incident in incidents:
            old = before.get(incident.number)
            if old is None and incident.number <= self._seen:
                continue
            self._add_growth(incident, old)
            self._seen = max(self._seen, incident.number)
            if incident.is_open:
                self._open[incident.number] = incident

    def _add_growth(self, incident: Incident, old: Incident | None) -> None:
        discarded = incident.steps_discarded - (old.steps_discarded if old else 0)
        if discarded > 0:
            self.discarded[incident.kind.value] += discarded
        if incident.healed_s is not None and (old is None or old.healed_s is None):
            self.heals["healed"] += 1
        if incident.kind is IncidentKind.HEAL_FAILED and old is None:
            self.heals["failed"] += 1
        self.healed_bytes += max(
            0, (incident.healed_bytes or 0) - ((old.healed_bytes or 0) if old else 0)
        )


class Counts:
    """Counters of the last ``max_names`` jobs, and of as many launched runs; for one event loop.

    ``on_change`` is called with each quorum that has another id, with the reason, and how long
    groups have waited for it.

    A sign of life costs nothing, a quorum with an earlier one's id O(1).
    """

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self.on_change: Callable[[Publish, str, float], None] = lambda *_: None
        self.jobs: dict[str, JobCounts] = {}
        self.runs: dict[str, Counter[str]] = {}

    def record_quorum(self, order: Publish, waited_s: float) -> None:
        """Count a quorum for which groups have waited for ``waited_s``."""
        job = self._job(order.job)
        job.durations.observe(waited_s)
        quorum = order.quorum
        if quorum.quorum_id == job.quorum_id:
            return
        members = frozenset(member.replica_id for member in quorum.participants)
        reason = _reason(job, members)
        job.changes[reason] += 1
        self.on_change(order, reason, waited_s)
        job.quorum_id, job.members = quorum.quorum_id, members
        job.missing.clear()

    def record_report(self, report: Report) -> None:
        """Remember why a group will be missing in the next quorum."""
        if isinstance(report, ReportLoss):
            reason = "left" if report.is_orderly else "lost"
        elif isinstance(report, ReportEviction):
            reason = "evicted"
        elif isinstance(report, ReportStraggler | ReportLeftHealing):
            reason = "left_out"
        else:
            return
        job = self.jobs.get(report.job)
        if job is not None and report.replica_id in job.members:
            job.missing[report.replica_id] = reason

    def record_run_report(self, report: RunReport) -> None:
        """Count another world of a launched run; forget a run that is over."""
        if isinstance(report, ReportWorld):
            causes = self.runs.get(report.run)
            if causes is None:  # its first world, as far as this lighthouse knows
                self.runs[report.run] = Counter()
                _drop_oldest(self.runs, self._max_names)
            else:
                causes[_CAUSES[report.cause]] += 1
        elif isinstance(report, ReportRunClosed):
            self.runs.pop(report.run, None)

    def forget(self) -> None:
        """Forget everything, because another lighthouse leads."""
        self.jobs.clear()
        self.runs.clear()

    def _job(self, name: str) -> JobCounts:
        job = self.jobs.get(name)
        if job is None:
            job = self.jobs[name] = JobCounts()
            _drop_oldest(self.jobs, self._max_names)
        return job


def _reason(job: JobCounts, members: frozenset[str]) -> str:
    if not job.members:
        return FIRST
    found = {job.missing.get(each, "lost") for each in job.members - members}
    if members - job.members:
        found.add("joined")
    return next((reason for reason in REASONS if reason in found), AGAIN)


def _drop_oldest(counts: dict[str, JobCounts] | dict[str, Counter[str]], limit: int) -> None:
    while len(counts) > limit:
        del counts[next(iter(counts))]
