"""The client's end of a stream: why it has ended, although gRPC does not always know."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from torchft_svc.core.limits import one_line
from torchft_svc.errors import TorchFTError, Unreachable
from torchft_svc.rpc.status import cause_of, to_distrust, to_not_leader
from torchft_svc.rpc.tls_reasons import closing_hint

# What gRPC reports instead of the reason, if the other side ends a call while it is written to;
# of sessions that a lighthouse refuses at once, that were 5 in 100.
_DROPPED = "Internal error from Core"
# How often a stream is opened to learn the reason.
MAX_OPENINGS = 4

Stream = Any  # grpc.aio's stream call; its stubs lack reading and writing
# What using a stream raises when it has ended.
BROKEN = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


async def raise_status(stream: Stream) -> None:
    """Raise why ``stream``, which has ended, did so, unless it ended in good order."""
    code = await stream.code()
    if code is not grpc.StatusCode.OK:
        details = await stream.details()
        metadata = await stream.initial_metadata(), await stream.trailing_metadata()
        raise grpc.aio.AioRpcError(code, *metadata, details=details)  # type: ignore[call-arg]


def is_reason_dropped(error: grpc.RpcError) -> bool:
    """Whether gRPC has dropped the reason; the next attempt may bring it."""
    return error.details() == _DROPPED


def broken_stream(error: Exception, address: str) -> TorchFTError:
    """Return why the stream to the lighthouse at ``address`` is over, after one of `BROKEN`."""
    if isinstance(error, grpc.aio.AioRpcError):
        known = to_not_leader(error) or to_distrust(error, "lighthouse", address)
        if known is not None:
            return known
    return Unreachable("lighthouse", address, _why(error))


def _why(error: Exception) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    if is_reason_dropped(error):
        return "it ended the session"
    details = one_line(error.details() or "")
    return f"{cause_of(error.code(), details)}{closing_hint(details)}"
