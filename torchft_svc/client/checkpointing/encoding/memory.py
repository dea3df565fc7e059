"""Allocates memory to receive into, and reads bytes from many buffers as one (rule H10)."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

# With small pages, page faults take longer than receiving the bytes.
HUGE_PAGE_BYTES = 2 << 20
# Gaps between pieces are shorter than this.
_ZEROS = memoryview(bytes(4096))


def allocate(num_bytes: int) -> memoryview:
    """Fresh zeroed memory, freed with its last view.

    Raises:
        MemoryError: there is not enough.
    """
    return memoryview(map_memory(num_bytes))[:num_bytes]


def map_memory(num_bytes: int) -> mmap.mmap:
    """Fresh zeroed memory, in huge pages if it is large and the system supports them.

    Raises:
        MemoryError: there is not enough.
    """
    try:
        memory = _private_map(max(num_bytes, 1))
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be allocated: {error}") from error
    if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _private_map(num_bytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):  # the default would be shared with forked children
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)


class Memory:
    """``size`` bytes, made of ``pieces``: buffers, each with its start offset.

    The bytes between two pieces are zero.
    """

    def __init__(self, pieces: Sequence[tuple[int, memoryview]], size: int) -> None:
        self.size = size
        self._starts = [start for start, _ in pieces]
        self._views = [view for _, view in pieces]

    def views(self, start: int, stop: int, limit: int | None = None) -> list[memoryview]:
        """At most ``limit`` buffers with the bytes from ``start`` on, up to ``stop``."""
        views: list[memoryview] = []
        number = max(bisect_right(self._starts, start) - 1, 0)
        while start < stop and (limit is None or len(views) < limit):
            view = self._next_view(number, start, stop)
            views.append(view)
            start += len(view)
            if number + 1 < len(self._starts) and start >= self._starts[number + 1]:
                number += 1
        return views

    def _next_view(self, number: int, start: int, stop: int) -> memoryview:
        if number < len(self._starts):
            offset = start - self._starts[number]
            if 0 <= offset < len(self._views[number]):
                return self._views[number][offset : offset + stop - start]
        following = self._starts[number + 1] if number + 1 < len(self._starts) else self.size
        return _ZEROS[: min(following, stop) - start]

    def copy(self, start: int, stop: int) -> memoryview:
        """A copy of the bytes from ``start`` to ``stop``."""
        copied = allocate(stop - start)
        target = np.frombuffer(copied, dtype=np.uint8)
        place = 0
        for view in self.views(start, stop):
            np.copyto(target[place : place + len(view)], np.frombuffer(view, dtype=np.uint8))
            place += len(view)
        return copied
