"""Measures how long a worker waits for the sums of other groups, on its host or on its device."""

from __future__ import annotations

import time
from collections import deque

import torch

# Waits on a device that nobody has asked for: those of the present step are far fewer.
MAX_WAITS = 10_000


class WaitTimes:
    """The waits for sums since they were read last.

    On a device the host runs ahead: it waits for its own kernels and for the other groups in one
    call. There the time counts from the end of the work that was enqueued before, by events of the
    device.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._on_device: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=MAX_WAITS)
        self._unused: list[torch.cuda.Event] = []  # to make one takes longer than to record it
        self._device: torch.device | None = None  # whose they are

    def begin_wait(self, tensor: torch.Tensor) -> float | torch.cuda.Event:
        """Begin a wait for the sum in ``tensor``; returns what `end_wait` needs.

        One that is not ended, because the sum has failed, does not count.
        """
        return self._record_event(tensor) if tensor.is_cuda else time.monotonic()

    def end_wait(self, tensor: torch.Tensor, began: float | torch.cuda.Event) -> None:
        """End a wait that has begun with ``began``."""
        if isinstance(began, float):
            self._waited_s += time.monotonic() - began
        else:
            self._on_device.append((began, self._record_event(tensor)))

    def _record_event(self, tensor: torch.Tensor) -> torch.cuda.Event:
        if tensor.device != self._device:
            self._device, self._unused = tensor.device, []
            self._on_device.clear()
        event = self._unused.pop() if self._unused else _make_event()
        event.record(torch.cuda.current_stream(tensor.device))
        return event

    def pop_seconds(self) -> float:
        """Return how long the worker has waited since the last call; waits for nothing.

        What the device has not reached yet is left for the next call.
        """
        while self._on_device and self._on_device[0][1].query():  # type: ignore[no-untyped-call]
            before, after = self._on_device.popleft()
            self._waited_s += before.elapsed_time(after) / 1000
            self._unused += [before, after]
        seconds, self._waited_s = self._waited_s, 0.0
        return seconds


def _make_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
