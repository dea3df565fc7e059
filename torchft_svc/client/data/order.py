"""The order of an epoch's samples, which follows from the seed and the number of the epoch.

A shuffled order is a keyed permutation of the index range (a Feistel network with cycle walking:
Black and Rogaway, "Ciphers with Arbitrary Finite Domains"), so any part of it is computed alone:
nothing is stored for samples that nobody reads, and a group that joins starts anywhere at once. It
is the same on all machines and with all versions of torch and numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchft_svc.client.data.seeds import ORDER, SPLITMIX, SPLITMIX_LAST, mix

_Indices = npt.NDArray[np.uint64]
# An order is computed in blocks, because numpy needs as long for 30 numbers as for 1000.
BLOCK = 4096
_NUM_ROUNDS = 8
# Of the numbers that are permuted: those of fewer bits would be shuffled less evenly.
_MIN_BITS = 8


class Order(Protocol):
    """The samples of one epoch in their order."""

    def __len__(self) -> int: ...

    def indices(self, begin: int, end: int) -> list[int]:
        """The indices in the data set of the samples ``begin`` to ``end`` of the epoch.

        Numbers behind the last sample mean those from the first one on.
        """


@dataclass(frozen=True, slots=True)
class StraightOrder:
    """The order of the data set itself."""

    size: int

    def __len__(self) -> int:
        return self.size

    def indices(self, begin: int, end: int) -> list[int]:
        return [place % self.size for place in range(begin, end)]


@dataclass(slots=True)
class ListedOrder:
    """An order that a sampler of the program has drawn."""

    drawn: list[int]

    def __len__(self) -> int:
        return len(self.drawn)

    def indices(self, begin: int, end: int) -> list[int]:
        return [self.drawn[place % len(self.drawn)] for place in range(begin, end)]


@dataclass(slots=True)
class ShuffledOrder:
    """Each of ``size`` samples once, in an order that follows from ``seed`` and ``epoch``."""

    size: int
    seed: int
    epoch: int
    _keys: list[np.uint64] = field(init=False)
    _bits: tuple[int, int] = field(init=False)  # of the left and of the right half
    _number: int = -1  # of the block in `_block`
    _block: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbers = [mix(self.seed, ORDER, self.epoch, each) for each in range(_NUM_ROUNDS)]
        self._keys = [np.uint64(number) for number in numbers]
        bits = max(_MIN_BITS, (self.size - 1).bit_length())
        self._bits = bits // 2, bits - bits // 2

    def __len__(self) -> int:
        return self.size

    def indices(self, begin: int, end: int) -> list[int]:
        found: list[int] = []
        while begin < end:
            place = begin % self.size
            number, offset = divmod(place, BLOCK)
            if number != self._number:
                self._block, self._number = self._compute_block(number), number
            part = self._block[offset : offset + end - begin]
            found += part
            begin += len(part)
        return found

    def _compute_block(self, number: int) -> list[int]:
        begin = number * BLOCK
        places = np.arange(begin, min(begin + BLOCK, self.size), dtype=np.uint64)
        found = self._permute(places)
        while (outside := found >= self.size).any():
            # Walking the cycle of a number that is outside leads inside again, and nobody else
            # comes to the same place.
            found[outside] = self._permute(found[outside])
        indices: list[int] = found.tolist()
        return indices

    def _permute(self, numbers: _Indices) -> _Indices:
        """A permutation of all numbers of ``_bits``: at most twice ``size``, or 256."""
        num_left, num_right = self._bits
        left_mask, right_mask = np.uint64(2**num_left - 1), np.uint64(2**num_right - 1)
        shift = np.uint64(num_right)
        left, right = numbers >> shift, numbers & right_mask
        for number, key in enumerate(self._keys):
            if number % 2:
                right ^= _scramble(left, key) & right_mask
            else:
                left ^= _scramble(right, key) & left_mask
        permuted: _Indices = (left << shift) | right
        return permuted


def _scramble(numbers: _Indices, key: np.uint64) -> _Indices:
    mixed = numbers + key
    for shift, factor in SPLITMIX:
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(SPLITMIX_LAST)
    return mixed
