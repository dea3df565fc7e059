"""A replica group of one worker that trains on a GPU: Manager, DDP and optimizer.

Writes ``commit STEP PARTICIPANTS LOSS DIGEST`` for every update, ends after ``--steps``.
"""

from __future__ import annotations

import argparse
import hashlib
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from torchft_svc.client import (
    DistributedDataParallel,
    Manager,
    OptimizerWrapper,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)

DEVICE = torch.device("cuda", 0)
TIMEOUT = timedelta(seconds=20)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The digest of every weight and every value that the optimizer keeps."""
    seen = hashlib.sha256()
    tensors = list(model.state_dict().values())
    for entry in optimizer.state_dict()["state"].values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        seen.update(tensor.cpu().numpy().tobytes())
    return seen.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--name", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--side-stream", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(options.name)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)]
    model = nn.Sequential(*layers).to(DEVICE)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    manager = Manager(
        pg=ProcessGroupNCCL(TIMEOUT) if options.backend == "nccl" else ProcessGroupGloo(TIMEOUT),
        state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
        load_state_dict=load,
        lighthouse_addr=options.lighthouse,
        replica_id=str(options.name),
        timeout=TIMEOUT,
    )
    optimizer = OptimizerWrapper(manager, adam)
    parallel = DistributedDataParallel(manager, model, bucket_cap_mb=0.1)
    if options.side_stream:
        torch.cuda.set_stream(torch.cuda.Stream())
    print("ready", flush=True)
    while (step := manager.current_step()) < options.steps:
        generator = torch.Generator().manual_seed(1000 * step + options.name)
        inputs = torch.randn(256, 64, generator=generator).to(DEVICE)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(inputs), inputs.sum(1, keepdim=True) / 8)
        loss.backward()
        participants = manager.num_participants()
        if optimizer.step():
            print(
                f"commit {manager.current_step()} {participants} {loss.item():.6f} "
                f"{digest(model, adam)}",
                flush=True,
            )
        else:
            print(f"discarded {step}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
