"""Shows the status of jobs: as a table for people, as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Sequence

from torchft_svc.core.launch.launched_run import NodeStatus, RunStatus
from torchft_svc.core.quorum.lighthouse.incidents import Goodput, Incident
from torchft_svc.core.quorum.lighthouse.overview import GroupStatus, JobStatus, name_some
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.host.log_format import escaped
from torchft_svc.host.quantities import show_bytes

# A screen full; the groups that somebody may have to look after come first.
MAX_ROWS = 40
MAX_GONE_ROWS = 5

_NODE_HEAD = ("NODE", "RANK", "WORKERS", "STATE", "WAITS", "RESTARTS", "SILENT", "HOST")
GROUP_HEAD = (
    "GROUP",
    "STEP",
    "STATE",
    "PHASE",
    "FOR",
    "SILENT",
    "OWN WORK",
    "x BEST",
    "x OWN",
    "MANAGER",
)


def status_text(
    jobs: Sequence[JobStatus], runs: Sequence[RunStatus] = (), *, show_all: bool = False
) -> str:
    """A few lines about each job, and a table of its groups; the same for launched runs."""
    if not jobs and not runs:
        return "no job has a living group"
    blocks = [_job(job, show_all) for job in jobs] + [_run(run, show_all) for run in runs]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def status_json(jobs: Iterable[JobStatus], runs: Iterable[RunStatus] = ()) -> str:
    """A list of objects with the fields of `JobStatus`, and of `RunStatus`."""
    shown = [*map(dataclasses.asdict, jobs), *map(dataclasses.asdict, runs)]
    return json.dumps(shown, indent=2, default=_phase_name)


def incidents_text(job: str, incidents: Sequence[Incident], goodput: Goodput | None) -> str:
    """The goodput of a job, and a table of its records, the newest last."""
    lines = [f"job {job}: {len(incidents)} incidents"]
    if goodput is not None:
        lines.append(f"  {goodput_line(goodput)}")
    if incidents:
        lines += _table([_INCIDENT_HEAD, *map(_incident_row, incidents)])
        lines.append(
            "  seconds; * is still under way. COMMIT: until the first committed step after it"
        )
    return "\n".join(lines)


def incidents_json(job: str, incidents: Iterable[Incident], goodput: Goodput | None) -> str:
    """An object with the records of a job, and its goodput."""
    shown = {
        "job": job,
        "incidents": [each.as_dict() for each in incidents],
        "goodput": None if goodput is None else goodput.as_dict(),
    }
    return json.dumps(shown, indent=2)


def goodput_line(goodput: Goodput) -> str:
    """How much of the time ended in committed steps, and what the rest was lost to."""
    lost = sorted(goodput.lost_s.items(), key=lambda each: -each[1])
    shown = [f"{_seconds(seconds)} s {cause}" for cause, seconds in lost if seconds >= 0.05]
    rest = f"; lost: {', '.join(shown)}" if shown else ""
    return f"goodput {100 * goodput.ratio:.1f} % of {goodput.wall_s:.0f} s{rest}"


_INCIDENT_HEAD = (
    *("AT", "KIND", "GROUPS", "STEP", "DETECTED", "DECIDED", "PAUSED", "REBUILT", "HEALED"),
    *("COMMIT", "DISCARDED", "CAUSE"),
)


def _incident_row(incident: Incident) -> tuple[str, ...]:
    healed = _seconds(incident.healed_s)
    if incident.healed_bytes:
        healed += f" ({show_bytes(incident.healed_bytes)})"
    return (
        time.strftime("%m-%d %H:%M:%S", time.localtime(incident.at)),
        incident.kind.value + "*" * incident.is_open,
        name_some(map(stable_name, incident.groups)) or "-",
        str(incident.step),
        _seconds(incident.detected_after_s),
        _seconds(incident.decided_after_s),
        _seconds(incident.paused_s),
        _seconds(incident.reconfigured_s),
        healed,
        _seconds(incident.first_commit_after_s),
        str(incident.steps_discarded or "-"),
        escaped(incident.cause),
    )


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def _phase_name(phase: object) -> str:
    return str(getattr(phase, "value", phase))


def _job(job: JobStatus, show_all: bool) -> Iterator[str]:
    if job.ended_s is not None:
        # Its last quorum shows what was committed before it: the step that followed was the last.
        how, step = "finished" if job.finished else "ended unfinished", job.committed_step + 1
        yield f"job {job.job}: {how} {job.ended_s:.0f} s ago, in step {step}"
        if job.goodput is not None:
            yield f"  {goodput_line(job.goodput)}"
        yield from _copies(job)
        yield from _differences(job)
        yield from _prepared_spares(job)
        yield from _gone(job, show_all)
        return
    num_asking = sum(group.asking for group in job.groups)
    num_hung = sum(group.hung for group in job.groups)
    num_in_quorum = sum(group.in_quorum for group in job.groups)
    quorum = f"quorum {job.quorum_id}" if job.quorum_id else "no quorum yet"
    yield f"job {job.job}: {quorum}, committed step {job.committed_step}"
    yield (
        f"  {len(job.groups)} groups: {num_in_quorum} in the quorum, {num_asking} asking, "
        f"{num_hung} hung; at least {job.min_replicas} train, {job.num_expected} are expected"
    )
    yield (
        f"  since the job began: {job.num_heals} heals, {job.num_discarded} steps discarded; "
        f"its step last rose {job.stalled_s:.0f} s ago"
    )
    if job.goodput is not None:
        yield f"  {goodput_line(job.goodput)}"
    yield from _copies(job)
    yield from _differences(job)
    yield from _prepared_spares(job)
    if job.waiting_for:
        yield f"  no quorum now: {job.waiting_for}"
    groups = sorted(job.groups, key=_urgency)
    shown = groups if show_all else groups[:MAX_ROWS]
    yield from _table([GROUP_HEAD, *map(_row, shown)])
    if len(shown) < len(groups):
        yield f"  and {len(groups) - len(shown)} more (--all shows them)"
    yield from (f"  {slow_line(group)}" for group in shown if group.slow)
    yield from _gone(job, show_all)


def slow_line(group: GroupStatus) -> str:
    """Describe the phases of a slow group's step, each compared with the best ones."""
    phases = (
        f"{pace.phase} {pace.seconds:.3f} s ({pace.to_best:.1f} x best, "
        f"{pace.to_own_best:.1f} x own)"
        for pace in group.paces[1:]
    )
    return (
        f"slow: {stable_name(group.replica_id)}, group rank {group.slowest_rank}: "
        f"{', '.join(phases)}"
    )


