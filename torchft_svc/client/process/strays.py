"""Threads in calls of torch that cannot be interrupted, and so are left to themselves."""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable

# A thread that comes back from torch while the interpreter ends would abort the process. Most end
# with what is shut down last; a program that was interrupted must be gone within 2 s.
_END_S = 0.5

_strays: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_stray(target: Callable[[], object], name: str) -> None:
    """Call ``target`` on a thread that nobody waits for but, for a moment, the program's end."""
    _wait_at_exit()
    thread = threading.Thread(target=target, name=name, daemon=True)
    _strays.add(thread)
    thread.start()


@functools.cache
def _wait_at_exit() -> None:
    atexit.register(_wait)


def _wait() -> None:
    until = time.monotonic() + _END_S
    for thread in list(_strays):
        thread.join(max(0.0, until - time.monotonic()))
