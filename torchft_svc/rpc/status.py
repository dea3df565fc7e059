"""Our errors as gRPC statuses, and back."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from torchft_svc.core.limits import MAX_ADDRESS_LENGTH, one_line
from torchft_svc.errors import (
    CommitFailed,
    DeadlineExceeded,
    GroupDiffers,
    GroupLeft,
    NotLeader,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unauthorized,
    Unreachable,
)
from torchft_svc.rpc.descriptors import shortage
from torchft_svc.rpc.tls_reasons import closing_hint, tls_reason

log = logging.getLogger(__name__)

# The trailing metadata that names the error, where the status code alone is not enough.
ERROR_KEY = "torchft-error"
LEADER_KEY = "torchft-leader"
# What gRPC reports of a deadline without a reason.
_UNEXPLAINED = "Deadline Exceeded"
# A call may end so much before its deadline: gRPC counts on both sides, in milliseconds.
_ROUNDING_S = 0.1

# What gRPC says of a connection that is not made, and what that is in plain words.
_NOT_MADE = "failed to connect to all addresses; last error: "
_CAUSES = (
    (rf"{_NOT_MADE}\w+: \S+: Failed to connect to remote host: (.*)", r"\1"),
    (
        rf"{_NOT_MADE}.*Failed parsing HTTP/2 .*",
        "the service there does not speak gRPC: check the port",
    ),
    (
        rf"{_NOT_MADE}.*timed out before receiving SETTINGS frame.*",
        "the service there does not answer: it is frozen, or the port is wrong",
    ),
    (r"errors resolving .*", "its host name cannot be resolved"),
)
_CODES: dict[type[TorchFTError], grpc.StatusCode] = {
    RequestRefused: grpc.StatusCode.INVALID_ARGUMENT,
    GroupDiffers: grpc.StatusCode.INVALID_ARGUMENT,
    QuorumFailed: grpc.StatusCode.ABORTED,
    CommitFailed: grpc.StatusCode.ABORTED,
    GroupLeft: grpc.StatusCode.ABORTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unreachable: grpc.StatusCode.UNAVAILABLE,
    NotLeader: grpc.StatusCode.UNAVAILABLE,
    Unauthorized: grpc.StatusCode.UNAUTHENTICATED,
}
_BY_NAME = {
    kind.__name__: kind
    for kind in (
        RequestRefused,
        GroupDiffers,
        QuorumFailed,
        CommitFailed,
        GroupLeft,
        Unauthorized,
    )
}

Handler = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[bytes | None]]


def answering_errors(
    handler: Handler, on_refusal: Callable[[str, str], None], count: Callable[[str], None]
) -> Handler:
    """Wrap an RPC's handler: errors become statuses; of them only our own faults are logged.

    ``on_refusal`` receives who broke the protocol (gRPC's name for the peer), and how; ``count``
    the name of each status.
    """

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
        try:
            return await handler(request, context)
        except TorchFTError as error:
            if isinstance(error, RequestRefused):
                on_refusal(context.peer(), str(error))
            count(_code_of(error).name)
            await abort(context, error)
        except asyncio.CancelledError:
            raise
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            log.exception("rpc failed")
            count(grpc.StatusCode.INTERNAL.name)
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        raise AssertionError("abort returns never")

    return answer


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TorchFTError) -> NoReturn:
    """End the call with the status for ``error``."""
    code = _code_of(error)
    name, text = error_to_wire(error)
    trailing = [(ERROR_KEY, name)]
    if isinstance(error, NotLeader):
        leader = one_line(error.leader, MAX_ADDRESS_LENGTH)  # what etcd says: anybody's word
        trailing.append((LEADER_KEY, leader.encode("ascii", "replace").decode()))
    try:
        await context.abort(code, text, trailing_metadata=tuple(trailing))
    except grpc.aio.AbortError:
        raise
    except Exception as fault:  # noqa: BLE001 - the call is over; its client does not read
        log.info("could not send %r to a caller: %s", text, fault)
        raise asyncio.CancelledError from None


def _code_of(error: TorchFTError) -> grpc.StatusCode:
    return _CODES.get(type(error), grpc.StatusCode.UNKNOWN)


def error_to_wire(error: TorchFTError) -> tuple[str, str]:
    """The error's name, and its reason without the sentence that the receiver wraps around it."""
    if isinstance(error, QuorumFailed | CommitFailed | GroupLeft | Unauthorized):
        return type(error).__name__, error.reason
    return type(error).__name__, str(error)


def to_error(
    error: grpc.RpcError, *, peer: str, address: str, action: str, timeout_s: float
) -> TorchFTError:
    """What went wrong, in our words: ``action`` was asked of ``peer`` at ``address``."""
    code, details = error.code(), one_line(error.details() or "")
    elsewhere = to_not_leader(error)
    if elsewhere is not None:
        return elsewhere
    name = _trailing(error).get(ERROR_KEY, "")
    if name in _BY_NAME:
        return _BY_NAME[name](details)
    if name == Unreachable.__name__:
        return _unreachable_behind(peer, address, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return late(action, timeout_s, "" if details == _UNEXPLAINED else details)
    distrust = to_distrust(error, peer, address)
    if distrust is not None:
        return distrust
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return RequestRefused(details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return RequestRefused(f"{action} at {address} is too large: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return RequestRefused(
            f"the service at {address} is no {peer}: it does not know this request"
        )
    return Unreachable(peer, address, f"{cause_of(code, details)}{closing_hint(details)}")


def to_not_leader(error: grpc.RpcError) -> NotLeader | None:
    """The error that names the lighthouse to go to."""
    trailers = _trailing(error)
    if trailers.get(ERROR_KEY) != NotLeader.__name__:
        return None
    return NotLeader(one_line(trailers.get(LEADER_KEY, ""), MAX_ADDRESS_LENGTH))


def cause_of(code: grpc.StatusCode, details: str) -> str:
    """What gRPC says, without what every connection that is not made has in common."""
    if code is grpc.StatusCode.UNAVAILABLE and (reason := shortage()):
        return reason
    for said, cause in _CAUSES:
        found = re.fullmatch(said, details, re.DOTALL)
        if found:
            return found.expand(cause)
    return f"{code.name}: {details}"


def _trailing(error: grpc.RpcError) -> dict[str, str]:
    trailing: Any = error.trailing_metadata() or ()
    return dict(trailing)


def to_distrust(error: grpc.RpcError, peer: str, address: str) -> Unauthorized | None:
    """The error that asking again will not mend: one side does not trust the other."""
    details = one_line(error.details() or "")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Unauthorized(f"{peer} at {address}: {details}")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        reason = tls_reason(details)
        return None if reason is None else Unauthorized(f"{peer} at {address}: {reason}")
    return None


def _unreachable_behind(peer: str, address: str, sentence: str) -> Unreachable:
    """The error for a peer that answers, but lacks the service that its ``sentence`` names."""
    who, _, reason = sentence.partition(" cannot be reached: ")
    role, _, where = who.partition(" at ")
    return Unreachable(role, where, reason) if reason else Unreachable(peer, address, sentence)


def error_from_wire(name: str, reason: str, action: str, timeout_s: float) -> TorchFTError:
    """The error that `error_to_wire` took apart; an unknown one means that there is no quorum."""
    if name == DeadlineExceeded.__name__:
        return late(action, timeout_s, reason)
    return _BY_NAME.get(name, QuorumFailed)(reason)


def came_early(error: grpc.RpcError, left_s: float) -> bool:
    """Whether gRPC ended the call by its deadline although there were still ``left_s``.

    It reckons with the wall clock while a call begins: one that jumps ahead just then ends it.
    """
    is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return is_late and error.details() == _UNEXPLAINED and left_s > _ROUNDING_S


def late(action: str, timeout_s: float, sentence: str) -> DeadlineExceeded:
    """A deadline that the server saw coming: its reason without its sentence, in our sentence."""
    reason = sentence.rpartition(" s: ")[2] if " timed out after " in sentence else sentence
    return DeadlineExceeded(action, timeout_s, reason)
