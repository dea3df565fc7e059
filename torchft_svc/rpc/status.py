"""Our errors as gRPC statuses, and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from torchft_svc.errors import (
    CommitFailed,
    DeadlineExceeded,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unreachable,
)

log = logging.getLogger(__name__)

# The trailing metadata that names the error, where the status code alone is not enough.
ERROR_KEY = "torchft-error"

_CODES: dict[type[TorchFTError], grpc.StatusCode] = {
    RequestRefused: grpc.StatusCode.INVALID_ARGUMENT,
    QuorumFailed: grpc.StatusCode.ABORTED,
    CommitFailed: grpc.StatusCode.ABORTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unreachable: grpc.StatusCode.UNAVAILABLE,
}
_BY_NAME = {kind.__name__: kind for kind in (RequestRefused, QuorumFailed, CommitFailed)}

Handler = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[bytes]]


def answering_errors(handler: Handler) -> Handler:
    """Wrap an RPC's handler: errors become statuses, and only our own faults are logged."""

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            return await handler(request, context)
        except TorchFTError as error:
            await abort(context, error)
        except asyncio.CancelledError:
            raise
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            log.exception("rpc failed")
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        raise AssertionError("abort returns never")

    return answer


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TorchFTError) -> NoReturn:
    """End the call with the status for ``error``."""
    code = _CODES.get(type(error), grpc.StatusCode.UNKNOWN)
    text = error.reason if isinstance(error, QuorumFailed | CommitFailed) else str(error)
    await context.abort(code, text, trailing_metadata=((ERROR_KEY, type(error).__name__),))


def to_error(
    error: grpc.RpcError, *, peer: str, address: str, action: str, timeout_s: float
) -> TorchFTError:
    """What went wrong, in our words: ``action`` was asked of ``peer`` at ``address``."""
    code, details = error.code(), error.details() or ""
    trailing: Any = error.trailing_metadata() or ()
    name = dict(trailing).get(ERROR_KEY, "")
    if name in _BY_NAME:
        return _BY_NAME[name](details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        reason = "" if details == "Deadline Exceeded" else details
        return DeadlineExceeded(action, timeout_s, _tail(reason))
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return RequestRefused(details)
    return Unreachable(peer, address, f"{code.name}: {details}")


def _tail(reason: str) -> str:
    """The reason that the server told, without the sentence that we wrap around it ourselves."""
    return reason.rpartition(" s: ")[2] if " timed out after " in reason else reason
