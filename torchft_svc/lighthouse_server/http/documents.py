"""The documents behind the dashboard, of which readers receive the differences.

They hold instants instead of durations, and leave out what is not known: what nobody has touched
stays the same, and is not sent again. Instants are seconds of the clock of the `Clock`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchft_svc.core.launch.launched_run import NodeStatus, RunStatus
from torchft_svc.core.quorum.lighthouse.incidents import Incident
from torchft_svc.core.quorum.lighthouse.overview import GoneGroup, GroupStatus, JobStatus
from torchft_svc.core.quorum.lighthouse.pace import Pace
from torchft_svc.core.quorum.lighthouse.timeline import TimelinePoint
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.lighthouse_server.http.answers import plain
from torchft_svc.lighthouse_server.http.differences import Document

# Where they differ from those of `GROUP_STATES`.
_WORDS = {"left_out": "left out", "in_quorum": "training", "idle": "outside"}


@dataclass(frozen=True, slots=True)
class Clock:
    """Unix seconds that do not jump when somebody sets the clock of this machine."""

    offset_s: float

    @classmethod
    def start(cls) -> Clock:
        """Start a clock that agrees with the machine's now."""
        return cls(time.time() - time.monotonic())

    def now(self) -> float:
        """Return the present instant."""
        return time.monotonic() + self.offset_s


def overview(jobs: Iterable[JobStatus], runs: Iterable[RunStatus], now: float) -> Document:
    """Return what the first page shows: all jobs and all launched runs."""
    return {
        "jobs": {job.job: summary(job, now) for job in jobs},
        "runs": {run.run: run_document(run, now) for run in runs},
    }


def summary(job: JobStatus, now: float) -> Document:
    """Return what is shown of a job before its groups."""
    states = Counter(map(group_state, job.groups))
    known = _known(
        quorum_id=job.quorum_id,
        step=job.committed_step,
        min_replicas=job.min_replicas,
        expected=job.num_expected,
        discarded=job.num_discarded,
        heals=job.num_heals,
        differences=job.num_differences,
        last_difference=job.last_difference,
        why=job.waiting_for,
        moved_at=_instant(now, job.stalled_s),
        ended_at=_instant(now, job.ended_s),
        finished=job.finished,
    )
    return {**known, "groups": len(job.groups), "states": dict(states)}


def job_document(
    job: JobStatus,
    now: float,
    last_point: TimelinePoint | None,
    incidents: Iterable[Incident],
) -> Document:
    """Return what the page of a job shows."""
    names = Counter(stable_name(group.replica_id) for group in job.groups)

    def row_name(replica_id: str) -> str:
        """The group's name, under which its next incarnation takes over the row."""
        name = stable_name(replica_id)
        return name if names[name] < 2 else replica_id

    groups = {row_name(group.replica_id): _group(group, now) for group in job.groups}
    for gone in reversed(job.gone):  # the newest one of a name counts
        if not names[stable_name(gone.replica_id)]:
            groups[row_name(gone.replica_id)] = _gone(gone, now)
    document: Document = {
        "job": job.job,
        "summary": summary(job, now),
        "groups": groups,
        "incidents": {str(each.number): _known(**plain(each)) for each in incidents},
    }
    if job.goodput is not None:
        lost_s = {cause: round(seconds, 1) for cause, seconds in job.goodput.lost_s.items()}
        document["goodput"] = {"ratio": round(job.goodput.ratio, 3), "lost_s": lost_s}
    if last_point is not None:
        document["point"] = _known(**plain(last_point))
    return document


def group_state(group: GroupStatus) -> str:
    """Return the state of a group in the words of the page."""
    return _WORDS.get(group.state, group.state)


def run_document(run: RunStatus, now: float) -> Document:
    """Return what is shown of a launched run."""
    known = _known(
        phase=run.phase,
        round=run.round,
        min_nodes=run.min_nodes,
        max_nodes=run.max_nodes,
        why=run.why,
    )
    return {**known, "nodes": {node.node_id: _node(node, now) for node in run.nodes}}


def _group(group: GroupStatus, now: float) -> Document:
    return _known(
        id=group.replica_id,
        state=group_state(group),
        step=group.step,
        phase=group.phase.value if group.phase else None,
        phase_at=_instant(now, group.phase_s) if group.phase else None,
        # To the second: a beat each second is no news.
        seen_at=round(now - group.silent_s),
        address=group.address,
        asking=group.asking,
        received_bytes=group.received_bytes if group.state_bytes else None,
        state_bytes=group.state_bytes or None,
        slow=group.slow,
        slowest_rank=group.slowest_rank if group.slow else None,
        paces=[_pace(pace) for pace in group.paces] or None,
    )


def _pace(pace: Pace) -> Document:
    # Rounded to what people read: noise is no news.
    return {
        "phase": pace.phase,
        "seconds": float(f"{pace.seconds:.2g}"),
        "to_best": round(pace.to_best, 1),
        "to_own_best": round(pace.to_own_best, 1),
    }


def _gone(gone: GoneGroup, now: float) -> Document:
    return _known(
        id=gone.replica_id,
        state="left" if gone.orderly else "lost",
        gone_at=_instant(now, gone.gone_s),
        reason=gone.reason,
    )


def _node(node: NodeStatus, now: float) -> Document:
    return _known(
        rank=node.node_rank,
        host=node.host,
        workers=node.num_workers,
        state=node.status.value,
        late=node.node_rank is not None and not node.reached,
        restarts=node.num_restarts,
        seen_at=round(now - node.silent_s),
        waits_since=_instant(now, node.waits_for_s),
    )


def _instant(now: float, ago_s: float | None) -> float | None:
    return None if ago_s is None else round(now - ago_s, 1)


def _known(**fields: Any) -> Document:
    """The fields that say something: a reader takes one that is missing for empty, or false."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None and value is not False and value != ""
    }
