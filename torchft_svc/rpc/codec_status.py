"""Between the messages and the values that tell people how jobs are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchft_svc.core.overview import GroupStatus, JobStatus
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import phase_from_wire, phase_to_wire

# What has the same name and the same type on the wire.
_OF_A_JOB = ("job", "quorum_id", "committed_step", "min_replicas", "waiting_for")
_OF_A_GROUP = ("replica_id", "address", "in_quorum", "asking", "step", "hung", "left_out")


def status_to_wire(jobs: Iterable[JobStatus]) -> pb.LighthouseStatusResponse:
    message = pb.LighthouseStatusResponse()
    for job in jobs:
        message.jobs.add(**_same(job, _OF_A_JOB), groups=map(_group_to_wire, job.groups))
    return message


def _group_to_wire(group: GroupStatus) -> pb.GroupStatus:
    return pb.GroupStatus(
        **_same(group, _OF_A_GROUP),
        phase=pb.PHASE_UNKNOWN if group.phase is None else phase_to_wire(group.phase),
        phase_ms=int(group.phase_s * 1000),
        silent_ms=int(group.silent_s * 1000),
    )


def status_from_wire(message: pb.LighthouseStatusResponse) -> list[JobStatus]:
    return [
        JobStatus(**_same(job, _OF_A_JOB), groups=tuple(map(_group_from_wire, job.groups)))
        for job in message.jobs
    ]


def _group_from_wire(group: pb.GroupStatus) -> GroupStatus:
    return GroupStatus(
        **_same(group, _OF_A_GROUP),
        phase=phase_from_wire(group.phase),
        phase_s=group.phase_ms / 1000,
        silent_s=group.silent_ms / 1000,
    )


def _same(
    source: JobStatus | GroupStatus | pb.JobStatus | pb.GroupStatus, names: Iterable[str]
) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}
