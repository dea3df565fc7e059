"""Makes calls on threads that no signal reaches.

Python runs handlers of signals on the main thread, between any two instructions. Ctrl-C raises
there, also within gRPC's own code, between taking a lock and the block that releases it: then
every further call of this process waits for that lock for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# A thread that waits looks so often for an interrupt that did not come as a signal to it.
NOTICE_S = 0.2
# `close` waits so long for all calls together: each returns at once when its channel is closed.
_JOIN_S = 0.5


class _Outcome(Generic[T]):
    """What a call has returned or raised."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.make = make
        self.over: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.values: list[T] = []
        self.error: BaseException | None = None
        self.is_done = False

    def run(self) -> None:
        try:
            self.values.append(self.make())
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self.error = error
        self.is_done = True

    def wait(self) -> T:
        """What `make` has returned or raised; an interrupt of this thread leaves it running."""
        while True:
            try:
                self.over.get(timeout=NOTICE_S)
                break
            except queue.Empty:
                continue
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # it refers to this frame
        return self.values.pop()


class _Worker:
    """A thread that makes one call after the other; it is in ``idle`` between them."""

    def __init__(self, idle: deque[_Worker]) -> None:
        self.calls: queue.SimpleQueue[_Outcome[Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=_run, args=(self, idle), name="torchft-call", daemon=True
        )


def _run(worker: _Worker, idle: deque[_Worker]) -> None:
    while (outcome := worker.calls.get()) is not None:
        outcome.run()
        idle.append(worker)
        outcome.over.put(True)
        del outcome  # the thread must not hold what the call has returned


class Caller:
    """Makes the calls of the main thread on others, which it keeps for the next ones. Thread-safe.

    A call that an interrupt leaves is cancelled if that is possible; otherwise it goes on until it
    returns. The next one does not wait for it.
    """

    def __init__(self) -> None:
        self._idle: deque[_Worker] = deque()
        self._workers: list[_Worker] = []
        self._is_closed = False

    @property
    def hands_calls_over(self) -> bool:
        """Whether signals may reach this thread, so that its calls are made on another one."""
        return not self._is_closed and threading.current_thread() is threading.main_thread()

    def call(self, make: Callable[[], T], cancel: Callable[[], None] | None = None) -> T:
        """What ``make`` returns or raises; on a thread that gets no signals it is called here.

        ``cancel``: ends ``make`` early, if an interrupt has left it; called on a third thread.
        """
        if not self.hands_calls_over:
            return make()
        outcome = self._submit(make)
        try:
            return outcome.wait()
        except BaseException:
            if cancel is not None and not outcome.is_done:
                self._submit(cancel)
            raise

    def _submit(self, make: Callable[[], T]) -> _Outcome[T]:
        outcome = _Outcome(make)
        self._idle_worker().calls.put(outcome)
        return outcome

    def close(self) -> None:
        """End the threads; later calls are made where they come from. May be called twice."""
        self._is_closed = True
        self._end()
        until = time.monotonic() + _JOIN_S
        for worker in self._workers:
            if worker.thread.is_alive() and worker.thread is not threading.current_thread():
                worker.thread.join(max(0.0, until - time.monotonic()))

    def _idle_worker(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.thread.is_alive():  # a forked child has none of its parent's threads
                return worker
        worker = _Worker(self._idle)
        self._workers.append(worker)  # first: an interrupt may come while it starts
        worker.thread.start()
        return worker

    def _end(self) -> None:
        for worker in self._workers:
            worker.calls.put(None)

    def __del__(self) -> None:
        self._end()
