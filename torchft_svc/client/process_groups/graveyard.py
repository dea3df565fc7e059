"""Keeps what was abandoned until it is harmless: groups with operations that still run."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torchft_svc.client.process_groups.meeting import SLICE_S
from torchft_svc.errors import DeadlineExceeded

# Each abandoned group holds a few threads and sockets until its own timeout.
MAX_GRAVES = 16


class Graveyard:
    """A process group's former backends, left with operations under way.

    Destroying one would block until its operations time out. So it is kept, with all its
    operations, until the last one is over, whatever becomes of the process group; the end of the
    interpreter does not destroy it either.
    """

    def bury(self, backend: Any, works: list[Any]) -> None:
        """Take over ``backend``; the caller keeps no reference."""
        grave = _Grave(self, backend, works)
        # The interpreter drops all that it knows of before it ends; of this it does not know.
        _own(grave)
        with _lock:
            _graves.append(grave)

    def clear(self) -> int:
        """Destroy the backends whose operations are over; how many of this group are left."""
        if not _graves:
            return 0
        with _lock:
            over = [grave for grave in _graves if grave.is_over()]
            _graves[:] = [grave for grave in _graves if grave not in over]
            num_left = sum(grave.yard() is self for grave in _graves)
        for grave in over:
            _disown(grave)
        return num_left  # on the way out the connections are closed, outside the lock

    def make_room(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until a further group may be made; ``check`` raises to end the wait.

        Raises:
            DeadlineExceeded: too many abandoned groups are still there after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while self.clear() >= MAX_GRAVES:
            check()
            if time.monotonic() > deadline:
                reason = f"operations in {MAX_GRAVES} abandoned process groups still run"
                raise DeadlineExceeded("reconfiguring the process group", timeout_s, reason)
            time.sleep(SLICE_S)


class _Grave:
    def __init__(self, yard: Graveyard, backend: Any, works: list[Any]) -> None:
        self.yard = weakref.ref(yard)
        self._backend = backend
        self._works = works

    def is_over(self) -> bool:
        return all(work.is_completed() for work in self._works)


_lock = threading.Lock()
_graves: list[_Grave] = []


def _own(grave: _Grave) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(grave))


def _disown(grave: _Grave) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(grave))
