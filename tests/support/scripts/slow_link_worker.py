"""A replica group that trains alone between synchronizations, and prints each of them.

``python slow_link_worker.py ALGORITHM SYNCS``: the algorithm is ``local_sgd``, ``diloco``,
``streaming`` (with delay and alpha) or ``quantized``. After each synchronization it prints
``agreed STEP DIGEST LOSS INNER``: a digest of what is equal in all groups then, the loss on data
that all groups share, and how many inner steps this process has made.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from torchft_svc.client import Manager
from torchft_svc.client.algorithms import DiLoCo, LocalSGD
from torchft_svc.testing.transport_contract import bits

SYNC_EVERY, INNER_S = 6, 0.01


def digest(state: Any) -> str:
    return hashlib.sha256(repr(bits(state)).encode()).hexdigest()[:16]


def main() -> None:
    name, last = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    fragments: list[nn.Module] = [model] if name == "diloco" else [model[0], model[2]]
    outer = [
        torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        for each in fragments
    ]
    data = torch.Generator().manual_seed(os.getpid())
    shared = torch.randn(64, 16, generator=torch.Generator().manual_seed(7))

    def loss_on(inputs: torch.Tensor) -> torch.Tensor:
        return (model(inputs) - inputs.sum(1, keepdim=True).tanh()).square().mean()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        load_state_dict=load,
        use_async_quorum=name == "local_sgd",
        timeout=timedelta(seconds=20),
    )
    options: dict[str, Any] = {}
    if name == "streaming":
        options = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
    if name == "quantized":
        options = {"should_quantize": True}
    algorithm: LocalSGD | DiLoCo
    if name == "local_sgd":
        algorithm = LocalSGD(manager, model, inner, SYNC_EVERY)
    else:
        algorithm = DiLoCo(manager, fragments, inner, outer, SYNC_EVERY, **options)
    num_inner = 0
    with algorithm:
        while (step := manager.current_step()) < last:
            inner.zero_grad()
            loss_on(torch.randn(16, 16, generator=data)).backward()
            time.sleep(INNER_S)
            inner.step()
            num_inner += 1
            if manager.current_step() > step:
                agreed = [each.state_dict() for each in algorithm._agreed]
                outside = [each.state_dict() for each in outer] if name != "local_sgd" else []
                with torch.no_grad():
                    loss = loss_on(shared).item()
                found = digest([agreed, outside])
                print(f"agreed {manager.current_step()} {found} {loss:.4f} {num_inner}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
