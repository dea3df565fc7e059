"""Writes a service's news to a stream, while it reads the stream's other direction (rule S7)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc

from torchft_svc.errors import RequestRefused, TorchFTError, Unreachable
from torchft_svc.rpc.heavy_writes import HEAVY_BYTES, HEAVY_WRITE_S, HeavyWrites

# News for a client that does not read; one that is so far behind is treated as gone.
MAX_UNREAD_NEWS = 1000
# The same by weight. The quorum of a large job is heavier by itself, so one more piece is always
# taken.
MAX_UNREAD_BYTES = 1024 * 1024
# All streams of one server together; what many have to read, as the quorum of a job, counts once. A
# thousand groups that read have next to nothing unread.
MAX_UNREAD_BYTES_OF_ALL = 32 * 1024 * 1024
# A piece of news on its way has so long to leave before the stream is ended: ending it while a
# write is under way fails in gRPC's core, and the client would not learn why.
WRITE_GRACE_S = 1.0
# A connection that sends nothing is no stream.
HELLO_TIMEOUT_S = 5.0

T = TypeVar("T")


async def first_message(requests: AsyncIterator[T]) -> T | None:
    """The first of a stream's ``requests``; None: none came within `HELLO_TIMEOUT_S`."""
    reading = asyncio.ensure_future(_next(requests))
    _leave_to_grpc(reading)  # also where the service stops meanwhile
    await asyncio.wait([reading], timeout=HELLO_TIMEOUT_S)
    return reading.result() if reading.done() else None


async def _next(requests: AsyncIterator[T]) -> T | None:
    return await anext(requests, None)


def _leave_to_grpc(task: asyncio.Future[Any]) -> None:
    """Let a read or a write that is under way end with its call, instead of cancelling it.

    gRPC forgets the buffers of an operation whose task was cancelled, and never frees them: the
    message that a client sends meanwhile, with all that was read from the connection along with it,
    would be 100 KB for each stream that ends.
    """
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


class Unread:
    """The news that the streams of one server have not read, together.

    Beyond its bound the stream with the most unread news ends: many streams that each keep to their
    own bound would else fill the memory.
    """

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES_OF_ALL) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_streams: dict[int, int] = {}  # by the id of a piece of news: whose it is
        self._outboxes: set[Outbox] = set()

    def opened(self, outbox: Outbox) -> None:
        self._outboxes.add(outbox)

    def closed(self, outbox: Outbox) -> None:
        self._outboxes.discard(outbox)

    def add_news(self, news: bytes) -> None:
        """Count that one more stream has to read ``news``."""
        num_streams = self._num_streams.get(id(news), 0)
        self._num_streams[id(news)] = num_streams + 1
        if not num_streams:
            self._num_bytes += len(news)
        if self._num_bytes > self._max_bytes and self._outboxes:
            most = max(self._outboxes, key=lambda outbox: outbox.num_bytes)
            reason = f"{most.num_bytes} bytes of news were not read, more than by any other client"
            most.fail(RequestRefused(f"{reason}; all together may leave {self._max_bytes} unread"))

    def remove_news(self, news: bytes) -> None:
        """Count that a stream has read ``news``, or has ended."""
        num_streams = self._num_streams.pop(id(news)) - 1
        if num_streams:
            self._num_streams[id(news)] = num_streams
        else:
            self._num_bytes -= len(news)


