"""`torchft.futures`: futures and blocks with a deadline.

One timer thread serves all of them. It has to show life within ``TORCHFT_WATCHDOG_TIMEOUT_SEC``
seconds (default: 30): if a callback blocks it for longer, the process ends with all tracebacks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch

from torchft_svc.client.process.deadlines import Timer
from torchft_svc.client.process.watchdog import Watchdog
from torchft_svc.core.limits import check_length
from torchft_svc.env import Environment

T = TypeVar("T")

_DEFAULT_WATCHDOG_S = 30.0


def watchdog_timeout() -> timedelta:
    """Return how long the timer thread may stand still, by the environment.

    Raises:
        ConfigError: the variable is no number of seconds above 0, or too large.
    """
    timeout_s = Environment().watchdog_timeout_s or _DEFAULT_WATCHDOG_S
    check_length("TORCHFT_WATCHDOG_TIMEOUT_SEC", timeout_s)
    return timedelta(seconds=timeout_s)


WATCHDOG_TIMEOUT_SEC = watchdog_timeout()
# How often in that time the thread shows life.
_BEATS = 3


class Timeouts:
    """The timer thread of this module, which starts with the first deadline.

    Args:
        show_life_s: the process ends if the thread stands still for so long.
    """

    def __init__(self, show_life_s: float) -> None:
        self._show_life_s = show_life_s
        self._lock = threading.Lock()
        self._timer: Timer | None = None
        self._watchdog: Watchdog | None = None
        self._watch: AbstractContextManager[None] = contextlib.nullcontext()

    def call_after(self, timeout: timedelta, action: Callable[[], None]) -> Callable[[], None]:
        """Call ``action`` after ``timeout``; returns a function that cancels this."""
        with self._lock:
            timer = self._timer
            if timer is None:
                timer = self._timer = Timer("compat-timeouts")
                self._watchdog = Watchdog(self._show_life_s)
                self._beat(timer, self._watchdog)
        number = timer.call_at(time.monotonic() + timeout.total_seconds(), action)
        return lambda: timer.cancel(number)

    def close(self) -> None:
        """Cancel all calls and end the thread; the next deadline starts another one."""
        with self._lock:
            timer, self._timer = self._timer, None
            watchdog, self._watchdog = self._watchdog, None
        if timer is not None and watchdog is not None:
            timer.close(self._show_life_s)
            self._watch.__exit__(None, None, None)
            watchdog.close()

    def _beat(self, timer: Timer, watchdog: Watchdog) -> None:
        self._watch.__exit__(None, None, None)
        self._watch = watchdog.watching("the thread of timeouts to show life")
        self._watch.__enter__()
        again = time.monotonic() + self._show_life_s / _BEATS
        timer.call_at(again, lambda: self._beat(timer, watchdog))


_TIMEOUTS = Timeouts(WATCHDOG_TIMEOUT_SEC.total_seconds())


def future_timeout(fut: torch.futures.Future[T], timeout: timedelta) -> torch.futures.Future[T]:
    """Return a future with the outcome of ``fut``; TimeoutError if that takes too long."""
    limited: torch.futures.Future[T] = torch.futures.Future()
    lock = threading.Lock()
    is_over = False

    def end(set_outcome: Callable[[], None]) -> None:
        nonlocal is_over
        with lock:
            first, is_over = not is_over, True
        if first:
            set_outcome()

    error: Any = TimeoutError(f"future did not complete within {timeout}")
    cancel = _TIMEOUTS.call_after(timeout, lambda: end(lambda: limited.set_exception(error)))

    def finish(source: torch.futures.Future[T]) -> None:
        cancel()
        try:
            value = source.value()
        except Exception as caught:  # noqa: BLE001 - whatever the future holds
            failure: Any = caught
            end(lambda: limited.set_exception(failure))
        else:
            end(lambda: limited.set_result(value))

    fut.add_done_callback(finish)
    return limited


def future_wait(fut: torch.futures.Future[T], timeout: timedelta) -> T:
    """Wait for the value of ``fut``.

    Raises:
        TimeoutError: there is none within ``timeout``.
    """
    is_over = threading.Event()
    fut.add_done_callback(lambda _: is_over.set())
    if not is_over.wait(timeout.total_seconds()):
        raise TimeoutError(f"future did not complete within {timeout}")
    return fut.wait()


@contextlib.contextmanager
def context_timeout(callback: Callable[[], None], timeout: timedelta) -> Iterator[None]:
    """Call ``callback``, on another thread, if the block takes longer than ``timeout``."""
    cancel = _TIMEOUTS.call_after(timeout, callback)
    try:
        yield
    finally:
        cancel()


def stream_timeout(callback: Callable[[], None], timeout: timedelta) -> None:
    """Call ``callback`` unless what is queued in the current stream ends within ``timeout``.

    Returns at once. Without an accelerator nothing is queued.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return
    event = torch.Event(accelerator)
    event.record(torch.accelerator.current_stream())

    def check() -> None:
        if not event.query():
            callback()

    _TIMEOUTS.call_after(timeout, check)
