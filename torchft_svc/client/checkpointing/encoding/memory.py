"""Allocates memory to receive into, and reads bytes from many buffers as one (rule H10).

On the first write to a page the kernel has to allocate and clear it, in a virtual machine often
the host, too. That takes as long as receiving the bytes, or several times as long. So a thread does
it in advance: while a worker waits for its first quorum, and ahead of the chunks that arrive.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from torchft_svc.host.available_memory import available_bytes, total_bytes

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# With small pages, page faults take longer than receiving the bytes.
HUGE_PAGE_BYTES = 2 << 20
# Gaps between pieces are shorter than this.
_ZEROS = memoryview(bytes(4096))
# Below this size, a thread costs more than it saves.
MIN_BYTES = 8 << 20
# Allocated in one call: takes a few milliseconds, so that stopping the thread is quick.
_PIECE_BYTES = 4 << 20
# A piece takes milliseconds, but much longer on a host that swaps.
_STOP_TIMEOUT_S = 1.0
# Linux 5.14: allocate pages without changing their content. Other systems return an error.
_MADV_POPULATE_WRITE = 23


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

    The bytes between two pieces are zero. Nobody changes the pieces at the offsets in ``steady``.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[int, memoryview]],
        size: int,
        steady: Collection[int] = frozenset(),
    ) -> None:
        self.size = size
        self._starts = [start for start, _ in pieces]
        self._views = [view for _, view in pieces]
        self._steady = frozenset(steady)

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

    def keep(self, start: int, stop: int) -> memoryview:
        """The bytes from ``start`` to ``stop``, which nobody changes: a copy, if need be."""
        views = self.views(start, stop)
        number = max(bisect_right(self._starts, start) - 1, 0)
        if len(views) == 1 and self._starts and self._starts[number] in self._steady:
            return views[0]
        return self.copy(start, stop)

    def copy(self, start: int, stop: int) -> memoryview:
        """A copy of the bytes from ``start`` to ``stop``."""
        copied = allocate(stop - start)
        target = np.frombuffer(copied, dtype=np.uint8)
        place = 0
        for view in self.views(start, stop):
            np.copyto(target[place : place + len(view)], np.frombuffer(view, dtype=np.uint8))
            place += len(view)
        return copied


class Filling:
    """Memory whose pages a thread allocates in order, while other threads write into it."""

    def __init__(self, num_bytes: int) -> None:
        """Raises `MemoryError` if there is not enough memory."""
        self._memory = map_memory(_rounded(num_bytes))
        self._place = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; False if that takes longer than ``timeout_s``."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def resize(self, num_bytes: int) -> None:
        """Change the size, and keep the pages. Not allowed while a view exists.

        Raises:
            MemoryError: there is not enough.
        """
        if _rounded(num_bytes) == len(self._memory):
            return
        self.stop()
        try:
            self._memory.resize(_rounded(num_bytes))
        except (OSError, SystemError, BufferError, ValueError, OverflowError) as error:
            raise MemoryError(f"{num_bytes} bytes cannot be allocated: {error}") from error
        self._place = min(self._place, len(self._memory))
        self._start()

    def view(self, num_bytes: int) -> memoryview:
        """The first ``num_bytes``; the memory is freed with the last view."""
        return memoryview(self._memory)[:num_bytes]

    def stop(self) -> None:
        """Allocate no more pages; idempotent."""
        self._stop.set()
        if not self.wait(_STOP_TIMEOUT_S):
            log.warning("memory is not ready after %.3g s, continuing without it", _STOP_TIMEOUT_S)

    def _start(self) -> None:
        self._stop = threading.Event()
        if len(self._memory) - self._place < MIN_BYTES or sys.platform != "linux":
            return
        self._thread = threading.Thread(
            target=self._fill, args=(self._stop,), name="torchft-checkpoint-memory", daemon=True
        )
        self._thread.start()

    def _fill(self, stop: threading.Event) -> None:
        pin = ctypes.c_char.from_buffer(self._memory)
        start, size = ctypes.addressof(pin), len(self._memory)
        while self._place < size and not stop.is_set():
            count = min(_PIECE_BYTES, size - self._place)
            if _libc.madvise(start + self._place, count, _MADV_POPULATE_WRITE):
                log.debug("pages cannot be requested: error %d", ctypes.get_errno())
                return
            self._place += count
        del pin


@dataclass(frozen=True, slots=True)
class AtHand:
    """Chunks of a state of ``num_bytes`` that are in memory already, by their digests."""

    num_bytes: int
    chunk_bytes: int
    digests: dict[int, bytes]


class Staging:
    """Memory for at most one expected state, of which chunks may be at hand; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Filling | None = None
        self._at_hand: AtHand | None = None

    def expect(self, num_bytes: int) -> None:
        """Allocate ``num_bytes`` in advance; 0: free the memory, no state is expected any more.

        Does nothing if memory is short: this only saves time.

        Raises:
            MemoryError: not even address space is left.
        """
        with self._lock:
            if num_bytes == 0:
                self._discard_kept()
            elif self._at_hand is not None:
                return  # the size of what is at hand is known, and not estimated
            elif num_bytes < MIN_BYTES:
                self._discard_kept()
            elif num_bytes > (available_bytes() or 0) // 2:
                log.info("%d bytes are not prepared: too little memory is free", num_bytes)
            else:
                self._kept = self._resized(num_bytes)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the memory is allocated; False if that takes longer."""
        kept = self._kept
        return kept is None or kept.wait(timeout_s)

    def pop_filling(self, num_bytes: int) -> Filling:
        """Return ``num_bytes`` of prepared or new memory; the caller owns it, and has to stop it.

        Raises:
            MemoryError: there is not enough.
        """
        # A system that overcommits memory would grant any size, and end this process later.
        total = total_bytes()
        if total is not None and num_bytes > total:
            raise MemoryError(f"a state of {num_bytes} bytes does not fit into {total} of memory")
        with self._lock:
            at_hand = self._at_hand
            if self._kept is None or (at_hand is not None and at_hand.num_bytes != num_bytes):
                self._discard_kept()
            filling, self._kept = self._resized(num_bytes), None
        return filling

    @property
    def at_hand(self) -> AtHand | None:
        """What `pop_filling` would contain, if the state has the same form."""
        with self._lock:
            return self._at_hand

    def pop_at_hand(self, num_bytes: int, chunk_bytes: int) -> dict[int, bytes]:
        """Return the digests of the chunks that the memory of the last `pop_filling` contains."""
        with self._lock:
            at_hand, self._at_hand = self._at_hand, None
        if at_hand is None or (at_hand.num_bytes, at_hand.chunk_bytes) != (num_bytes, chunk_bytes):
            return {}
        return at_hand.digests

    def keep(self, filling: Filling, at_hand: AtHand) -> None:
        """Keep ``filling``, to which nobody writes any more, with what it contains."""
        with self._lock:
            self._discard_kept()
            self._kept, self._at_hand = filling, at_hand

    def _resized(self, num_bytes: int) -> Filling:
        kept, self._kept = self._kept, None
        if kept is None:
            return Filling(num_bytes)
        try:
            kept.resize(num_bytes)
        except MemoryError as error:  # also if the system does not support resizing
            log.debug("%s", error)
            kept.stop()
            return Filling(num_bytes)
        return kept

    def _discard_kept(self) -> None:
        kept, self._kept = self._kept, None
        self._at_hand = None
        if kept is not None:
            kept.stop()


def _rounded(num_bytes: int) -> int:
    """Rounded up to whole huge pages: the kernel then aligns the memory to them."""
    unit = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 1
    return -(-max(num_bytes, 1) // unit) * unit
