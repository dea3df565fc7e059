"""Asks whether a lighthouse would take a group that is with another one."""

from __future__ import annotations

from typing import Any

import grpc

from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import open_aio_channel, open_channel
from torchft_svc.rpc.codec import JOB_KEY
from torchft_svc.rpc.security import Security

_METHOD = "/torchft.LighthouseService/HasRoom"
_REQUEST = pb.LighthouseRoomRequest()
_CODEC = (pb.LighthouseRoomRequest.SerializeToString, pb.LighthouseRoomResponse.FromString)


async def would_take(address: str, job_id: str, security: Security, timeout_s: float) -> bool:
    """Whether the lighthouse at ``address`` takes requests, knows the token and has room for a
    group of this job; one that cannot tell would.

    Its health does not tell that: who leaves a lighthouse for one that refuses it trains alone, and
    would do so again and again.
    """
    async with open_aio_channel(address, security) as channel:
        ask = channel.unary_unary(_METHOD, *_CODEC)
        try:
            await ask(_REQUEST, timeout=timeout_s, metadata=_metadata(job_id, security))
        except grpc.aio.AioRpcError as error:
            return _cannot_tell(error)
        return True


def would_take_blocking(address: str, job_id: str, security: Security, timeout_s: float) -> bool:
    """The same, for who is on no event loop."""
    with open_channel(address, security) as channel:
        ask = channel.unary_unary(_METHOD, *_CODEC)
        try:
            ask(_REQUEST, timeout=timeout_s, metadata=_metadata(job_id, security))
        except grpc.RpcError as error:
            return _cannot_tell(error)
        return True


def _metadata(job_id: str, security: Security) -> tuple[tuple[str, str], ...]:
    return (JOB_KEY, job_id), *security.metadata


def _cannot_tell(error: Any) -> bool:
    """Whether it answers, and does not know the question: as the public release's."""
    return error.code() is grpc.StatusCode.UNIMPLEMENTED
