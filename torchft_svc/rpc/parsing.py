"""Parses requests, so that garbage is refused in one sentence, not with a traceback in the log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from torchft_svc.errors import RequestRefused
from torchft_svc.rpc.status import Handler

_GARBAGE = object()


def parser(message: Any) -> Callable[[bytes], Any]:
    """A deserializer for class ``message`` that never raises: gRPC would log every time."""

    def parse(raw: bytes) -> Any:
        try:
            return message.FromString(raw)
        except DecodeError:
            return _GARBAGE

    return parse


def refusing_garbage(handler: Handler) -> Handler:
    """Return ``handler`` for requests that a `parser` has made: garbage is refused."""

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
        return await handler(checked(request), context)

    return answer


def refusing_garbage_in_stream(handler: Handler) -> Handler:
    """Return ``handler``, of a stream of requests, for those that a `parser` has made."""

    async def answer(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
        return await handler(_CheckedStream(requests), context)

    return answer


class _CheckedStream:
    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)

    def __aiter__(self) -> _CheckedStream:
        return self

    async def __anext__(self) -> Any:
        return checked(await anext(self._requests))


def checked(message: Any, what: str = "the request") -> Any:
    """``message``, if a `parser` could make one.

    Raises:
        RequestRefused: it could not.
    """
    if message is _GARBAGE:
        raise RequestRefused(f"{what} is not a message of torchft.proto")
    return message
