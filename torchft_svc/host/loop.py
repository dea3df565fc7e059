"""The one event loop thread of a process, for services that run inside another program.

grpc.aio's loops in several threads of a process disturb one another, so all in-process servers
share this one. It starts with the first server and ends with the last.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Starting a server takes milliseconds; a loop that does not answer for so long is stuck.
ANSWER_TIMEOUT_S = 30.0
# Tasks that end by themselves do so at once.
LAST_TASKS_S = 0.2


class _LoopThread:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def acquire(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="torchft-services", daemon=True
                )
                self._thread.start()
            self._users += 1
            return self._loop

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            loop = self._loop
            if self._users or loop is None or self._thread is None:
                return
            ending = asyncio.run_coroutine_threadsafe(_last_tasks(), loop)
            ending.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
            self._thread.join(ANSWER_TIMEOUT_S)
            loop.close()
            self._loop = self._thread = None


async def _last_tasks() -> None:
    """gRPC ends its calls by tasks of its own, a moment after they were cancelled."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=LAST_TASKS_S)


_SHARED = _LoopThread()


class Background(Generic[T]):
    """Holds an async context manager open on the shared loop, from a blocking program."""

    def __init__(self, manager: contextlib.AbstractAsyncContextManager[T]) -> None:
        self._manager = manager
        self._loop = _SHARED.acquire()
        self._open = True
        try:
            self.value: T = self._run(manager.__aenter__())
        except BaseException:
            self._open = False
            _SHARED.release()
            raise

    def close(self) -> None:
        """Leave the context manager; may be called twice."""
        if not self._open:
            return
        self._open = False
        try:
            self._run(self._manager.__aexit__(None, None, None))
        finally:
            _SHARED.release()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future: concurrent.futures.Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(ANSWER_TIMEOUT_S)
