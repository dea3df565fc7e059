"""Memory that the trainer and the process of its collectives share."""

from __future__ import annotations

import abc
import ctypes
import math
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchft_svc.client.process_groups.isolated.messages import Place, Share, ShareDevice
from torchft_svc.host.uninterruptible import nothing

# Tensors start at multiples of this, for vector instructions.
ALIGNMENT = 64
# Smaller segments would be too many.
MIN_SEGMENT_BYTES = 64 << 10
# Torch's threads copy faster than one, but spin for a moment afterwards. Up to this size that costs
# more than it saves, because the other process needs the processor.
MAX_PLAIN_COPY_BYTES = 8 << 20

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
# Makes the current stream wait for the results.
StreamWait = Callable[[], None]


class Segment(abc.ABC):
    """Memory of the trainer that the process of its collectives has mapped, too."""

    # The file descriptor that follows the announcement, if there is one.
    descriptor: int | None = None

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes

    @abc.abstractmethod
    def announce(self) -> Share | ShareDevice:
        """The message with which the other process maps it."""

    @abc.abstractmethod
    def tensor(self, place: Place) -> torch.Tensor:
        """The tensor at ``place``."""

    @abc.abstractmethod
    def put(self, pairs: Pairs) -> None:
        """Copy the second of each pair into the first, which is in this segment."""

    @abc.abstractmethod
    def fetch(self, pairs: Pairs) -> StreamWait:
        """Copy the second of each pair, which is in this segment, into the first."""

    def is_idle(self) -> bool:
        """Whether the trainer does not use it any more."""
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Free it after the other process has exited; its tensors must not be used any more."""


class HostSegment(Segment):
    """``num_bytes`` of shared memory; another process maps it by ``descriptor``."""

    descriptor: int

    def __init__(self, number: int, descriptor: int, num_bytes: int) -> None:
        super().__init__(number, num_bytes)
        self.descriptor = descriptor
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    @classmethod
    def create(cls, number: int, num_bytes: int) -> HostSegment:
        """New memory, freed when the last process that maps it closes it or exits."""
        descriptor = os.memfd_create("torchft-collectives")
        os.ftruncate(descriptor, num_bytes)
        return cls(number, descriptor, num_bytes)

    def announce(self) -> Share:
        return Share(self.number, self.num_bytes)

    def tensor(self, place: Place) -> torch.Tensor:
        return tensor_at(self._bytes, place)

    def put(self, pairs: Pairs) -> None:
        for shared, source in pairs:
            _copy(shared, source)

    def fetch(self, pairs: Pairs) -> StreamWait:
        for result, shared in pairs:
            _copy(result, shared)
        return nothing

    def run(self, launch: Callable[[], torch.distributed.Work]) -> torch.distributed.Work:
        """Start an operation on tensors in this segment."""
        return launch()

    def close(self) -> None:
        """Close the descriptor; tensors in this segment stay valid."""
        os.close(self.descriptor)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    num_bytes = source.numel() * source.element_size()
    if num_bytes > MAX_PLAIN_COPY_BYTES or not (_is_plain(target) and _is_plain(source)):
        target.copy_(source)
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its values contiguously."""
    on_host = tensor.device.type == "cpu" and tensor.is_contiguous()
    return on_host and not (tensor.is_conj() or tensor.is_neg())


def tensor_at(memory: torch.Tensor, place: Place) -> torch.Tensor:
    """The tensor at ``place`` of the bytes in ``memory``."""
    size = math.prod(place.shape) * place.dtype.itemsize
    part = memory[place.offset : place.offset + size]
    return part.view(place.dtype).view(place.shape)


@dataclass(slots=True)
class Loan:
    """A segment that one operation uses."""

    segment: Segment
    places: list[Place]

    def tensors(self) -> list[torch.Tensor]:
        return [self.segment.tensor(place) for place in self.places]


class Pool:
    """Segments that are reused by later operations; freed as a whole.

    An operation gets a free one that is large enough, or a new one: sizes are powers of two, so a
    program that repeats its steps soon needs no new ones.

    Args:
        create: makes a segment from its number and its size in bytes.
        on_device: the other process' device may write to it until that process has exited.
    """

    def __init__(self, create: Callable[[int, int], Segment], *, on_device: bool = False) -> None:
        self.on_device = on_device
        self._create = create
        self._free: list[Segment] = []
        self._all: list[Segment] = []

    def lend(self, tensors: Sequence[torch.Tensor]) -> tuple[Loan, bool]:
        """Room for ``tensors``, and whether its segment is new."""
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        segment = self._pop_free(end)
        is_new = segment is None
        if segment is None:
            size = 1 << (max(end, MIN_SEGMENT_BYTES) - 1).bit_length()
            segment = self._create(len(self._all), size)
            self._all.append(segment)
        places = [
            Place(segment.number, offset, tuple(tensor.shape), tensor.dtype)
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]
        return Loan(segment, places), is_new

    def give_back(self, loan: Loan) -> None:
        """The operation has ended in both processes."""
        self._free.append(loan.segment)

    def _pop_free(self, num_bytes: int) -> Segment | None:
        fitting = [segment for segment in self._free if segment.num_bytes >= num_bytes]
        if not fitting:
            return None
        smallest = min(fitting, key=lambda segment: segment.num_bytes)
        self._free.remove(smallest)
        return smallest

    def is_idle(self) -> bool:
        """Whether the trainer does not use any segment any more."""
        return all(segment.is_idle() for segment in self._all)

    def close(self) -> None:
        """Free all segments."""
        for segment in self._all:
            segment.close()
        self._all, self._free = [], []
