"""A replica group of one worker that trains on a GPU: Manager, DDP and optimizer; or DiLoCo.

Writes ``commit STEP PARTICIPANTS LOSS DIGEST`` for every update, ends after ``--steps``. With
``--quantize`` the updates are those of DiLoCo's outer optimizer. With ``--formats`` it only
averages a tensor in each step, and writes ``averaged COMMITTED DIGEST ERROR``.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from torchft_svc.client import (
    DistributedDataParallel,
    Manager,
    OptimizerWrapper,
    ProcessGroup,
    ProcessGroupBabyNCCL,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)
from torchft_svc.client.algorithms import DiLoCo

DEVICE = torch.device("cuda", 0)
# With a stream of its own, the update is still queued for about 20 ms when the next step begins,
# except in every so many steps, in which the digest waits for it.
LATE_CYCLES, DIGEST_EVERY = 40_000_000, 4
TIMEOUT = timedelta(seconds=20)
SYNC_EVERY = 4
BATCH, WIDTH = 256, 64
BALLAST_PART = 64 << 20
KINDS: dict[str, Callable[[timedelta], ProcessGroup]] = {
    "nccl": ProcessGroupNCCL,
    "isolated": ProcessGroupBabyNCCL,
    "gloo": ProcessGroupGloo,
}


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
    parser.add_argument("--backend", choices=[*KINDS], default="nccl")
    parser.add_argument("--side-stream", action="store_true")
    parser.add_argument("--quantize", choices=["int8", "float8"])
    parser.add_argument("--formats", help="of the steps' averages, such as float32,int8")
    parser.add_argument("--compile", metavar="MODE", help="torch.compile the wrapped model so")
    parser.add_argument("--quiet", action="store_true", help="write no line for an update")
    parser.add_argument("--ballast", type=int, default=0, help="bytes of more state")
    parser.add_argument("--graphed", action="store_true", help="both passes are CUDA graphs")
    options = parser.parse_args()

    torch.manual_seed(options.name)
    layers = [nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)]
    model = nn.Sequential(*layers).to(DEVICE)
    if options.graphed:
        torch.cuda.make_graphed_callables(model, (torch.zeros(BATCH, WIDTH, device=DEVICE),))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    ballast = [
        torch.zeros(BALLAST_PART, dtype=torch.uint8, device=DEVICE)
        for _ in range(options.ballast // BALLAST_PART)
    ]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        for mine, theirs in zip(ballast, state["ballast"], strict=True):
            mine.copy_(theirs)

    manager = Manager(
        pg=KINDS[options.backend](TIMEOUT),
        state_dict=lambda: {
            "model": model.state_dict(),
            "adam": adam.state_dict(),
            "ballast": ballast,
        },
        load_state_dict=load,
        lighthouse_addr=options.lighthouse,
        replica_id=str(options.name),
        timeout=TIMEOUT,
        use_async_quorum=options.quantize is None and options.formats is None,
    )
    if options.side_stream:
        torch.cuda.set_stream(torch.cuda.Stream())
        adam.register_step_pre_hook(lambda *_: torch.cuda._sleep(LATE_CYCLES))
    if options.formats:
        average_by_hand(manager, options)
    elif options.quantize:
        train_with_diloco(manager, model, adam, options)
    else:
        train_with_ddp(manager, model, adam, options)
    manager.shutdown()


def batch(step: int, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of a step, and their labels of shape (BATCH, 1)."""
    generator = torch.Generator().manual_seed(1000 * step + options.name)
    inputs = torch.randn(BATCH, WIDTH, generator=generator).to(DEVICE)
    return inputs, inputs.sum(1, keepdim=True) / 8


def average_by_hand(manager: Manager, options: argparse.Namespace) -> None:
    print("ready", flush=True)
    for number_format in options.formats.split(","):
        values = torch.linspace(-1.0, 1.0 + options.name, 1000, device=DEVICE)
        manager.start_quorum()
        manager.allreduce(values, False if number_format == "float32" else number_format).wait()
        committed = manager.should_commit()
        seen = hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()[:16]
        print(f"averaged {int(committed)} {seen} {manager.errored()}", flush=True)


def train_with_diloco(
    manager: Manager,
    model: nn.Module,
    adam: torch.optim.Optimizer,
    options: argparse.Namespace,
) -> None:
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    algorithm = DiLoCo(manager, [model], adam, outer, SYNC_EVERY, should_quantize=options.quantize)
    print("ready", flush=True)
    with algorithm:
        while (step := manager.current_step()) < options.steps:
            inputs, labels = batch(SYNC_EVERY * step + algorithm.inner_steps, options)
            adam.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), labels)
            loss.backward()
            adam.step()
            if manager.current_step() > step:
                participants = manager.num_participants()
                print(
                    f"commit {manager.current_step()} {participants} {loss.item():.6f} "
                    f"{digest(model, outer)}",
                    flush=True,
                )


def train_with_ddp(
    manager: Manager,
    model: nn.Module,
    adam: torch.optim.Optimizer,
    options: argparse.Namespace,
) -> None:
    optimizer = OptimizerWrapper(manager, adam)
    parallel: nn.Module = DistributedDataParallel(manager, model, bucket_cap_mb=0.1)
    if options.compile:
        parallel = torch.compile(parallel, mode=options.compile)  # type: ignore[assignment]
    print("ready", flush=True)
    while (step := manager.current_step()) < options.steps:
        optimizer.zero_grad()  # first: the copy to the device waits for what is queued
        inputs, labels = batch(step, options)
        loss = nn.functional.mse_loss(parallel(inputs), labels)
        loss.backward()
        participants, value = manager.num_participants(), loss.item()
        committed = optimizer.step()
        if options.quiet:
            continue
        if committed:
            now = manager.current_step()
            waits = not options.side_stream or now % DIGEST_EVERY == 0
            seen = digest(model, adam) if waits else "-"
            print(f"commit {now} {participants} {value:.6f} {seen}", flush=True)
        else:
            print(f"discarded {step}", flush=True)


if __name__ == "__main__":
    main()
