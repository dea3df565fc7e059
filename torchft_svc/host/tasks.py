"""Background tasks with an owner: none is lost, and none outlives the block that started it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from torchft_svc.core.pieces import Pieces

T = TypeVar("T")

log = logging.getLogger(__name__)

# A cancellation can get lost: up to Python 3.11 `wait_for` returns a result that has just come
# instead. It is repeated after so long.
CANCEL_AGAIN_S = 0.05


class Tasks:
    """An async context manager that cancels, and waits for, every task started through it.

    Unlike `asyncio.TaskGroup` (Python 3.11), one task's fault does not end its siblings: it is
    logged with its traceback.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task %s failed", task.get_name(), exc_info=task.exception())

    async def __aenter__(self) -> Tasks:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running = set(self._running)
        while running:
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


async def in_turns(pieces: Pieces[T]) -> T:
    """Compute a piece in each turn of the event loop; returns the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


def call_later(delay_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
    """Call it later on the event loop that runs."""
    return asyncio.get_running_loop().call_later(delay_s, act)
