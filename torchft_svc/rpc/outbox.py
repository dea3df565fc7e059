"""What a service has to tell on a stream, while it reads the stream's other direction."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from torchft_svc.errors import RequestRefused

# News for a client that does not read; one that is so far behind is treated as gone.
MAX_UNREAD_NEWS = 1000


class Outbox:
    """Bounded: a client that does not read loses its stream instead of filling the memory."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[bytes] = asyncio.Queue(MAX_UNREAD_NEWS)
        self._overflow = asyncio.Event()

    def tell(self, news: bytes) -> None:
        """Queue encoded news, without waiting."""
        try:
            self._news.put_nowait(news)
        except asyncio.QueueFull:
            self._overflow.set()

    async def exchange(
        self,
        reading: Coroutine[Any, Any, None],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Write what is told until ``reading`` is over, whose error is raised here.

        Raises:
            RequestRefused: the client does not read.
        """
        ends = [
            asyncio.create_task(work)
            for work in (reading, self._write(context), self._overflowed())
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await context.write(await self._news.get())

    async def _overflowed(self) -> None:
        await self._overflow.wait()
        raise RequestRefused(f"{MAX_UNREAD_NEWS} pieces of news were not read")
