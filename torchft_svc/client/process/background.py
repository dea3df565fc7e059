"""The background thread of a trainer: it waits for quorums, process groups and heals."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Task:
    """An action that the thread runs once, unless it is abandoned before.

    Its outcome is an error or None.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._begun = threading.Lock()  # its owner runs the task, or abandons it
        self._done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        assert self._action is not None
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001 - raised by the waiter
            self.error = error
        finally:
            self._action = None  # a finished task keeps no references
            self._done.set()

    def abandon(self, error: BaseException) -> bool:
        """Prevent it from running, because of ``error``; False if it has begun."""
        if not self._begun.acquire(blocking=False):
            return False
        self.error = error
        self._action = None
        self._done.set()
        return True

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is done within ``timeout_s`` seconds; a signal interrupts the wait."""
        return self._done.wait(timeout_s)


class BackgroundThread:
    """Runs tasks one after another on a daemon thread called ``name``; its owner closes it."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=_run, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this call is made on it, so by one of its tasks."""
        return threading.current_thread() is self._thread

    def submit(self, task: Task) -> None:
        """Run ``task`` after the earlier ones."""
        if self._closed:
            task.abandon(RuntimeError("the manager has been shut down"))
        else:
            self._tasks.put(task)

    def close(self, timeout_s: float) -> bool:
        """End after the present task; return whether that is so within ``timeout_s`` seconds."""
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
        if not self.is_current:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _run(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # or the last one stays alive until the next arrives
    while not tasks.empty():
        late = tasks.get()
        if late is not None:
            late.abandon(RuntimeError("the manager has been shut down"))
