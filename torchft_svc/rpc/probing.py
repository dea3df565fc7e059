"""Asks whether a lighthouse would accept a client that is with another one."""

from __future__ import annotations

from typing import Any

import grpc

from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import open_aio_channel, open_channel
from torchft_svc.rpc.codec import JOB_KEY
from torchft_svc.rpc.security import Security

# Method, request, and the answer of a lighthouse that would. The public release's lighthouse does
# not know the first question, and refuses the second because nobody asks; what is no lighthouse
# knows neither.
_QUESTIONS: tuple[tuple[str, Any, grpc.StatusCode], ...] = (
    ("HasRoom", pb.LighthouseRoomRequest(), grpc.StatusCode.OK),
    ("Quorum", pb.LighthouseQuorumRequest(), grpc.StatusCode.INVALID_ARGUMENT),
)


async def accepts_client(address: str, job_id: str, security: Security, timeout_s: float) -> bool:
    """Whether a lighthouse at ``address`` accepts requests, knows the token and has room for a
    group of this job.

    Its health does not show that: a group that leaves a lighthouse for one that refuses it trains
    alone, and would do so again and again.
    """
    metadata = ((JOB_KEY, job_id), *security.metadata)
    async with open_aio_channel(address, security) as channel:
        for method, request, welcome in _QUESTIONS:
            ask = channel.unary_unary(_path(method), _encoded, _as_is)
            code = grpc.StatusCode.OK
            try:
                await ask(request, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                code = error.code()
            if code is not grpc.StatusCode.UNIMPLEMENTED:
                return code is welcome
    return False


def accepts_client_blocking(
    address: str, job_id: str, security: Security, timeout_s: float
) -> bool:
    """`accepts_client`, for a caller that is on no event loop."""
    metadata = ((JOB_KEY, job_id), *security.metadata)
    with open_channel(address, security) as channel:
        for method, request, welcome in _QUESTIONS:
            ask = channel.unary_unary(_path(method), _encoded, _as_is)
            code = grpc.StatusCode.OK
            try:
                ask(request, timeout=timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                code = error.code()
            if code is not grpc.StatusCode.UNIMPLEMENTED:
                return code is welcome
    return False


def _path(method: str) -> str:
    return f"/torchft.LighthouseService/{method}"


def _encoded(request: Any) -> bytes:
    encoded: bytes = request.SerializeToString()
    return encoded


def _as_is(answer: bytes) -> bytes:
    return answer
