"""Random numbers that follow from where training is, so that none of their state is saved."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

_NUMPY_SEEDS = 2**32
# Random numbers of different uses do not repeat those of another: of what is trained, and so on.
CREATION, VALIDATION = 11, 12


def mix(*numbers: int) -> int:
    """A seed from ``numbers``, 0 to 2**63 - 1: any two lists of numbers have different ones."""
    told = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") >> 1


def seed_everything(*numbers: int) -> None:
    """Seed Python's, numpy's and torch's random numbers, on all devices, from ``numbers``."""
    seed = mix(*numbers)
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)
