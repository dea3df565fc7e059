"""Keeps what was abandoned until it is harmless: groups with operations that still run."""

from __future__ import annotations

import threading
import time
from typing import Any

from torchft_svc.client.process_groups.meeting import SLICE_S, StopFlag
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
        with self._lock:
            done = [grave for grave in self._graves if _is_over(grave[1])]
            self._graves = [grave for grave in self._graves if not _is_over(grave[1])]
            left = len(self._graves)
        done.clear()  # here the connections are closed, outside the lock
        return left

    def make_room(self, deadline: float, stop: StopFlag) -> None:
        """Wait until a further group may be made.

        Raises:
            DeadlineExceeded: too many abandoned groups are still there at ``deadline``.
        """
        began_at = time.monotonic()
        while self.clear() >= MAX_GRAVES:
            if stop.wait(SLICE_S) or time.monotonic() > deadline:
                reason = f"operations in {MAX_GRAVES} abandoned process groups still run"
                took_s = time.monotonic() - began_at
                raise DeadlineExceeded("reconfiguring the process group", took_s, reason)


def _is_over(works: list[Any]) -> bool:
    return all(work.is_completed() for work in works)
