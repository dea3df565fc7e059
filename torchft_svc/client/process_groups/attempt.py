"""Calls into torch that cannot be interrupted, and are left to themselves if they must be."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torchft_svc.client.process.strays import start_stray
from torchft_svc.errors import DeadlineExceeded

T = TypeVar("T")

# How often a wait looks whether it is still wanted.
_LOOK_S = 0.02
# Each call that was given up holds a thread and perhaps a connection. More than these are not left
# to themselves: the oldest ones are made to end.
MAX_GIVEN_UP = 8


def nothing() -> None:
    """There is nothing to check, or to release."""


class Attempt(Generic[T]):
    """Calls ``make`` on a thread named ``name``.

    Given up, it goes on until ``make`` comes back; what that makes is dropped. ``release`` makes it
    come back: called, on any thread and maybe again, once too many others were given up later.
    """

    def __init__(
        self, make: Callable[[], T], name: str, release: Callable[[], None] = nothing
    ) -> None:
        self._over = threading.Event()
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._release = release
        start_stray(functools.partial(self._run, make), name)

    def result(self, check: Callable[[], None], timeout_s: float = math.inf, action: str = "") -> T:
        """What ``make`` returns, or its error; ``check`` raises to give it up.

        Raises:
            DeadlineExceeded: ``action`` is not over within ``timeout_s``; it was given up.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not self._over.wait(_LOOK_S):
                check()
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(action, timeout_s)
        except BaseException:
            self.give_up()
            raise
        if self._error is not None:
            raise self._error
        return self._made.pop()  # the thread must not hold it

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        _note_given_up(self)

    def is_over(self) -> bool:
        """Whether ``make`` has come back."""
        return self._over.is_set()

    def release(self) -> None:
        """Make it come back."""
        self._release()

    def _run(self, make: Callable[[], T]) -> None:
        try:
            self._made.append(make())
        except BaseException as error:  # noqa: BLE001 - for who waits
            self._error = error
        self._over.set()


_lock = threading.Lock()
_given_up: list[Attempt[Any]] = []


def _note_given_up(attempt: Attempt[Any]) -> None:
    with _lock:
        _given_up[:] = [each for each in _given_up if not each.is_over()]
        _given_up.append(attempt)
        too_many = _given_up[:-MAX_GIVEN_UP]
    for each in too_many:
        each.release()
