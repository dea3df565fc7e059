"""Asks a lighthouse which groups train, for a worker that has not asked for a quorum yet."""

from __future__ import annotations

from typing import Any

import grpc

from torchft_svc.errors import Unreachable
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import JOB_KEY
from torchft_svc.rpc.status import to_error

_METHOD = "/torchft.LighthouseService/JobMembers"


async def members_of_job(
    channel: grpc.aio.Channel, address: str, config: ManagerConfig, timeout_s: float
) -> pb.JobMembersResponse:
    """The members of the last quorum of the job in ``config``; no members if there was none.

    ``address``: of the lighthouse at the other end of ``channel``.

    Raises:
        PeerError: the lighthouse does not answer within ``timeout_s``.
        RequestRefused: it does not know this request, as the public release's.
    """
    call: Any = channel.unary_unary(
        _METHOD,
        request_serializer=pb.JobMembersRequest.SerializeToString,
        response_deserializer=pb.JobMembersResponse.FromString,
    )
    metadata = ((JOB_KEY, config.job_id), *config.security.metadata)
    try:
        answer: pb.JobMembersResponse = await call(
            pb.JobMembersRequest(), timeout=timeout_s, metadata=metadata
        )
    except grpc.aio.AioRpcError as error:
        raise to_error(
            error,
            peer="lighthouse",
            address=address,
            action="the members of the job",
            timeout_s=timeout_s,
        ) from None
    except grpc.aio.UsageError as error:  # the link has lost its lighthouse in this moment
        raise Unreachable("lighthouse", address, "the connection was closed") from error
    return answer
