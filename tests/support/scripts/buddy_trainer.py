"""A replica group whose states are copied: prints each committed step with a digest of its state.

buddy_trainer.py <lighthouse> <name> <seed> <steps between copies> [<seconds of a step>]
"""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import torch
from torch import nn

from torchft_svc.client import DistributedDataParallel, Manager, Optimizer


def digest_of(state: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for tensor in state["model"].values():
        digest.update(tensor.detach().numpy().tobytes())
    for values in state["optimizer"]["state"].values():
        for value in values.values():
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()[:16]


def main(lighthouse: str, name: str, seed: str, every: str, step_s: str = "0.02") -> None:
    torch.manual_seed(int(seed))
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
    inner = torch.optim.Adam(model.parameters(), lr=0.01)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        lighthouse_addr=lighthouse,
        replica_id=name,
        load_state_dict=load,
        state_dict=save,
        buddy_every=int(every),
    )
    optimizer = Optimizer(manager, inner)
    parallel = DistributedDataParallel(manager, model)
    while True:
        optimizer.zero_grad()
        if (step := manager.current_step()) > 0:
            sys.stdout.write(f"BEGINS {step} {digest_of(save())}\n")  # one write: logs do not mix
            sys.stdout.flush()
        parallel(torch.randn(4, 16)).square().mean().backward()
        time.sleep(float(step_s))
        optimizer.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
