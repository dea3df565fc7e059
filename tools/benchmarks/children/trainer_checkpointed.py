"""A worker of plain torch DDP under torchrun, which starts again from the last checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tools.benchmarks.children.workload import build, shape_from_flags


def main() -> None:
    shape, flags = shape_from_flags()
    _print(f"worker {os.environ['RANK']} {os.getpid()}")
    dist.init_process_group("gloo")
    model, sgd = build(shape)
    step = 0
    checkpoint = Path(flags.checkpoint)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        sgd.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = DistributedDataParallel(model)
    inputs, labels = shape.draw_batch()
    while True:
        sgd.zero_grad()
        time.sleep(shape.pause_s)
        nn.functional.cross_entropy(ddp(inputs), labels).backward()  # type: ignore[no-untyped-call]
        sgd.step()
        step += 1
        if dist.get_rank():
            continue
        _print(f"commit {step} {dist.get_world_size()} {time.monotonic_ns()}")
        if step % flags.checkpoint_every == 0:
            saved = {"model": model.state_dict(), "optimizer": sgd.state_dict(), "step": step}
            beside = checkpoint.with_suffix(f".{os.getpid()}")
            torch.save(saved, beside)
            beside.replace(checkpoint)


def _print(line: str) -> None:
    """Print in one write: all workers of the launcher share its output."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
