"""Trains in a group of one worker, perhaps unlike the others; run by test_likeness.py."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.demo.fingerprint import fingerprint
from torchft_svc.client import DistributedDataParallel, Manager, OptimizerWrapper
from torchft_svc.errors import TorchFTError

# A step takes at least so long: groups that start need the processors.
PACE_S = 0.02


class Heads(nn.Module):
    """Two parts with equal shapes, in the order of ``names``."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Conv2d(3, 2, 3) for name in names})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        averaged: torch.Tensor = self.heads["a"](inputs) - 2 * self.heads["b"](inputs)
        return averaged


def run(kind: str, file: Path) -> None:
    """Train until this process is ended; ``kind`` is what is special about it.

    Appends to ``file`` one JSON object for each step: whether it was committed, or why not. The
    last one is the error that a call raised.
    """
    try:
        _train(kind, file)
    except TorchFTError as error:
        _append(file, raised=f"{type(error).__name__}: {error}")
        raise


def _train(kind: str, file: Path) -> None:
    torch.manual_seed(1)
    if "checked" in kind:
        os.environ["TORCHFT_CHECK_COLLECTIVES"] = "1"
    width = 512 if kind == "a bigger model" else 4
    strides = torch.channels_last if kind == "channels last" else torch.contiguous_format
    model: nn.Module = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 2, 3))
    model = model.to(memory_format=strides)
    if "heads" in kind:
        model = Heads(["a", "b"] if kind == "heads" else ["b", "a"])
    branch = nn.Conv2d(3, 4, 3)
    both = nn.ModuleList([model, branch])
    sgd = torch.optim.SGD(both.parameters(), lr=0.01)
    manager = Manager(
        state_dict=both.state_dict,
        load_state_dict=both.load_state_dict,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=5 if "once" in kind else 20),
        quorum_timeout=timedelta(seconds=60),
        use_async_quorum="a synchronous quorum" not in kind,
        min_replica_size=2 if "another minimum" in kind else 1,
    )
    parallel = model if "by hand" in kind else DistributedDataParallel(manager, model)
    other = DistributedDataParallel(manager, branch) if "branch" in kind else None
    optimizer = OptimizerWrapper(manager, sgd)
    inputs = torch.randn(2, 3, 8, 8)
    at_step_3 = "once" in kind
    while True:
        time.sleep(PACE_S)
        optimizer.zero_grad()
        if at_step_3 and manager.current_step() == 3:
            at_step_3 = False
            if "before" in kind:
                manager.allreduce(torch.ones(4096)).wait()
        for numel in _averaged(kind):
            manager.allreduce(torch.ones(numel)).wait()
        loss = parallel(inputs).square().mean()
        if other is not None and (kind != "a branch until step 2" or manager.current_step() < 2):
            branched = other(inputs).square().mean()
            loss = branched if kind == "the branch alone" else loss + branched
        loss.backward()
        for gradient in [p.grad for p in model.parameters() if parallel is model]:
            manager.allreduce(gradient).wait()
        if not at_step_3 and "once behind" in kind:
            kind = ""
            manager.allreduce(torch.ones(1)).wait()
        committed = optimizer.step()
        _append(
            file,
            step=manager.current_step(),
            committed=committed,
            groups=manager.num_participants(),
            error=str(manager.errored() or ""),
            hash=fingerprint(both.state_dict(), sgd.state_dict()),
        )


def _averaged(kind: str) -> tuple[int, ...]:
    """The sizes of what is averaged at the beginning of each step."""
    if "an average first" in kind:
        return 4, 4096
    return (4096, 4) if "an average last" in kind else ()


def _append(file: Path, **fields: Any) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps({"pid": os.getpid(), **fields}) + "\n")
