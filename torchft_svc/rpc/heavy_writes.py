"""Bounds what long messages on their way out hold: gRPC copies each for every stream.

A job's quorum is kept once for all its groups. When it is written, there is a copy for each of
them, until its peer has read it; so only some are written at a time, the others wait for them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Any

import grpc

# Shorter ones are written at once: a quorum of 300 groups has as much.
HEAVY_BYTES = 64 * 1024
# All messages under way, without the copies: with Python's and gRPC's, twice as much.
MAX_BYTES_UNDER_WAY = 8 << 20
# How long a long message may take; a client that needs longer does not read.
HEAVY_WRITE_S = 10.0


class HeavyWrites:
    """Limits the long messages of one server that are under way; for one event loop.

    A job of which nothing is under way may always begin: those of others that do not read hold up
    none but their own.
    """

    def __init__(self, max_bytes: int = MAX_BYTES_UNDER_WAY) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0  # under way
        self._of_jobs: dict[str, int] = {}  # the same, by job
        # By job, the one whose turn is next first.
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    async def begin_write(self, job: str, num_bytes: int) -> None:
        """Return when a message of so many bytes may be written; `end_write` has to follow."""
        if job in self._waiting or not self._may_begin(job, num_bytes):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(job, deque()).append((num_bytes, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.end_write(job, num_bytes)
                raise
        else:
            self._add(job, num_bytes)

    async def answer(
        self, job: str, answer: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> bytes:
        """``answer`` when it may be returned, as the only one of a call."""
        num_bytes = len(answer)
        if num_bytes < HEAVY_BYTES:
            return answer
        await self.begin_write(job, num_bytes)
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                self.end_write(job, num_bytes)

        # A caller that does not read keeps the copy until its deadline, but holds nobody up.
        late = asyncio.get_running_loop().call_later(HEAVY_WRITE_S, end)

        def sent(_: Any) -> None:
            late.cancel()
            end()

        context.add_done_callback(sent)  # type: ignore[arg-type]  # the stubs want a call
        return answer

    def end_write(self, job: str, num_bytes: int) -> None:
        """Release ``num_bytes``: they were written, or never will be."""
        self._add(job, -num_bytes)
        for each in list(self._waiting):
            self._let_begin(each)

    def _let_begin(self, job: str) -> None:
        waiting = self._waiting[job]
        while waiting and (waiting[0][1].done() or self._may_begin(job, waiting[0][0])):
            num_bytes, turn = waiting.popleft()
            if not turn.done():  # or its stream has ended meanwhile
                self._add(job, num_bytes)
                turn.set_result(None)
                self._waiting.move_to_end(job)
        if not waiting:
            del self._waiting[job]

    def _may_begin(self, job: str, num_bytes: int) -> bool:
        return job not in self._of_jobs or self._num_bytes + num_bytes <= self._max_bytes

    def _add(self, job: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        left = self._of_jobs.pop(job, 0) + num_bytes
        if left:
            self._of_jobs[job] = left