def pace_cells(group: GroupStatus) -> tuple[str, str, str]:
    """Describe the own work of a group in a step, and how it compares."""
    if not group.paces:
        return "-", "-", "-"
    step = group.paces[0]
    return f"{step.seconds:.3f} s", f"{step.to_best:.2f}", f"{step.to_own_best:.2f}"


def _copies(job: JobStatus) -> Iterator[str]:
    line = copies_line(job)
    if line:
        yield f"  {line}"


def copies_line(job: JobStatus) -> str:
    """Describe how far the copies of a job's state are behind it (empty: nobody holds any)."""
    if job.copy_age_s is None:
        return ""
    if not job.num_holders:
        return "no process holds copies of the state any more"
    is_one = job.num_holders == 1
    holders = f"{job.num_holders} process{'' if is_one else 'es'}"
    holds = "holds" if is_one else "hold"
    if not job.copy_step:
        return f"{holders} for copies of the state {holds} none as a whole yet"
    behind = max(0, job.committed_step - job.copy_step)
    steps = f"{behind} step{'s' * (behind != 1)}"
    return f"{holders} {holds} copies of the state of step {job.copy_step}, {steps} back"


def _differences(job: JobStatus) -> Iterator[str]:
    if job.num_differences:
        checks = f"{job.num_differences} check{'s' * (job.num_differences != 1)}"
        yield f"  {checks} found states that differ; the last one: {job.last_difference}"


