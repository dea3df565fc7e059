"""Copies bytes between CUDA devices and memory of the host, faster than torch's own copies.

A copy into pageable memory goes through a small buffer of the driver, on one thread, which also
waits for the system to allocate each page. Here a few threads do that side by side, each with two
pinned buffers of its own: while one is filled by the device, the other one is emptied.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# Torch declares no types for its streams and events.
_cuda: Any = torch.cuda

# A pinned buffer; also what a thread copies before it looks for more to do.
WINDOW_BYTES = 16 << 20
# Most of the time goes to the first write to each page, which takes place in all threads at once.
_MAX_THREADS = 8
# Below this size, pinning costs more than it saves.
_MIN_PINNED_BYTES = 64 << 20


class DeviceCopies:
    """Bytes on one device that are copied into ``target``, each range at its own offset.

    ``parts``: offsets in ``target``, in ascending order, and one-dimensional uint8 tensors. What is
    between them stays as it is.
    """

    def __init__(self, parts: Sequence[tuple[int, torch.Tensor]], target: memoryview) -> None:
        self._parts = parts
        self._ends = [offset + part.numel() for offset, part in parts]
        self._device = parts[0][1].device
        self._pin = ctypes.c_char.from_buffer(target)
        self._address = ctypes.addressof(self._pin)
        self._size = len(target)
        self._lock = threading.Lock()
        self._windows = iter(range(0, self._size, WINDOW_BYTES))
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Copy all of them, behind what is queued on the current stream; returns at the end."""
        with _cuda.device(self._device):
            queued = _cuda.current_stream().record_event()
        num = min(_MAX_THREADS, os.cpu_count() or 1, -(-self._size // WINDOW_BYTES))
        threads = [
            threading.Thread(target=self._run, args=(queued,), name="torchft-device-copy")
            for _ in range(num - 1)
        ]
        for thread in threads:
            thread.start()
        self._run(queued)
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, queued: Any) -> None:
        try:
            with _cuda.device(self._device), _cuda.stream(_cuda.Stream(self._device)):
                _cuda.current_stream().wait_event(queued)
                self._copy_windows()
        except BaseException as error:  # noqa: BLE001 - it is raised by the thread that waits
            self._errors.append(error)

    def _copy_windows(self) -> None:
        filled: _Window | None = None
        free = [self._new_buffer(), self._new_buffer()]
        for start in self._take_starts():
            window = _Window(free.pop(), start, min(start + WINDOW_BYTES, self._size))
            self._fill(window)
            if filled is not None:
                free.append(filled.empty_into(self._address))
            filled = window
        if filled is not None:
            filled.empty_into(self._address)

    def _fill(self, window: _Window) -> None:
        """Queue the copies into the window's buffer."""
        for number in range(bisect_right(self._ends, window.start), len(self._parts)):
            offset, part = self._parts[number]
            if offset >= window.stop:
                break
            first, last = max(offset, window.start), min(self._ends[number], window.stop)
            window.add(first, part[first - offset : last - offset])
        window.end.record()

    def _new_buffer(self) -> torch.Tensor:
        # From torch's pool of pinned memory: the next copy finds it there again.
        size = min(WINDOW_BYTES, self._size)
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _take_starts(self) -> Iterator[int]:
        while not self._errors:
            with self._lock:
                start = next(self._windows, None)
            if start is None:
                return
            yield start


@contextlib.contextmanager
def pinned(state: object) -> Iterator[None]:
    """Pin the host tensors in ``state`` in this block, so that copies to a device are fast.

    Only if this process uses CUDA, and the state is large; where pinning fails, nothing changes.
    """
    ranges = _host_ranges(state) if _cuda.is_initialized() else []
    if sum(stop - start for start, stop in ranges) < _MIN_PINNED_BYTES:
        yield
        return
    cudart = _cuda.cudart()
    registered = []
    for start, stop in ranges:
        if int(cudart.cudaHostRegister(start, stop - start, 0)) == 0:
            registered.append(start)
        else:
            _forget_error()
    try:
        yield
    finally:
        try:
            _cuda.synchronize()  # a copy may be under way, also after an exception
        finally:
            for start in registered:
                cudart.cudaHostUnregister(start)


def _forget_error() -> None:
    """Take back the error of a call of CUDA, which the next kernel of this thread would report."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0.0)


def _host_ranges(state: object) -> list[tuple[int, int]]:
    """The pages of the host tensors in ``state``; ranges that touch each other are one."""
    found: set[tuple[int, int]] = set()
    for leaf in tree_leaves(state):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
            storage = leaf.untyped_storage()
            start = storage.data_ptr()
            first, last = start // mmap.PAGESIZE, -(-(start + storage.nbytes()) // mmap.PAGESIZE)
            found.add((first * mmap.PAGESIZE, last * mmap.PAGESIZE))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(found):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


class _Window:
    """A range of the target, from ``start`` to ``stop``, on its way through a pinned buffer.

    ``end`` is recorded behind its copies.
    """

    def __init__(self, buffer: torch.Tensor, start: int, stop: int) -> None:
        self._buffer = buffer
        self.start, self.stop = start, stop
        self.end = _cuda.Event()
        self._filled: list[tuple[int, int]] = []

    def add(self, place: int, part: torch.Tensor) -> None:
        """Queue the copy of ``part``, which belongs at ``place`` of the target."""
        offset = place - self.start
        self._buffer[offset : offset + part.numel()].copy_(part, non_blocking=True)
        self._filled.append((place, part.numel()))

    def empty_into(self, address: int) -> torch.Tensor:
        """Wait for the device, copy everything to its place, and return the buffer."""
        self.end.synchronize()
        for place, size in self._filled:
            source = self._buffer.data_ptr() + place - self.start
            ctypes.memmove(address + place, source, size)
        return self._buffer
