"""A trainer whose step times on a GPU are measured: plain torch DDP over NCCL, or ours.

``synchronized``: torch's DDP that waits for the device before each update, as everybody must who
wants to know whether the gradients are good before they are applied.

``measure MODEL STEPS`` is answered with milliseconds for a step, as JSON: ``step`` with the device
idle at both ends of the whole run, and the time that the CPU spent in each phase.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as PlainDDP

from torchft_svc.client import (
    DistributedDataParallel,
    Manager,
    OptimizerWrapper,
    ProcessGroupNCCL,
)

DEVICE = torch.device("cuda", 0)
# Width, depth and batch of an MLP.
SHAPES = {"small": (128, 4, 256), "17 MB": (728, 8, 256), "400 MB": (3584, 8, 256)}
WARM_UP = 3
PHASES = ("zero_grad", "forward", "backward", "update")
Parts = dict[str, tuple[nn.Module, torch.optim.Optimizer]]


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    width, depth, _ = SHAPES[name]
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 16)).to(DEVICE)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def plain(options: argparse.Namespace) -> tuple[dict[str, Any], Callable[[], None]]:
    store = dist.TCPStore("127.0.0.1", options.store_port, 2, is_master=options.rank == 0)
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", store=store, rank=options.rank, world_size=2)
    made = {name: build(name) for name in SHAPES}
    ready = {name: (PlainDDP(model, device_ids=[0]), sgd) for name, (model, sgd) in made.items()}
    return ready, dist.destroy_process_group


def ours(options: argparse.Namespace) -> tuple[dict[str, Any], Callable[[], None]]:
    made = {name: build(name) for name in SHAPES}

    def state_dict() -> dict[str, Any]:
        return {name: [m.state_dict(), o.state_dict()] for name, (m, o) in made.items()}

    def load(state: dict[str, Any]) -> None:
        for name, (model, sgd) in made.items():
            model.load_state_dict(state[name][0])
            sgd.load_state_dict(state[name][1])

    manager = Manager(
        pg=ProcessGroupNCCL(timedelta(seconds=60)),
        state_dict=state_dict,
        load_state_dict=load,
        lighthouse_addr=options.lighthouse,
        replica_id=str(options.rank),
    )
    ready = {
        name: (DistributedDataParallel(manager, model), OptimizerWrapper(manager, sgd))
        for name, (model, sgd) in made.items()
    }
    return ready, manager.shutdown


def measure(name: str, model: nn.Module, optimizer: Any, num_steps: int) -> dict[str, float]:
    width, _, batch = SHAPES[name]
    inputs = torch.randn(batch, width, device=DEVICE)
    labels = torch.randint(16, (batch,), device=DEVICE)
    spent = dict.fromkeys(PHASES, 0.0)
    for step in range(WARM_UP + num_steps):
        if step == WARM_UP:
            torch.cuda.synchronize()
            spent = dict.fromkeys(PHASES, 0.0)
            began_at = time.perf_counter()
        at = [time.perf_counter()]
        optimizer.zero_grad()
        at.append(time.perf_counter())
        loss = nn.functional.cross_entropy(model(inputs), labels)
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        optimizer.step()
        at.append(time.perf_counter())
        for phase, start, end in zip(PHASES, at[:-1], at[1:], strict=True):
            spent[phase] += 1000 * (end - start) / num_steps
    torch.cuda.synchronize()
    return {"step": 1000 * (time.perf_counter() - began_at) / num_steps, **spent}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["plain", "synchronized", "ours"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store-port", type=int, default=0)
    parser.add_argument("--lighthouse", default="")
    options = parser.parse_args()
    ready, close = ours(options) if options.kind == "ours" else plain(options)
    if options.kind == "synchronized":
        for _, optimizer in ready.values():
            optimizer.register_step_pre_hook(lambda *_: torch.cuda.synchronize())
    print("ready", flush=True)
    for line in sys.stdin:
        name, _, num_steps = line.strip().rpartition(" ")
        print(json.dumps(measure(name, *ready[name], int(num_steps))), flush=True)
    close()


if __name__ == "__main__":
    main()
