"""Asks whether a lighthouse takes requests, through the gRPC health protocol."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchft_svc.rpc.channel import open_aio_channel
from torchft_svc.rpc.security import Security

# Under the empty name one that does not lead is well, too.
_NAME = "torchft.LighthouseService"
# What those say that do not know health checks, or not this name.
_UNKNOWN = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)


async def is_serving(address: str, security: Security, timeout_s: float) -> bool:
    """Whether the lighthouse at ``address`` would take requests; one that cannot tell would."""
    request = health_pb2.HealthCheckRequest(service=_NAME)
    async with open_aio_channel(address, security) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() in _UNKNOWN
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
