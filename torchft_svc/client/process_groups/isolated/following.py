"""Tells when operations on a device are over, which no device does by itself."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

# How often it is looked. An operation between hosts takes longer.
LOOK_S = 0.0002


class Follower:
    """Looks at all operations in turn: none holds up the news of another."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[Callable[[], bool], Callable[[], object]]]
        self._new = queue.SimpleQueue()

    def follow(self, is_over: Callable[[], bool], on_end: Callable[[], object]) -> None:
        """Call ``on_end`` once ``is_over`` returns True."""
        self._new.put((is_over, on_end))

    def run(self) -> None:
        """Do it, on a thread of its own, for as long as the process lives."""
        pending: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        while True:
            if not pending or not self._new.empty():
                pending.append(self._new.get())
                continue
            over = [entry for entry in pending if entry[0]()]
            pending = [entry for entry in pending if entry not in over]
            for _, on_end in over:
                on_end()
            if not over:
                time.sleep(LOOK_S)
