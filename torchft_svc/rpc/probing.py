"""Asks whether a lighthouse takes requests, through the gRPC health protocol."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchft_svc.rpc.channel import open_aio_channel, open_channel
from torchft_svc.rpc.security import Security

# Under the empty name one that does not lead is well, too.
_REQUEST = health_pb2.HealthCheckRequest(service="torchft.LighthouseService")
# What those say that do not know health checks, or not this name.
_UNKNOWN = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)


async def is_serving(address: str, security: Security, timeout_s: float) -> bool:
    """Whether the lighthouse at ``address`` would take requests; one that cannot tell would."""
    async with open_aio_channel(address, security) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(_REQUEST, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() in _UNKNOWN
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def is_serving_blocking(address: str, security: Security, timeout_s: float) -> bool:
    """The same, for who is on no event loop."""
    with open_channel(address, security) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(_REQUEST, timeout=timeout_s)
        except grpc.RpcError as error:
            return error.code() in _UNKNOWN
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
