"""`torchft.utils`: what programs call on the current accelerator, if there is one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def get_stream_context(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Return a block whose operations go to ``stream``; None, or no accelerator: to the current."""
    if stream is None:
        return contextlib.nullcontext()
    device = getattr(torch, stream.device.type, None)
    context = getattr(device, "stream", None)
    return contextlib.nullcontext() if context is None else context(stream)


def record_event() -> torch.Event | None:
    """Record an event in the current stream, to be waited for on another; None on a CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    event = torch.Event(accelerator)
    event.record(torch.accelerator.current_stream())
    return event


def synchronize() -> None:
    """Wait for all operations on the current accelerator; returns at once without one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
