"""Random numbers that follow from where training is, so that none of their state is saved."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_NUMPY_SEEDS = 2**32
# Random numbers of different uses do not repeat those of another: of what is trained, and so on.
CREATION, VALIDATION, BETWEEN_STEPS = 11, 12, 13
ORDER, SAMPLES = 1, 2
# The finalizer of SplitMix64: any bit of its input changes half of those of its output.
SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
SPLITMIX_LAST = 31


def mix(*numbers: int) -> int:
    """A seed from ``numbers``, 0 to 2**63 - 1: any two lists of numbers have different ones."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_everything(*numbers: int) -> None:
    """Seed Python's, numpy's and torch's random numbers, on all devices, from ``numbers``."""
    seed = mix(*numbers)
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)


class RandomStream:
    """Random numbers of the host for one use, which do not depend on what others draw.

    Code inside of `going_on` begins with what follows from ``numbers``, and later goes on where it
    was left; those that the rest of the program draws are as if it had not run.
    """

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self._left: Any = None

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        outside = _host_states()
        if self._left is None:
            seed_everything(*self._numbers)
        else:
            _set_host_states(self._left)
        try:
            yield
        finally:
            self._left = _host_states()
            _set_host_states(outside)


def _host_states() -> Any:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_host_states(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


_WORD = 2**64 - 1


class SampleSeeds:
    """Seeds the random numbers of a process before each sample of one epoch is read.

    Those of the devices are left out: worker processes of a loader do not use them, and torch needs
    0.2 ms to seed them.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._base = mix(seed, SAMPLES, epoch)

    def seed_sample(self, index: int) -> None:
        """Make the random numbers that follow depend on the sample, and on nothing else."""
        number = (self._base + index * 0x9E3779B97F4A7C15) & _WORD
        for shift, factor in SPLITMIX:
            number = ((number ^ (number >> shift)) * factor) & _WORD
        number ^= number >> SPLITMIX_LAST
        random.seed(number)
        np.random.seed(number % _NUMPY_SEEDS)
        torch.default_generator.manual_seed(number)


@contextlib.contextmanager
def host_states_kept() -> Iterator[None]:
    """Return a block after which the random numbers of the host are as before it."""
    outside = _host_states()
    try:
        yield
    finally:
        _set_host_states(outside)
