"""What the examples for slow links train: a character model on Python's own sources."""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchft_svc.client import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

CONTEXT, BATCH, WIDTH, VOCABULARY = 16, 64, 64, 128


def make_model() -> nn.Sequential:
    """Return a model that predicts the character after ``CONTEXT`` others."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 256),
        nn.ReLU(),
        nn.Linear(256, VOCABULARY),
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where to train."""
    parser.add_argument("--device", default="cpu", help="such as cuda:0, one for each group")


def make_process_group(device: str) -> ProcessGroup:
    """Return the process group for tensors on ``device``."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
        return ProcessGroupNCCL()
    return ProcessGroupGloo()


class Text:
    """Random batches of the text, and the loss and the speed since they were last shown."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._windows = whole.clamp(max=VOCABULARY - 1).unfold(0, CONTEXT + 1, 1)
        self._losses: list[float] = []
        self._since = time.monotonic()

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of ``model`` on a batch that this process draws by itself."""
        device = next(model.parameters()).device
        windows = self._windows[torch.randint(len(self._windows), (BATCH,))].to(device)
        loss = functional.cross_entropy(model(windows[:, :CONTEXT]), windows[:, CONTEXT])
        self._losses.append(loss.item())
        return loss

    def show(self, step: int, num_groups: int) -> None:
        """Print the mean loss, and the tokens per second, since the last call."""
        now = time.monotonic()
        mean = sum(self._losses) / len(self._losses)
        speed = len(self._losses) * BATCH / (now - self._since)
        print(
            f"synchronization {step} loss {mean:.3f} groups {num_groups} tokens/s {speed:.0f}",
            flush=True,
        )
        self._losses, self._since = [], now
