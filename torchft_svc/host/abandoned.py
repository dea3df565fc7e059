"""Keeps abandoned backends alive until the operations that still run in them have ended.

Then their last references are dropped on a thread of their own: gloo needs about 10 ms for each
member to close its connections, and whoever has left the members is in a hurry to meet the next.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torchft_svc.errors import DeadlineExceeded
from torchft_svc.host.uninterruptible import SLICE_S

# Each abandoned backend holds a few threads and sockets until its own timeout.
MAX_ABANDONED = 16
# The other members may wait until an abandoned backend is closed, as for any other one.
_POLL_S = 0.01
_EXIT_S = 5.0


class AbandonedBackends:
    """The former backends of one process group, some of them left with operations under way.

    Destroying one of these would block until its operations time out. So it is kept, with all its
    operations, until the last one has ended, even if the process group is destroyed; interpreter
    exit does not destroy it either. A thread then closes its connections: the other members wait
    for operations that this member has not launched, and learn only by that that it has left.
    """

    def add(self, backend: Any, works: list[Any]) -> None:
        """Keep ``backend`` until its operations end; the caller keeps no reference.

        Call `clear_soon` when the caller has dropped its own.
        """
        _keep(_Abandoned(self, [backend, *works], works))

    def clear_soon(self) -> None:
        """Destroy the backends whose operations have ended, on a thread."""
        _CLEANER.start()

    def clear(self) -> int:
        """Destroy the backends whose operations have ended; the number left of this group."""
        _clear()
        return self._count()

    def make_room(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until another backend may be created; ``check`` raises to end the wait.

        Raises:
            DeadlineExceeded: too many abandoned backends are still there after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while self._count() >= MAX_ABANDONED and self.clear() >= MAX_ABANDONED:
            check()
            if time.monotonic() > deadline:
                reason = f"operations in {MAX_ABANDONED} abandoned process groups still run"
                raise DeadlineExceeded("reconfiguring the process group", timeout_s, reason)
            time.sleep(SLICE_S)

    def _count(self) -> int:
        with _lock:
            return sum(abandoned.group() is self for abandoned in _all)


def drop_later(held: list[Any]) -> None:
    """Empty ``held`` on a thread; the caller keeps no other reference to what is in it.

    With the last reference to an operation of a backend that was left, its connections are closed.
    """
    _keep(_Abandoned(None, held, []))
    _CLEANER.start()


class _Abandoned:
    """What is ``held`` for ``group`` until the ``works`` have ended."""

    def __init__(self, group: AbandonedBackends | None, held: list[Any], works: list[Any]) -> None:
        self.group = (lambda: None) if group is None else weakref.ref(group)
        self.held = held
        self._works = works

    def is_over(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _keep(abandoned: _Abandoned) -> None:
    # The interpreter drops everything that it knows of before it ends; not this reference.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(abandoned))
    with _lock:
        _all.append(abandoned)


class _Cleaner:
    """The thread that calls `_clear`, while there are abandoned backends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None  # None, or ended after a fork: there is none
        self._is_exit = threading.Event()

    def start(self) -> None:
        with _lock:
            if self._is_exit.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._run, name="torchft-abandoned", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_exit.is_set():
            _clear()
            with _lock:
                if not _all:
                    self._thread = None
                    return
            self._is_exit.wait(_POLL_S)

    def stop(self) -> None:
        """Stop at interpreter exit: no backend is destroyed while the interpreter shuts down."""
        self._is_exit.set()
        thread = self._thread
        if thread is not None:
            thread.join(_EXIT_S)


def _clear() -> None:
    with _lock:
        over = [abandoned for abandoned in _all if abandoned.is_over()]
        _all[:] = [abandoned for abandoned in _all if abandoned not in over]
    for abandoned in over:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(abandoned))
    # The connections are closed when this function returns, outside the lock.


_lock = threading.Lock()
_all: list[_Abandoned] = []
_CLEANER = _Cleaner()
atexit.register(_CLEANER.stop)
