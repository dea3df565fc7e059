"""Decides what the demo reads: the Python standard library's sources, as characters.

A batch is a pure function of (seed, step, group). There is no position in the data that a crash
could lose: a discarded step draws the same batch again, and no two steps share one.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Newline, the 95 printable ASCII characters, and one token for everything else.
VOCABULARY = 97
_OTHER = 96
# Enough that a minute of training never sees it all, and read in a few milliseconds.
_MAX_BYTES = 4_000_000


class Corpus:
    """The text as one long row of tokens, the same in every process on the machine."""

    def __init__(self, folder: Path | None = None, max_bytes: int = _MAX_BYTES) -> None:
        """Read the ``*.py`` files of ``folder`` (default: the standard library) in order of name.

        Raises:
            FileNotFoundError: the folder holds no Python sources.
        """
        folder = folder or Path(sysconfig.get_paths()["stdlib"])
        text = bytearray()
        for path in sorted(folder.glob("*.py")):
            text += path.read_bytes()
            if len(text) >= max_bytes:
                break
        if not text:
            raise FileNotFoundError(f"{folder} holds no Python sources to train on")
        characters = np.frombuffer(bytes(text[:max_bytes]), dtype=np.uint8)
        self.tokens: Tensor = torch.from_numpy(_token_of_byte()[characters])

    def batch(
        self, *, seed: int, step: int, group: int, size: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs and next-character targets, both int64 of shape (size, context)."""
        draw = np.random.default_rng((seed, step, group))
        starts = draw.integers(0, len(self.tokens) - context, size=size)
        places = torch.from_numpy(starts)[:, None] + torch.arange(context)
        return self.tokens[places], self.tokens[places + 1]


def _token_of_byte() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    table = np.full(256, _OTHER, dtype=np.int64)
    table[ord(" ") : ord("~") + 1] = np.arange(1, 96)
    table[ord("\n")] = 0
    return table
