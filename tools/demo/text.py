"""Decides what the demo reads: the Python standard library's sources, as characters."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

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


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The parts of ``corpus``, one after the other, of ``context`` characters each.

    A sample is the characters, and those that follow each: both int64 of shape (context,).
    """

    def __init__(self, corpus: Corpus, context: int) -> None:
        self._tokens, self._context = corpus.tokens, context

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * self._context
        end = begin + self._context
        return self._tokens[begin:end], self._tokens[begin + 1 : end + 1]


def _token_of_byte() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    table = np.full(256, _OTHER, dtype=np.int64)
    table[ord(" ") : ord("~") + 1] = np.arange(1, 96)
    table[ord("\n")] = 0
    return table
