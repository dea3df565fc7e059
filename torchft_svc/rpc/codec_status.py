"""Between the messages and the values that tell people how jobs are."""

from __future__ import annotations

from collections.abc import Iterable

from torchft_svc.core.overview import GroupStatus, JobStatus
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import phase_from_wire, phase_to_wire


def status_to_wire(jobs: Iterable[JobStatus]) -> pb.LighthouseStatusResponse:
    message = pb.LighthouseStatusResponse()
    for job in jobs:
        message.jobs.add(
            job=job.job,
            quorum_id=job.quorum_id,
            committed_step=job.committed_step,
            min_replicas=job.min_replicas,
            waiting_for=job.waiting_for,
            groups=map(_group_to_wire, job.groups),
        )
    return message


def _group_to_wire(group: GroupStatus) -> pb.GroupStatus:
    return pb.GroupStatus(
        replica_id=group.replica_id,
        address=group.address,
        in_quorum=group.in_quorum,
        asking=group.asking,
        step=group.step,
        phase=pb.PHASE_UNKNOWN if group.phase is None else phase_to_wire(group.phase),
        phase_ms=int(group.phase_s * 1000),
        silent_ms=int(group.silent_s * 1000),
        hung=group.hung,
    )


def status_from_wire(message: pb.LighthouseStatusResponse) -> list[JobStatus]:
    return [
        JobStatus(
            job=job.job,
            quorum_id=job.quorum_id,
            committed_step=job.committed_step,
            min_replicas=job.min_replicas,
            waiting_for=job.waiting_for,
            groups=tuple(map(_group_from_wire, job.groups)),
        )
        for job in message.jobs
    ]


def _group_from_wire(group: pb.GroupStatus) -> GroupStatus:
    return GroupStatus(
        replica_id=group.replica_id,
        address=group.address,
        in_quorum=group.in_quorum,
        asking=group.asking,
        step=group.step,
        phase=phase_from_wire(group.phase),
        phase_s=group.phase_ms / 1000,
        silent_s=group.silent_ms / 1000,
        hung=group.hung,
    )
