"""Makes memory ready for a state that is about to arrive, before its bytes do.

A page that is written for the first time has to be found and cleared by the system, in a virtual
machine often by the host, too. That takes about as long as receiving the bytes, or several times as
long. It depends on nothing that is sent, so a thread does it ahead: while a worker waits for its
first quorum, and in front of the chunks that arrive.
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
import threading
from pathlib import Path

from torchft_svc.client.checkpointing.encoding.memory import HUGE_PAGE_BYTES, map_memory

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# Below it, a thread costs more than it saves.
MIN_BYTES = 8 << 20
# Asked for at once: a few milliseconds, so that whoever stops the thread does not wait long.
_PIECE_BYTES = 4 << 20
# A piece takes milliseconds; on a host that swaps it may take longer than anybody should wait.
_STOP_TIMEOUT_S = 1.0
# Linux 5.14: fault pages in for writing, and leave what is in them alone. Others refuse the number.
_MADV_POPULATE_WRITE = 23
_MEMINFO = Path("/proc/meminfo")
# What a container may use, and what it uses: version 2, and 1.
_CONTAINER_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


class Filling:
    """Memory whose pages a thread touches from the front on, while others write into it."""

    def __init__(self, num_bytes: int) -> None:
        """Raises `MemoryError` if there is not that much."""
        self._memory = map_memory(_rounded(num_bytes))
        self._place = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._start()

    @property
    def filled_bytes(self) -> int:
        """How much is ready."""
        return self._place

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is ready that will be; False if that takes longer than ``timeout_s``."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def resize(self, num_bytes: int) -> None:
        """Make it longer or shorter; its pages stay what they are. Not while a view is open.

        Raises:
            MemoryError: there is not that much.
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
        """The first ``num_bytes``; the memory is freed when the last view is gone."""
        return memoryview(self._memory)[:num_bytes]

    def stop(self) -> None:
        """Touch no more pages; may be called twice."""
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


class Staging:
    """At most one `Filling` kept for a state that is expected; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Filling | None = None

    def expect(self, num_bytes: int) -> None:
        """Get ``num_bytes`` ready; 0: nothing is expected any more, what was kept is freed.

        Nothing changes where memory is short: this only saves time.

        Raises:
            MemoryError: it is so short that not even addresses can be had.
        """
        with self._lock:
            if num_bytes < MIN_BYTES:
                self._drop()
            elif num_bytes > spare_bytes() // 2:
                log.info("%d bytes are not prepared: too little memory is free", num_bytes)
            else:
                self._kept = self._resized(num_bytes)

    def wait(self, timeout_s: float) -> bool:
        """Wait until what is expected has its memory; False if that takes longer."""
        kept = self._kept
        return kept is None or kept.wait(timeout_s)

    def take(self, num_bytes: int) -> Filling:
        """What was kept, or new memory, ``num_bytes`` long; it belongs to the caller, who stops it.

        Raises:
            MemoryError: there is not that much.
        """
        with self._lock:
            filling, self._kept = self._resized(num_bytes), None
        return filling

    def _resized(self, num_bytes: int) -> Filling:
        kept, self._kept = self._kept, None
        if kept is None:
            return Filling(num_bytes)
        try:
            kept.resize(num_bytes)
        except MemoryError as error:  # also where the system can not resize at all
            log.debug("%s", error)
            kept.stop()
            return Filling(num_bytes)
        return kept

    def _drop(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.stop()


def spare_bytes() -> int:
    """Memory that could be had at once; 0 where that is not known."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(_MEMINFO), re.MULTILINE)
    spare = int(found[1]) << 10 if found else 0
    for limit_file, used_file in _CONTAINER_LIMITS:
        limit, used = _read(limit_file).strip(), _read(used_file).strip()
        if limit.isdigit() and used.isdigit():  # "max" where there is no limit
            spare = min(spare, max(int(limit) - int(used), 0))
    return spare


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""


def _rounded(num_bytes: int) -> int:
    """Whole huge pages: the system then puts the memory where they fit."""
    unit = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 1
    return -(-max(num_bytes, 1) // unit) * unit