def spares_line(job: JobStatus) -> str:
    """Describe the prepared spares of a job: how many could take a place now, and their age."""
    spares = job.prepared_spares
    names = [
        f"{each.replica_id} ({'starting, ' * (not each.asks)}last sign {each.silent_s:.1f} s ago)"
        for each in spares
    ]
    stand = "spare stands" if len(spares) == 1 else "spares stand"
    num_ready = sum(each.asks for each in spares)
    places = f"{job.num_places} place{'s' * (job.num_places != 1)}"
    return f"{len(spares)} {stand} by for {places}, {num_ready} ready: {name_some(names)}"


def _prepared_spares(job: JobStatus) -> Iterator[str]:
    if job.prepared_spares:
        yield f"  {spares_line(job)}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  " + "  ".join(cells).rstrip()


def _run(run: RunStatus, show_all: bool) -> Iterator[str]:
    members = [node for node in run.nodes if node.node_rank is not None]
    num_workers = sum(node.num_workers for node in members)
    world = f"round {run.round}" if run.round else "no world yet"
    yield f"run {run.run}: {run.phase}, {world}"
    yield (
        f"  {len(run.nodes)} nodes: {len(members)} in the world with {num_workers} workers, "
        f"{len(run.nodes) - len(members)} outside; {run.min_nodes} to {run.max_nodes} work together"
    )
    if run.why:
        yield f"  {run.why}"
    nodes = sorted(run.nodes, key=_node_urgency)
    shown = nodes if show_all else nodes[:MAX_ROWS]
    if shown:
        yield from _table([_NODE_HEAD, *map(_node_row, shown)])
    if len(shown) < len(nodes):
        yield f"  and {len(nodes) - len(shown)} more (--all shows them)"


def _node_urgency(node: NodeStatus) -> tuple[bool, int]:
    return node.node_rank is not None, node.node_rank or 0


def _node_row(node: NodeStatus) -> tuple[str, ...]:
    late = node.node_rank is not None and not node.reached
    return (
        node.node_id,
        "-" if node.node_rank is None else str(node.node_rank),
        str(node.num_workers),
        f"{node.status.value}{', world not reached' if late else ''}",
        "-" if node.waits_for_s is None else f"{node.waits_for_s:.1f} s",
        str(node.num_restarts),
        f"{node.silent_s:.1f} s",
        node.host,
    )


def _gone(job: JobStatus, show_all: bool) -> Iterator[str]:
    """The groups that ended last and are not back."""
    living = {stable_name(group.replica_id) for group in job.groups}
    gone = [group for group in job.gone if stable_name(group.replica_id) not in living]
    for group in gone if show_all else gone[:MAX_GONE_ROWS]:
        how = "left" if group.orderly else "lost"
        reason = f": {escaped(group.reason)}" if group.reason else ""
        yield f"  {how} {group.gone_s:.0f} s ago: {group.replica_id}{reason}"


def _urgency(group: GroupStatus) -> tuple[bool, bool, bool, str]:
    return not group.hung, not group.slow, group.in_quorum, group.replica_id


def phase_cell(group: GroupStatus) -> str:
    """What a group does, and how far its heal is."""
    if group.phase is None:
        return "-"
    if not group.state_bytes:
        return group.phase.value
    share = group.received_bytes / group.state_bytes
    return f"{group.phase.value} {share:.0%} of {show_bytes(group.state_bytes)}"


def _row(group: GroupStatus) -> tuple[str, ...]:
    states = {
        "HUNG": group.hung,
        "left out": group.left_out,
        "SLOW": group.slow,
        "in quorum": group.in_quorum,
        "asking": group.asking,
    }
    return (
        group.replica_id,
        str(group.step),
        ", ".join(name for name, holds in states.items() if holds) or "outside",
        phase_cell(group),
        f"{group.phase_s:.1f} s" if group.phase else "-",
        f"{group.silent_s:.1f} s",
        *pace_cells(group),
        group.address or "-",
    )
