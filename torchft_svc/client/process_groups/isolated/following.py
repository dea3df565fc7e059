"""Tells when operations on a device are over, which no device does by itself."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# How often it is looked. An operation between hosts takes longer.
LOOK_S = 0.0002
# For an operation that is over; without a time, only the stream would wait.
_OVER = timedelta(seconds=1)

# Called with what waits for the operation: it raises if it has failed.
OnEnd = Callable[[Callable[[], object]], None]


class Follower:
    """Looks at all operations in turn: none holds up the news of another."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[Any, OnEnd]] = queue.SimpleQueue()

    def follow(self, work: Any, on_end: OnEnd) -> None:
        """Call ``on_end`` when ``work`` is over, well or not."""
        self._new.put((work, on_end))

    def run(self) -> None:
        """Do it, on a thread of its own, for as long as the process lives."""
        pending: list[tuple[Any, OnEnd]] = []
        while True:
            if not pending or not self._new.empty():
                pending.append(self._new.get())
                continue
            over = [entry for entry in pending if entry[0].is_completed()]
            for entry in over:
                pending.remove(entry)
                work, on_end = entry
                on_end(lambda work=work: work.wait(_OVER))  # type: ignore[misc]
            if not over:
                time.sleep(LOOK_S)
