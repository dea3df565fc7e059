"""Between the messages and the values that tell people how jobs and runs are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchft_svc.core.launch.rendezvous_orders import NodeStatus, RunStatus
from torchft_svc.core.limits import one_line
from torchft_svc.core.quorum.lighthouse.overview import GoneGroup, GroupStatus, JobStatus
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import phase_from_wire, phase_to_wire
from torchft_svc.rpc.codec_rendezvous import agent_status_from_wire, agent_status_to_wire

# Of one field. It is shown on a terminal, to which escape codes are orders.
MAX_TEXT_LENGTH = 4000
# What has the same name and the same type on the wire.
_OF_A_JOB = (
    "job",
    "quorum_id",
    "committed_step",
    "min_replicas",
    "waiting_for",
    "num_expected",
    "num_discarded",
    "num_heals",
    "finished",
    "num_differences",
    "last_difference",
)
_OF_A_RUN = ("run", "round", "min_nodes", "max_nodes", "phase", "why")
_OF_A_NODE = ("node_id", "host", "node_rank", "num_workers", "reached", "num_restarts")
_OF_A_GONE_GROUP = ("replica_id", "reason", "orderly")
_OF_A_GROUP = ("replica_id", "address", "in_quorum", "asking", "step", "hung", "left_out")

Source = (
    JobStatus
    | GroupStatus
    | GoneGroup
    | RunStatus
    | NodeStatus
    | pb.JobStatus
    | pb.GroupStatus
    | pb.GoneGroup
    | pb.RunStatus
    | pb.NodeStatus
)


def status_to_wire(
    jobs: Iterable[JobStatus], runs: Iterable[RunStatus] = ()
) -> pb.LighthouseStatusResponse:
    message = pb.LighthouseStatusResponse(runs=map(_run_to_wire, runs))
    for job in jobs:
        message.jobs.add(
            **_same(job, _OF_A_JOB),
            groups=map(_group_to_wire, job.groups),
            stalled_ms=int(job.stalled_s * 1000),
            gone=map(_gone_to_wire, job.gone),
            ended_ms=None if job.ended_s is None else int(job.ended_s * 1000),
        )
    return message


def _gone_to_wire(group: GoneGroup) -> pb.GoneGroup:
    return pb.GoneGroup(**_same(group, _OF_A_GONE_GROUP), gone_ms=int(group.gone_s * 1000))


def _group_to_wire(group: GroupStatus) -> pb.GroupStatus:
    return pb.GroupStatus(
        **_same(group, _OF_A_GROUP),
        phase=pb.PHASE_UNKNOWN if group.phase is None else phase_to_wire(group.phase),
        phase_ms=int(group.phase_s * 1000),
        silent_ms=int(group.silent_s * 1000),
    )


def _run_to_wire(run: RunStatus) -> pb.RunStatus:
    return pb.RunStatus(**_same(run, _OF_A_RUN), nodes=map(_node_to_wire, run.nodes))


def _node_to_wire(node: NodeStatus) -> pb.NodeStatus:
    waits_s = node.waits_for_s
    return pb.NodeStatus(
        **_same(node, _OF_A_NODE),
        status=agent_status_to_wire(node.status),
        silent_ms=int(node.silent_s * 1000),
        waits_ms=None if waits_s is None else int(waits_s * 1000),
    )


def runs_from_wire(message: pb.LighthouseStatusResponse) -> list[RunStatus]:
    return [
        RunStatus(**_same(run, _OF_A_RUN), nodes=tuple(map(_node_from_wire, run.nodes)))
        for run in message.runs
    ]


def _node_from_wire(node: pb.NodeStatus) -> NodeStatus:
    values = _same(node, _OF_A_NODE)
    if not node.HasField("node_rank"):
        values["node_rank"] = None
    return NodeStatus(
        **values,
        status=agent_status_from_wire(node.status),
        silent_s=node.silent_ms / 1000,
        waits_for_s=node.waits_ms / 1000 if node.HasField("waits_ms") else None,
    )


def status_from_wire(message: pb.LighthouseStatusResponse) -> list[JobStatus]:
    return [
        JobStatus(
            **_same(job, _OF_A_JOB),
            groups=tuple(map(_group_from_wire, job.groups)),
            stalled_s=job.stalled_ms / 1000,
            gone=tuple(map(_gone_from_wire, job.gone)),
            ended_s=job.ended_ms / 1000 if job.HasField("ended_ms") else None,
        )
        for job in message.jobs
    ]


def _gone_from_wire(group: pb.GoneGroup) -> GoneGroup:
    return GoneGroup(**_same(group, _OF_A_GONE_GROUP), gone_s=group.gone_ms / 1000)


def _group_from_wire(group: pb.GroupStatus) -> GroupStatus:
    return GroupStatus(
        **_same(group, _OF_A_GROUP),
        phase=phase_from_wire(group.phase),
        phase_s=group.phase_ms / 1000,
        silent_s=group.silent_ms / 1000,
    )


def _same(
    source: Source,
    names: Iterable[str],
) -> dict[str, Any]:
    values = {name: getattr(source, name) for name in names}
    return {
        name: one_line(value, MAX_TEXT_LENGTH) if isinstance(value, str) else value
        for name, value in values.items()
    }
