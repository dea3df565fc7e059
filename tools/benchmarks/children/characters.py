"""What all groups of the slow links' benchmark train: a model of characters, and text for it.

Only torch is needed, so that the public release's program trains this very model.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT, BATCH, VOCABULARY = 16, 64, 128
WIDTH, HIDDEN = 64, 1024
# Inner steps from one synchronization to the next, and those that a fragment's average may take.
SYNC_EVERY, DELAY, ALPHA = 24, 4, 0.5
# Outer optimizer of DiLoCo's paper.
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def make_model() -> nn.Sequential:
    """Return a model of 3.3 million parameters that predicts the character after others."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Flatten(),
            nn.Linear(CONTEXT * WIDTH, HIDDEN),
            nn.ReLU(),
        ),
        nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()),
        nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, VOCABULARY)),
    )


class Text:
    """Python's own sources; this group's batches, and windows that no group trains on."""

    def __init__(self, seed: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        windows = whole.clamp(max=VOCABULARY - 1).unfold(0, CONTEXT + 1, 1)
        split = len(windows) * 9 // 10
        self._windows, self._unseen = windows[:split], windows[split::50]
        self._generator = torch.Generator().manual_seed(seed)

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of ``model`` on the next batch."""
        chosen = torch.randint(len(self._windows), (BATCH,), generator=self._generator)
        return _loss(model, self._windows[chosen])

    @torch.no_grad()
    def unseen_loss(self, model: nn.Module) -> float:
        """Return the loss of ``model`` on what nobody trains on."""
        return _loss(model, self._unseen).item()


def _loss(model: nn.Module, windows: Tensor) -> Tensor:
    return functional.cross_entropy(model(windows[:, :CONTEXT]), windows[:, CONTEXT])
