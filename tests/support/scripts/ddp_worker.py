"""A launched worker that trains with torch's DDP in one world after the other, until it is ended.

Most of a step is the transfer of its gradients (24 MB), so that a peer is mostly lost in the middle
of an operation. It prints a line for each step, and for each world that it has lost.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchft_svc.elastic import WorkerInfo, get_worker_info, world_changed

_WIDTH, _DEPTH = 700, 12


def main() -> None:
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    step = 0  # lost if this process is restarted, as all of its memory
    while True:
        info = get_worker_info()
        try:
            dist.init_process_group("gloo", **info.get_pg_parameters())
            wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
            while True:
                is_left = train_step(wrapped, optimizer)
                step += 1
                say(info, f"step {step}")
                if is_left:
                    break
        except RuntimeError as error:  # a peer is gone, or another world replaces this one
            say(info, f"lost: {type(error).__name__}")
        if dist.is_initialized():
            dist.destroy_process_group()
        wrapped = None


def train_step(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether all workers leave this world after the step."""
    optimizer.zero_grad()
    wrapped(torch.ones(2, _WIDTH)).sum().backward()
    leaves = torch.tensor([float(world_changed())])
    dist.all_reduce(leaves)
    optimizer.step()
    return bool(leaves.item())


def say(info: WorkerInfo, what: str) -> None:
    world = f"round {info.round} of {info.world_size}"
    print(f"pid {os.getpid()} {world} {what}\n", end="", flush=True)


if __name__ == "__main__":
    main()
