"""Measures how long a worker waits for the sums of other groups, on its host or on its device."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

# Waits on a device that nobody has asked for: those of the present step are far fewer.
MAX_WAITS = 10_000


class _DeviceWait(NamedTuple):
    """Events at both ends of a wait on ``device``."""

    device: torch.device
    began: torch.cuda.Event
    ended: torch.cuda.Event


class WaitTimes:
    """The waits for sums since they were read last.

    On a device the host runs ahead: it waits for its own kernels and for the other groups in one
    call. There the time counts from the end of the work that was enqueued before, by events of the
    device.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._on_device: deque[_DeviceWait] = deque(maxlen=MAX_WAITS)
        # By their devices: to make one takes longer than to record it.
        self._unused: dict[torch.device, list[torch.cuda.Event]] = {}

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
            ended = self._record_event(tensor)
            self._on_device.append(_DeviceWait(tensor.device, began, ended))

    def _record_event(self, tensor: torch.Tensor) -> torch.cuda.Event:
        unused = self._unused.setdefault(tensor.device, [])
        event = unused.pop() if unused else _make_event()
        event.record(torch.cuda.current_stream(tensor.device))
        return event

    def pop_seconds(self) -> float:
        """Return how long the worker has waited since the last call; waits for nothing.

        What the device has not reached yet is left for the next call.
        """
        while self._on_device and self._on_device[0].ended.query():  # type: ignore[no-untyped-call]
            wait = self._on_device.popleft()
            self._waited_s += wait.began.elapsed_time(wait.ended) / 1000
            self._unused[wait.device] += [wait.began, wait.ended]
        seconds, self._waited_s = self._waited_s, 0.0
        return seconds


def _make_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
