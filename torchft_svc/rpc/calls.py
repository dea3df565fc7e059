"""The calls that a server has not answered yet, so that its stop can tell each of them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from torchft_svc.rpc.status import Handler

_STOPPING = "the service is stopping"


class Calls:
    """To be used on one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._stopping = False

    def known(self, handler: Handler) -> Handler:
        """``handler``, whose callers hear of a stop at once instead of losing their connection."""

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
        """Tell all callers that wait, and those that still come."""
        self._stopping = True
        for task in self._running:
            task.cancel()
