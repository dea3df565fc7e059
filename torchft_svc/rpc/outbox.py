"""What a service has to tell on a stream, while it reads the stream's other direction."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from typing import Any

import grpc

from torchft_svc.errors import RequestRefused, TorchFTError, Unreachable
from torchft_svc.rpc.heavy_writes import HEAVY_BYTES, HEAVY_WRITE_S, HeavyWrites
from torchft_svc.rpc.upkeep import UPKEEP

# News for a client that does not read; one that is so far behind is treated as gone.
MAX_UNREAD_NEWS = 1000
# The same by weight. The quorum of a large job is heavier by itself, so one more piece is always
# taken.
MAX_UNREAD_BYTES = 1024 * 1024
# A piece of news on its way has so long to leave before the stream is ended: ending it while a
# write is under way fails in gRPC's core, and the client would not hear why.
WRITE_GRACE_S = 1.0


class Outbox:
    """Bounded: a client that does not read loses its stream instead of filling the memory.

    ``heavy`` says when long news of ``job`` may be written; None: there are none.
    """

    def __init__(self, heavy: HeavyWrites | None = None, job: str = "") -> None:
        self._heavy = heavy
        self._job = job
        self._news: deque[tuple[bytes, bytes]] = deque()
        self._num_bytes = 0  # of the news
        self._writer: asyncio.Future[None] | None = None  # waits for news
        self._flushed = asyncio.Event()  # all that was told is on its way
        self._flushed.set()
        self._failed = asyncio.Event()
        self._ends = asyncio.Event()
        self._ended = asyncio.Event()
        self._error: TorchFTError | None = None
        self._is_writing = False
        self._is_ending = False

    def tell(self, news: bytes, more: bytes = b"") -> None:
        """Queue encoded news, without waiting; ``more`` follows it, so that ``news`` can be kept
        once for many streams."""
        if len(self._news) >= MAX_UNREAD_NEWS or self._num_bytes > MAX_UNREAD_BYTES:
            told = f"{len(self._news)} pieces of news were not read ({self._num_bytes} bytes)"
            self.fail(RequestRefused(told))
            return
        self._news.append((news, more))
        self._num_bytes += len(news) + len(more)
        self._flushed.clear()
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def fail(self, error: TorchFTError) -> None:
        """End the stream with ``error``."""
        self._error = self._error or error
        self._failed.set()

    async def end(self) -> None:
        """End the stream in good order behind all that was told, and return when that is done."""
        self._ends.set()
        await self._ended.wait()

    async def exchange(
        self,
        reading: Coroutine[Any, Any, None],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Write what is told until `end`, or until ``reading`` is over, whose error is raised here.

        What was told before it ended in good order still goes out.

        Raises:
            RequestRefused: the client does not read.
            TorchFTError: what `fail` was told.
        """
        UPKEEP.stream_began()
        writing = asyncio.create_task(self._write(context))
        ends = [
            asyncio.create_task(reading),
            writing,
            asyncio.create_task(self._raise_failure()),
            asyncio.create_task(self._ends.wait()),
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._flushed.wait(), WRITE_GRACE_S)
        finally:
            self._is_ending = True
            try:
                if self._is_writing:
                    await asyncio.wait([writing], timeout=WRITE_GRACE_S)
            finally:  # gRPC may cancel a stream's task a second time
                for end in ends:
                    end.cancel()
                self._ended.set()
                self._news.clear()
                UPKEEP.stream_ended()
                await asyncio.gather(*ends, return_exceptions=True)

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_ending:
            if not self._news:
                self._flushed.set()
                self._writer = loop.create_future()
                await self._writer
                continue
            await self._write_next(context)

    async def _write_next(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        news, more = self._news.popleft()
        num_bytes = len(news) + len(more)
        self._num_bytes -= num_bytes
        if self._heavy is None or num_bytes < HEAVY_BYTES:
            await self._hand_over(context, news + more)
            return
        await self._heavy.begin(self._job, num_bytes)
        try:
            await asyncio.wait_for(self._hand_over(context, news + more), HEAVY_WRITE_S)
        except asyncio.TimeoutError:
            told = f"a piece of news was not read within {HEAVY_WRITE_S:g} s ({num_bytes} bytes)"
            raise RequestRefused(told) from None
        finally:
            self._heavy.end(self._job, num_bytes)

    async def _hand_over(self, context: grpc.aio.ServicerContext[Any, Any], news: bytes) -> None:
        self._is_writing = True
        try:
            await context.write(news)
        except Exception as error:  # noqa: BLE001 - whatever gRPC calls it: the stream has ended
            raise Unreachable("client", context.peer(), f"it has gone: {error}") from None
        self._is_writing = False

    async def _raise_failure(self) -> None:
        await self._failed.wait()
        assert self._error is not None
        raise self._error
