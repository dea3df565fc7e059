"""Orders what another thread does on devices behind the work of the training thread.

A thread has its own current streams. Those of a program that trains on the default ones are the
same in all threads; those of another program are not ordered with them.
"""

from __future__ import annotations

from typing import Any

import torch

# Torch declares no types for its streams and events.
_cuda: Any = torch.cuda


class TrainingStreams:
    """The work of the training thread on its own streams at one moment."""

    def __init__(self) -> None:
        self._recorded: list[tuple[int, Any]] = []

    def record(self) -> None:
        """Record what is queued now; on the training thread."""
        self._recorded = []
        if not _cuda.is_initialized():
            return
        for index in range(_cuda.device_count()):
            stream = _cuda.current_stream(index)
            if stream != _cuda.default_stream(index):
                self._recorded.append((index, stream.record_event()))

    def wait(self) -> None:
        """Order the present thread's streams behind what was recorded; the CPU does not wait."""
        for index, event in self._recorded:
            _cuda.current_stream(index).wait_event(event)