class Outbox:
    """The news for one stream; a client that does not read loses it instead of filling the memory.

    ``heavy`` decides when long news of ``job`` may be written; None: there are none. ``unread``
    bounds those of all streams.
    """

    def __init__(
        self, heavy: HeavyWrites | None = None, job: str = "", unread: Unread | None = None
    ) -> None:
        self._heavy = heavy
        self._job = job
        self._unread = unread or Unread()
        self._news: deque[tuple[bytes, bytes]] = deque()
        self.num_bytes = 0  # of the news
        self._writer: asyncio.Future[None] | None = None  # waits for news
        self._flushed = asyncio.Event()  # all news are on their way
        self._flushed.set()
        self._failed = asyncio.Event()
        self._ends = asyncio.Event()
        self._ended = asyncio.Event()
        self._error: TorchFTError | None = None
        self._is_writing = False
        self._is_ending = False

    def add_news(self, news: bytes, more: bytes = b"") -> None:
        """Queue encoded news, without waiting; ``more`` follows it, so that ``news`` can be kept
        once for many streams."""
        if self._error is not None or self._ended.is_set():
            return
        if len(self._news) >= MAX_UNREAD_NEWS or self.num_bytes > MAX_UNREAD_BYTES:
            reason = f"{len(self._news)} pieces of news were not read ({self.num_bytes} bytes)"
            self.fail(RequestRefused(reason))
            return
        self._news.append((news, more))
        self.num_bytes += len(news) + len(more)
        self._flushed.clear()
        self._unread.add_news(news)
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def fail(self, error: TorchFTError) -> None:
        """End the stream with ``error``; news that were not written are dropped."""
        self._error = self._error or error
        self._failed.set()
        self._forget_news()

    def _forget_news(self) -> None:
        while self._news:
            self._next_news()

    def _next_news(self) -> tuple[bytes, bytes]:
        news, more = self._news.popleft()
        self.num_bytes -= len(news) + len(more)
        self._unread.remove_news(news)
        return news, more

    def finish(self) -> None:
        """End the stream in good order behind all news."""
        self._ends.set()

    async def end(self) -> None:
        """End the stream in good order behind all news; return when it has ended."""
        self.finish()
        await self._ended.wait()

    async def exchange(
        self,
        requests: AsyncIterator[T],
        on_request: Callable[[T], bool],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Write news until `end`, or until the ``requests`` are over.

        ``on_request`` gets each request, and returns whether more may follow; its error is raised
        here. News that were added before the requests ended in good order are still written.

        Raises:
            RequestRefused: the client does not read.
            TorchFTError: the error given to `fail`.
        """
        self._unread.opened(self)
        reading = asyncio.create_task(self._read(requests, on_request))
        writing = asyncio.create_task(self._write(context))
        ends = [
            reading,
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
                ends.remove(reading)
                _leave_to_grpc(reading)
                if self._is_writing:
                    ends.remove(writing)
                    _leave_to_grpc(writing)
                for end in ends:
                    end.cancel()
                self._ended.set()
                self._forget_news()
                self._unread.closed(self)
                await asyncio.gather(*ends, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[T], on_request: Callable[[T], bool]) -> None:
        async for request in requests:
            # Behind the end of its call gRPC must not be asked for another one.
            if self._is_ending or not on_request(request):
                return

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
        news, more = self._next_news()
        num_bytes = len(news) + len(more)
        if self._heavy is None or num_bytes < HEAVY_BYTES:
            await self._hand_over(context, news + more)
            return
        await self._heavy.begin_write(self._job, num_bytes)
        try:
            handing = asyncio.ensure_future(self._hand_over(context, news + more))
            await asyncio.wait([handing], timeout=HEAVY_WRITE_S)
            if not handing.done():
                _leave_to_grpc(handing)
                reason = f"a piece of news was not read within {HEAVY_WRITE_S:g} s"
                raise RequestRefused(f"{reason} ({num_bytes} bytes)")
            handing.result()
        finally:
            self._heavy.end_write(self._job, num_bytes)

    async def _hand_over(self, context: grpc.aio.ServicerContext[Any, Any], news: bytes) -> None:
        self._is_writing = True
        try:
            await context.write(news)
        except Exception as error:  # noqa: BLE001 - whatever gRPC calls it: the stream has ended
            if not self._is_ending:  # behind its end the call has no peer
                raise Unreachable("client", context.peer(), f"it has gone: {error}") from None
        self._is_writing = False

    async def _raise_failure(self) -> None:
        await self._failed.wait()
        assert self._error is not None
        raise self._error
