"""One trainer on a CPU, alone in its job, that reports how much memory it has used."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel
from torch.optim import SGD

from tools.benchmarks.children.workload import print_line

TRAINERS = ("plain", "ddp", "ddp_views", "ours")


@contextmanager
def ddp(model: nn.Module, sgd: SGD, *, views: bool) -> Iterator[tuple[nn.Module, Any]]:
    """torch's DDP in a world of one; ``views``: gradients are kept in the buckets alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield parallel.DistributedDataParallel(model, gradient_as_bucket_view=views), sgd
    dist.destroy_process_group()


@contextmanager
def ours(model: nn.Module, sgd: SGD, lighthouse: str) -> Iterator[tuple[nn.Module, Any]]:
    """A replica group that is alone in its job."""
    from torchft_svc.client import DistributedDataParallel, Manager, OptimizerWrapper

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    with Manager(
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        load_state_dict=load_state_dict,
        lighthouse_addr=lighthouse,
    ) as manager:
        yield DistributedDataParallel(manager, model), OptimizerWrapper(manager, sgd)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes(pid: int | str = "self") -> int:
    """The most that was in RAM at one time since the program of ``pid`` was started or forked."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report the peak of a process's memory (VmHWM)")


def train(model: nn.Module, optimizer: Any, width: int, num_steps: int) -> list[int]:
    """The memory after each step, in bytes."""
    inputs, after = torch.randn(8, width), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        after.append(resident_bytes())
    return after


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    parser.add_argument("--lighthouse", default="")
    for flag in ("width", "depth", "steps"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    flags = parser.parse_args()

    torch.set_num_threads(1)
    imported = resident_bytes()
    layers: list[nn.Module] = []
    for _ in range(flags.depth):
        layers += [nn.Linear(flags.width, flags.width, bias=False), nn.ReLU()]
    model = nn.Sequential(*layers)
    sgd = SGD(model.parameters(), lr=0.01)

    @contextmanager
    def plain() -> Iterator[tuple[nn.Module, Any]]:
        yield model, sgd

    trainers: dict[str, Callable[[], Any]] = {
        "plain": plain,
        "ddp": lambda: ddp(model, sgd, views=False),
        "ddp_views": lambda: ddp(model, sgd, views=True),
        "ours": lambda: ours(model, sgd, flags.lighthouse),
    }
    with trainers[flags.trainer]() as (wrapped, optimizer):
        after = train(wrapped, optimizer, flags.width, flags.steps)
        others = sum(
            child.memory_full_info().uss for child in psutil.Process().children(recursive=True)
        )
    # The kernel updates its high-water mark a few pages late.
    peak = max(peak_bytes(), *after)
    report = {"imported": imported, "after": after, "peak": peak, "others": others}
    print_line(json.dumps(report))


if __name__ == "__main__":
    main()
