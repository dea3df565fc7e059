"""Shared memory in which both processes see the tensors of a collective."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchft_svc.client.process_groups.isolated.messages import Place

# A tensor begins at a multiple of this: what vector instructions want.
ALIGNMENT = 64
# Smaller segments would be many, and a page is the least there is.
MIN_SEGMENT_BYTES = 64 << 10


class Segment:
    """``num_bytes`` of memory; ``descriptor`` is how another process gets at it."""

    def __init__(self, number: int, descriptor: int, num_bytes: int) -> None:
        self.number = number
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    @classmethod
    def create(cls, number: int, num_bytes: int) -> Segment:
        """New memory, freed when the last process that has it closes it or ends."""
        descriptor = os.memfd_create("torchft-collectives")
        os.ftruncate(descriptor, num_bytes)
        return cls(number, descriptor, num_bytes)

    def tensor(self, place: Place) -> torch.Tensor:
        """The tensor at ``place``."""
        size = math.prod(place.shape) * place.dtype.itemsize
        part = self._bytes[place.offset : place.offset + size]
        return part.view(place.dtype).view(place.shape)

    def close(self) -> None:
        """Let another process keep it alive, or nobody; tensors in it stay valid."""
        os.close(self.descriptor)


@dataclass(slots=True)
class Loan:
    """A segment that one operation uses."""

    segment: Segment
    places: list[Place]

    def tensors(self) -> list[torch.Tensor]:
        """Those in the segment, in order."""
        return [self.segment.tensor(place) for place in self.places]


class Pool:
    """Segments that are used again by later operations; freed as a whole.

    An operation gets one that is large enough, or a new one: sizes are powers of two, so a
    program that repeats its steps soon needs no more.
    """

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._all: list[Segment] = []

    def lend(self, tensors: Sequence[torch.Tensor]) -> tuple[Loan, bool]:
        """Room for ``tensors``, and whether its segment is new."""
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        segment = self._take(end)
        is_new = segment is None
        if segment is None:
            size = 1 << (max(end, MIN_SEGMENT_BYTES) - 1).bit_length()
            segment = Segment.create(len(self._all), size)
            self._all.append(segment)
        places = [
            Place(segment.number, offset, tuple(tensor.shape), tensor.dtype)
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]
        return Loan(segment, places), is_new

    def give_back(self, loan: Loan) -> None:
        """The operation is over on both sides."""
        self._free.append(loan.segment)

    def _take(self, num_bytes: int) -> Segment | None:
        fitting = [segment for segment in self._free if segment.num_bytes >= num_bytes]
        if not fitting:
            return None
        smallest = min(fitting, key=lambda segment: segment.num_bytes)
        self._free.remove(smallest)
        return smallest

    def close(self) -> None:
        """Free everything that no tensor refers to any more."""
        for segment in self._all:
            segment.close()
        self._all, self._free = [], []
