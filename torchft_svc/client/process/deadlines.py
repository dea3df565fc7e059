"""A timer thread, and futures with a deadline."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from torchft_svc.errors import DeadlineExceeded

T = TypeVar("T")


class Timer:
    """Calls functions at given times, on a thread that is started when it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None], Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_at(
        self,
        when: float,
        action: Callable[[], None],
        at_close: Callable[[], None] = lambda: None,
    ) -> int:
        """Call ``action`` at ``when`` (monotonic); returns a number for `cancel`.

        ``at_close`` is called instead if the timer is closed before.
        """
        with self._changed:
            number = next(self._numbers)
            if not self._closed:
                heapq.heappush(self._due, (when, number, action, at_close))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify()
                return number
        at_close()
        return number

    def cancel(self, number: int) -> None:
        with self._changed:
            self._due = [entry for entry in self._due if entry[1] != number]
            heapq.heapify(self._due)
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Cancel all calls; idempotent."""
        with self._changed:
            self._closed = True
            due, self._due = self._due, []
            self._changed.notify()
        for _, _, _, at_close in due:
            at_close()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                left_s = self._due[0][0] - time.monotonic() if self._due else None
                if left_s is None or left_s > 0:
                    self._changed.wait(
                        None if left_s is None else min(left_s, threading.TIMEOUT_MAX)
                    )
                    continue
                _, _, action, _ = heapq.heappop(self._due)
            action()


def guard_future(
    future: torch.futures.Future[T],
    default: T,
    timeout_s: float,
    on_error: Callable[[Exception], None],
    timer: Timer,
) -> torch.futures.Future[T]:
    """A future that holds ``future``'s value, or ``default`` after its error or ``timeout_s``.

    If ``timer`` is closed before, it holds ``default`` at once.
    """
    guarded: torch.futures.Future[T] = torch.futures.Future()
    lock = threading.Lock()
    over = False

    def set_result(value: T, error: Exception | None) -> None:
        nonlocal over
        with lock:
            if over:
                return
            over = True
        if error is not None:
            on_error(error)
        guarded.set_result(value)

    def expired() -> None:
        set_result(default, DeadlineExceeded("a future", timeout_s))

    def abandoned() -> None:
        set_result(default, None)

    number = timer.call_at(time.monotonic() + timeout_s, expired, abandoned)

    def finished(source: torch.futures.Future[T]) -> None:
        timer.cancel(number)
        try:
            value = source.value()
        except Exception as error:  # noqa: BLE001 - any error of the future
            set_result(default, error)
        else:
            set_result(value, None)

    future.add_done_callback(finished)
    return guarded
