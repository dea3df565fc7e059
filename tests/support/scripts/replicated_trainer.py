"""Trains a replicated model in a replica group of one worker; run by test_replicated.py."""

from __future__ import annotations

import json
import os
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tools.demo.fingerprint import fingerprint
from tools.demo.torch_wrapper import torch_data_parallel
from torchft_svc.client import (
    DistributedDataParallel,
    Manager,
    OptimizerWrapper,
)

# A step takes at least so long: groups that start need the processors.
PACE_S = 0.02


def run(wrapper: str, file: Path) -> None:
    """Train until this process is ended.

    ``wrapper``: ``ours``, or ``torch's`` over a managed process group. Appends to ``file`` one JSON
    object for every committed step, with a hash of the weights and of the optimizer's state.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(zlib.crc32(os.environ["REPLICA_GROUP_ID"].encode()))
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "adam": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    manager = Manager(
        state_dict=save,
        load_state_dict=load,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60),
    )
    parallel = wrap(model, manager, wrapper)
    optimizer = OptimizerWrapper(manager, adam)
    while True:
        time.sleep(PACE_S)
        optimizer.zero_grad()
        group = manager.participating_rank() or 0
        dice = torch.Generator().manual_seed(100 * manager.current_step() + group)
        inputs = torch.randn(8, 4, generator=dice)
        (parallel(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        if optimizer.step():
            report = {
                "step": manager.current_step(),
                "pid": os.getpid(),
                "groups": manager.num_participants(),
                "hash": fingerprint(model.state_dict(), adam.state_dict()),
            }
            with file.open("a") as lines:
                lines.write(json.dumps(report) + "\n")


def wrap(model: nn.Module, manager: Manager, wrapper: str) -> nn.Module:
    if wrapper == "ours":
        return DistributedDataParallel(manager, model)
    return torch_data_parallel(manager, model)
