"""Memory of a CUDA device that the trainer and the process of its collectives share.

The trainer owns it, so the other process may be killed at any moment. That process orders its
stream behind an event of the trainer. The trainer's streams never wait for an event of that
process: if it were killed before, they would wait forever, whoever recorded the event again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchft_svc.client.process_groups.isolated.messages import Place, ShareDevice
from torchft_svc.client.process_groups.isolated.segments import (
    Pairs,
    Segment,
    StreamWait,
    tensor_at,
)

# Torch declares no types for its streams and events.
_cuda: Any = torch.cuda


class DeviceSegment(Segment):
    """The trainer's side. Results are copied on ``stream``, not on the trainer's current one."""

    def __init__(self, number: int, num_bytes: int, *, device: torch.device, stream: Any) -> None:
        super().__init__(number, num_bytes)
        self._device = device
        self._stream = stream
        self._bytes: torch.Tensor | None = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        with _cuda.device(device):
            storage: Any = self._bytes.untyped_storage()
            self._memory: tuple[Any, ...] = storage._share_cuda_()
            self._ready = _cuda.Event(interprocess=True)  # the inputs are copied
            self._handle = self._ready.ipc_handle()
        self._fetched: Any = None

    def announce(self) -> ShareDevice:
        return ShareDevice(self.number, self._device.index, self._memory, self._handle)

    def tensor(self, place: Place) -> torch.Tensor:
        assert self._bytes is not None, "closed"
        return tensor_at(self._bytes, place)

    def put(self, pairs: Pairs) -> None:
        """See `Segment.put`; ordered by the current stream."""
        with _cuda.device(self._device):
            stream = _cuda.current_stream()
            if self._fetched is not None:
                stream.wait_event(self._fetched)  # the previous results may still be read
            for shared, source in pairs:
                shared.copy_(source, non_blocking=True)
            self._ready.record(stream)

    def fetch(self, pairs: Pairs) -> StreamWait:
        """See `Segment.fetch`; the operation has ended, and the copy is queued."""
        with _cuda.stream(self._stream):
            for result, shared in pairs:
                result.copy_(shared, non_blocking=True)
                if result.is_cuda:
                    result.record_stream(self._stream)
            fetched = _cuda.Event()
            fetched.record(self._stream)
        self._fetched = fetched
        return functools.partial(_order_current_stream, fetched, self._device)

    def is_idle(self) -> bool:
        return bool(self._ready.query() and (self._fetched is None or self._fetched.query()))

    def close(self) -> None:
        if self._bytes is not None:
            # Torch keeps shared memory until the other process releases it. That process was
            # killed, so it is released here; otherwise it would never be freed.
            counter, offset = self._memory[4:6]
            torch.UntypedStorage._release_ipc_counter_cuda(counter, offset)
            self._bytes = None


class DeviceWindow:
    """The side of the process that runs the collectives."""

    def __init__(self, message: ShareDevice) -> None:
        device = torch.device("cuda", message.device_index)
        with _cuda.device(device):
            storage = torch.UntypedStorage._new_shared_cuda(*message.memory)
            self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            self._ready = _cuda.Event.from_ipc_handle(device, message.ready)
            self._done = _cuda.Event()
            # One per segment: an operation must not wait for another one.
            self._stream = new_stream(device)

    def tensor(self, place: Place) -> torch.Tensor:
        return tensor_at(self._bytes, place)

    def run(self, launch: Callable[[], torch.distributed.Work]) -> torch.distributed.Work:
        """Start an operation on tensors in this segment, ordered behind the trainer's stream.

        The operation's ``wait()`` must order the current stream, and not block the CPU.
        """
        with _cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            work = launch()
            work.wait()
            self._done.record(self._stream)
        return work

    def is_over(self) -> bool:
        """Whether the operation that was started last has ended on the device."""
        return bool(self._done.query())


def _order_current_stream(event: Any, device: torch.device) -> None:
    _cuda.current_stream(device).wait_event(event)


def new_stream(device: torch.device) -> Any:
    return _cuda.Stream(device)
