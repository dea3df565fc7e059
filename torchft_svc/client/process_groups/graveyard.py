"""Keeps what was abandoned until it is harmless: groups with operations that still run."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torchft_svc.client.process_groups.rendezvous.meeting import SLICE_S
from torchft_svc.errors import DeadlineExceeded

# Each abandoned group holds a few threads and sockets until its own timeout.
MAX_GRAVES = 16
# Others may wait for the end of an abandoned group as for the end of any other.
_LOOK_S = 0.01
_EXIT_S = 5.0


class Graveyard:
    """A process group's former backends, left with operations under way.

    Destroying one would block until its operations time out. So it is kept, with all its
    operations, until the last one is over, whatever becomes of the process group; the end of the
    interpreter does not destroy it either. A thread looks after it meanwhile: the others, who wait
    for what this member has not launched, hear that it has left when the connections are closed.
    """

    def bury(self, backend: Any, works: list[Any]) -> None:
        """Take over ``backend``; the caller keeps no reference."""
        grave = _Grave(self, backend, works)
        # The interpreter drops all that it knows of before it ends; of this it does not know.
        _own(grave)
        with _lock:
            _graves.append(grave)
        if self.clear():
            _KEEPER.start()

    def clear(self) -> int:
        """Destroy the backends whose operations are over; how many of this group are left."""
        _clear()
        with _lock:
            return sum(grave.yard() is self for grave in _graves)

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


class _Keeper:
    """The thread, while there is something to look after."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None  # None, or ended after a fork: there is none
        self._is_exit = threading.Event()

    def start(self) -> None:
        with _lock:
            if self._is_exit.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._run, name="torchft-graveyard", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_exit.wait(_LOOK_S):
            _clear()
            with _lock:
                if not _graves:
                    self._thread = None
                    return

    def stop(self) -> None:
        """The interpreter is about to end: no backend is destroyed meanwhile."""
        self._is_exit.set()
        thread = self._thread
        if thread is not None:
            thread.join(_EXIT_S)


def _clear() -> None:
    with _lock:
        over = [grave for grave in _graves if grave.is_over()]
        _graves[:] = [grave for grave in _graves if grave not in over]
    for grave in over:
        _disown(grave)
    # On the way out the connections are closed, outside the lock.


_lock = threading.Lock()
_graves: list[_Grave] = []
_KEEPER = _Keeper()
atexit.register(_KEEPER.stop)


def _own(grave: _Grave) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(grave))


def _disown(grave: _Grave) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(grave))
