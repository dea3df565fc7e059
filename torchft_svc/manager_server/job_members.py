"""Asks a lighthouse which groups train, for a worker that has not asked for a quorum yet."""

from __future__ import annotations

from typing import Any

import grpc

from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import JOB_KEY
from torchft_svc.rpc.status import to_error

_METHOD = "/torchft.LighthouseService/Status"


async def members_of_job(
    channel: grpc.aio.Channel, config: ManagerConfig, timeout_s: float
) -> pb.JobMembersResponse:
    """The members of the last quorum of the job in ``config``; no members if there was none.

    Raises:
        PeerError: the lighthouse does not answer within ``timeout_s``.
        RequestRefused: it does not know its jobs' status, as the public release's.
    """
    call: Any = channel.unary_unary(
        _METHOD,
        request_serializer=pb.LighthouseStatusRequest.SerializeToString,
        response_deserializer=pb.LighthouseStatusResponse.FromString,
    )
    metadata = ((JOB_KEY, config.job_id), *config.security.metadata)
    request = pb.LighthouseStatusRequest(job=config.job_id)
    try:
        status = await call(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        raise to_error(
            error,
            peer="lighthouse",
            address=config.lighthouses[0],
            action="the status of the job",
            timeout_s=timeout_s,
        ) from None
    answer = pb.JobMembersResponse()
    for job in status.jobs:
        if job.job == config.job_id:
            answer.committed_step = job.committed_step
            members = (group.address for group in job.groups if group.in_quorum and group.address)
            answer.manager_addresses.extend(members)
    return answer
