"""Tests the event loop thread that in-process services share."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from torchft_svc.host.loop import Background


def test_the_loop_ends_after_tasks_that_are_ending() -> None:
    has_ended = threading.Event()

    async def end_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            has_ended.set()

    @contextlib.asynccontextmanager
    async def service() -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(end_late())
        await asyncio.sleep(0)
        yield task
        task.cancel()

    background = Background(service())
    background.close()
    assert has_ended.is_set()
    assert background.value.cancelled()
