"""Keeps what was abandoned until it is harmless: groups with operations that still run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torchft_svc.client.process_groups.meeting import SLICE_S
from torchft_svc.errors import DeadlineExceeded

# Each abandoned group holds a few threads and sockets until its own timeout.
MAX_GRAVES = 16


class Graveyard:
    """Groups that were left with operations under way.

    Destroying such a group would block, holding the interpreter's lock, until its operations time
    out. So it is kept, with all its operations, until the last one is over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graves: list[tuple[Any, list[Any]]] = []

    def bury(self, backend: Any, works: list[Any]) -> None:
        """Take over ``backend``; the caller keeps no reference."""
        with self._lock:
            self._graves.append((backend, works))

    def clear(self) -> int:
        """Destroy the groups whose operations are over; how many are left."""
        if not self._graves:
            return 0
        over: list[tuple[Any, list[Any]]] = []
        left: list[tuple[Any, list[Any]]] = []
        with self._lock:
            for grave in self._graves:
                (over if _is_over(grave[1]) else left).append(grave)
            self._graves = left
            num_left = len(left)
        over.clear()  # here the connections are closed, outside the lock
        return num_left

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


def _is_over(works: list[Any]) -> bool:
    return all(work.is_completed() for work in works)
