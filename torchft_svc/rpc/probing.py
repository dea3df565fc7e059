"""Asks whether a service answers, through the gRPC health protocol."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchft_svc.rpc.channel import open_aio_channel
from torchft_svc.rpc.security import Security


async def is_serving(address: str, security: Security, timeout_s: float) -> bool:
    """Whether the service at ``address`` would take requests; one without health checks would."""
    async with open_aio_channel(address, security) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
