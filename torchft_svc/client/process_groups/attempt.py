"""Calls into torch that cannot be interrupted, and are left to themselves if they must be."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from torchft_svc.client.strays import start_stray

T = TypeVar("T")

# How often a wait looks whether it is still wanted.
_LOOK_S = 0.02


class Attempt(Generic[T]):
    """Calls ``make`` on a thread named ``name``.

    Given up, it goes on until ``make`` has a timeout of its own; what that makes is dropped.
    """

    def __init__(self, make: Callable[[], T], name: str) -> None:
        self._over = threading.Event()
        self._made: list[T] = []
        self._error: BaseException | None = None
        start_stray(functools.partial(self._run, make), name)

    def result(self, check: Callable[[], None]) -> T:
        """What ``make`` returns, or its error; ``check`` raises to give it up."""
        while not self._over.wait(_LOOK_S):
            check()
        if self._error is not None:
            raise self._error
        return self._made.pop()  # the thread must not hold it

    def _run(self, make: Callable[[], T]) -> None:
        try:
            self._made.append(make())
        except BaseException as error:  # noqa: BLE001 - for who waits
            self._error = error
        self._over.set()
