"""Waits that can be left, also those of calls into torch that cannot be interrupted.

A wait with a timeout is repeated in slices; any other call has its own thread and may be abandoned.
"""

from __future__ import annotations

import atexit
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torchft_svc.errors import DeadlineExceeded

T = TypeVar("T")

# The longest single wait inside torch, on a thread that has to react to something else as well.
SLICE_S = 0.05
SLICE = timedelta(seconds=SLICE_S)
# The interval at which a wait checks whether its caller still needs it.
CHECK_S = 0.02
# Each abandoned call holds a thread and perhaps a connection. Above this number the oldest ones are
# made to return.
MAX_ABANDONED_CALLS = 8
# A thread that returns from torch while the interpreter shuts down would abort the process. Most
# threads return when the last parts are shut down; an interrupted program must exit within 2 s.
_EXIT_WAIT_S = 0.5

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_lock = threading.Lock()
_abandoned: list[UninterruptibleCall[Any]] = []


def start_uninterruptible(target: Callable[[], object], name: str) -> None:
    """Call ``target`` on a thread that is not joined, except for a moment at interpreter exit."""
    _join_at_exit()
    thread = threading.Thread(target=target, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


def wait_checking(
    is_over: Callable[[float], bool],
    check: Callable[[], None],
    timeout_s: float = math.inf,
    action: str = "",
    reason: str = "",
    *,
    check_s: float = CHECK_S,
) -> None:
    """Wait until ``is_over``, which waits up to its argument; ``check`` raises to leave.

    Raises:
        DeadlineExceeded: ``action`` did not finish within ``timeout_s``; ``reason`` says why.
    """
    deadline = time.monotonic() + timeout_s
    while not is_over(check_s):
        check()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(action, timeout_s, reason)


def wait_in_slices(
    wait: Callable[[timedelta], bool],
    is_completed: Callable[[], bool],
    check: Callable[[], None],
    timeout_s: float = math.inf,
) -> bool:
    """Wait for the end of an operation of torch; ``check`` raises to leave it.

    ``wait`` and ``is_completed`` are its own. It must survive a ``wait`` that times out.

    Raises:
        RuntimeError: it failed, or did not end within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    left_s = timeout_s
    while True:
        try:
            # A timeout of 0 would mean no limit.
            return bool(wait(SLICE if left_s > SLICE_S else timedelta(seconds=max(0.001, left_s))))
        except RuntimeError:
            if is_completed():  # between the timeout and this check, or it has failed
                return bool(wait(SLICE))
            check()
            if left_s <= SLICE_S:
                raise
        left_s = deadline - time.monotonic()


def nothing() -> None:
    """Do nothing: the check, release, stop or wait of what needs none."""


class UninterruptibleCall(Generic[T]):
    """Calls ``make`` on a thread named ``name``.

    An abandoned call continues until ``make`` returns; its result is dropped. ``release`` makes
    ``make`` return early. It is called, on any thread and possibly twice, when too many later calls
    were abandoned.
    """

    def __init__(
        self, make: Callable[[], T], name: str, release: Callable[[], None] = nothing
    ) -> None:
        self._over = threading.Event()
        self._made: list[T] = []
        self._error: BaseException | None = None
        self.release = release
        start_uninterruptible(functools.partial(self._run, make), name)

    def result(self, check: Callable[[], None], timeout_s: float = math.inf, action: str = "") -> T:
        """Return what ``make`` returns, or raise its error; ``check`` raises to abandon the call.

        Raises:
            DeadlineExceeded: ``action`` did not finish within ``timeout_s``; it was abandoned.
        """
        try:
            wait_checking(self._over.wait, check, timeout_s, action)
        except BaseException:
            self.abandon()
            raise
        if self._error is not None:
            raise self._error
        return self._made.pop()  # the thread must not hold it

    def abandon(self) -> None:
        """No caller waits for the result any more."""
        with _lock:
            _abandoned[:] = [call for call in _abandoned if not call.is_over()]
            _abandoned.append(self)
            too_many = _abandoned[:-MAX_ABANDONED_CALLS]
        for call in too_many:
            call.release()

    def is_over(self) -> bool:
        return self._over.is_set()

    def _run(self, make: Callable[[], T]) -> None:
        try:
            self._made.append(make())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
        self._over.set()


@functools.cache
def _join_at_exit() -> None:
    atexit.register(_join)


def _join() -> None:
    until = time.monotonic() + _EXIT_WAIT_S
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))
