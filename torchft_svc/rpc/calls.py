"""Calls at a server: how long each may wait, and how a stop of the server ends them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from torchft_svc.rpc.status import Handler

_STOPPING = "the service is stopping"
# A call without a deadline does not wait forever.
MAX_WAIT_S = 24 * 3600.0
# An answer that names the reason has to arrive before the caller's own clock ends the call.
MARGIN = 0.05
MAX_MARGIN_S = 0.1


class Calls:
    """The calls that a server has not answered yet; for one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._stopping = False

    def known(self, handler: Handler) -> Handler:
        """Wrap ``handler``: a stop answers its callers at once, who would lose their connection."""

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            try:
                if not self._stopping:
                    return await handler(request, context)
            except asyncio.CancelledError:
                if not self._stopping:
                    raise
            finally:
                self._running.discard(task)
            await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            raise AssertionError("abort returns never")

        return answer

    def stop(self) -> None:
        """Answer all callers that wait, and those that still come, that the service stops."""
        self._stopping = True
        for task in self._running:
            task.cancel()


def remaining_s(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """How long a handler may wait so that its last word still reaches the caller, in seconds."""
    left = context.time_remaining()
    if not left:  # no deadline; or a wall clock has jumped: gRPC cancels what is really over
        return MAX_WAIT_S
    return time_to_wait_s(left)


def time_to_wait_s(left_s: float) -> float:
    """How long to work for a caller that waits ``left_s``, so that it receives the last word."""
    return max(0.0, min(left_s - min(left_s * MARGIN, MAX_MARGIN_S), MAX_WAIT_S))
