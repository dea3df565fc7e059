"""The documents behind the dashboard, of which readers receive the differences.

They hold instants instead of durations, and leave out what is not known: what nobody has touched
stays the same, and is not sent again. Nor does a group change that trains as it should: it is at
the job's step, in phases that are short, and was seen just now. Instants are seconds of the clock
of the `Clock`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchft_svc.core.launch.launched_run import NodeStatus, RunStatus
from torchft_svc.core.quorum.lighthouse.incidents import Incident
from torchft_svc.core.quorum.lighthouse.overview import GoneGroup, GroupStatus, JobStatus
from torchft_svc.core.quorum.lighthouse.pace import RESOLUTION_S, Pace
from torchft_svc.core.quorum.lighthouse.prepared_spares import PreparedSpare
from torchft_svc.core.quorum.lighthouse.timeline import TimelinePoint
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.lighthouse_server.http.answers import fields_of
from torchft_svc.lighthouse_server.http.differences import Document

# Phases and silences that are shorter are no news: groups beat each 2.5 s where a job has 1000.
LASTING_S = 5.0
# The paces of a group are looked at in one of so many updates: they are means over seconds.
PACE_UPDATES = 10
# A pace that differs by less from the one that readers have is noise.
PACE_NOISE = 0.1

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
        spares=len(job.prepared_spares) or None,
        spares_ready=sum(each.asks for each in job.prepared_spares) or None,
        spares_seen_at=_oldest_sign(job, now),
        copies=_copies(job, now),
    )
    return {**known, "groups": len(job.groups), "states": dict(states)}


def _copies(job: JobStatus, now: float) -> Document | None:
    """What holders have of the job's states; None: none has ever reported."""
    at = _instant(now, job.copy_age_s)
    return None if at is None else {"holders": job.num_holders, "step": job.copy_step, "at": at}


def job_document(
    job: JobStatus,
    now: float,
    last_point: TimelinePoint | None,
    incidents: Iterable[Incident],
    paces: Mapping[str, Sequence[Document]],
) -> Document:
    """Return what the page of a job shows; ``paces``: of its groups, by replica id."""
    living: list[GroupStatus | PreparedSpare] = [*job.groups, *job.prepared_spares]
    names = Counter(stable_name(each.replica_id) for each in living)

    def row_name(replica_id: str) -> str:
        """The group's name, under which its next incarnation takes over the row."""
        name = stable_name(replica_id)
        return name if names[name] < 2 else replica_id

    groups = {
        row_name(group.replica_id): {
            **_group(group, job.committed_step, now),
            **_known(paces=paces.get(group.replica_id) or None),
        }
        for group in job.groups
    }
    for gone in reversed(job.gone):  # the newest one of a name counts
        if not names[stable_name(gone.replica_id)]:
            groups[row_name(gone.replica_id)] = _gone(gone, now)
    document: Document = {
        "job": job.job,
        "summary": summary(job, now),
        "groups": groups,
        "incidents": {str(each.number): _incident(each) for each in incidents},
    }
    if job.prepared_spares:
        document["spares"] = {
            row_name(spare.replica_id): _spare(spare, now) for spare in job.prepared_spares
        }
    if job.goodput is not None:
        lost_s = {cause: round(seconds, 1) for cause, seconds in job.goodput.lost_s.items()}
        document["goodput"] = {
            "ratio": round(job.goodput.ratio, 3),
            "committed_s": round(job.goodput.committed_s),
            "lost_s": lost_s,
        }
    if last_point is not None:
        document["point"] = _known(**fields_of(last_point))
    return document


def _incident(incident: Incident) -> Document:
    fields = fields_of(incident)
    return _known(**{**fields, "kind": incident.kind.value, "groups": list(incident.groups)})


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


def _group(group: GroupStatus, committed_step: int, now: float) -> Document:
    state = group.state
    # What such a group last reported of its step is older than what the job has committed since.
    trains = state == "in_quorum" and group.step >= committed_step
    lasts = group.phase is not None and not (trains and group.phase_s < LASTING_S)
    return _known(
        id=group.replica_id,
        state=_WORDS.get(state, state),
        step=None if trains else group.step,
        phase=group.phase.value if group.phase and lasts else None,
        phase_at=_instant(now, group.phase_s) if lasts else None,
        seen_at=round(now - group.silent_s) if group.silent_s >= LASTING_S else None,
        address=group.address,
        asking=group.asking and not trains,
        received_bytes=group.received_bytes if group.state_bytes else None,
        state_bytes=group.state_bytes or None,
        slow=group.slow,
        slowest_rank=group.slowest_rank if group.slow else None,
    )


class ShownPaces:
    """The paces that the readers of a job have of its groups.

    Those of each group are looked at in one of `PACE_UPDATES` updates, in turns, and replaced if
    they are others for people.
    """

    def __init__(self) -> None:
        self._shown: dict[str, list[Document]] = {}
        self._turn = 0

    def update(
        self,
        replica_ids: Sequence[str],
        look: Callable[[Sequence[str]], Mapping[str, Iterable[Pace]]],
    ) -> Mapping[str, Sequence[Document]]:
        """Return the paces of these groups, of some of which ``look`` returns the present ones."""
        self._turn = (self._turn + 1) % PACE_UPDATES
        before = self._shown
        due = [
            each
            for number, each in enumerate(replica_ids)
            if number % PACE_UPDATES == self._turn or each not in before
        ]
        self._shown = {each: before[each] for each in replica_ids if each in before}
        for replica_id, paces in look(due).items():
            found = [_pace(pace) for pace in paces]
            if not _are_close(found, before.get(replica_id, ())):
                self._shown[replica_id] = found
        return self._shown


def _pace(pace: Pace) -> Document:
    # Rounded to what people read.
    return {
        "phase": pace.phase,
        "seconds": float(f"{pace.seconds:.2g}"),
        "to_best": round(pace.to_best, 1),
        "to_own_best": round(pace.to_own_best, 1),
    }


def _are_close(paces: Sequence[Document], others: Sequence[Document]) -> bool:
    return len(paces) == len(others) and all(
        math.isclose(one[name], other[name], rel_tol=PACE_NOISE, abs_tol=abs_tol)
        for one, other in zip(paces, others, strict=True)
        for name, abs_tol in _PACE_RESOLUTION
    )


# Ratios are rounded to 0.1, so those that differ by that may be nearly the same.
_PACE_RESOLUTION = (("seconds", RESOLUTION_S), ("to_best", 0.15), ("to_own_best", 0.15))


def _spare(spare: PreparedSpare, now: float) -> Document:
    return _known(
        id=spare.replica_id,
        state="ready spare" if spare.asks else "starting spare",
        seen_at=round(now - spare.silent_s) if spare.silent_s >= LASTING_S else None,
    )


def _oldest_sign(job: JobStatus, now: float) -> float | None:
    """Return when the spare that is silent for the longest time gave a sign of life, if that
    was long ago."""
    silent_s = max((each.silent_s for each in job.prepared_spares), default=0.0)
    return round(now - silent_s) if silent_s >= LASTING_S else None


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
