"""Trains a sharded model in one worker of a replica group; run as a script by test_hsdp.py.

Arguments: the layout (``fsdp``, ``hsdp`` or ``fsdp+tp``), the step to end at, and the file to
append to: one JSON object for every committed step, with a hash of this worker's part of the
weights and of the optimizer's state.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchft_svc.client import (
    Manager,
    OptimizerWrapper,
    ft_init_device_mesh,
    replicate_across_groups,
    sharded_state_dict,
)

_, LAYOUT, LAST_STEP, FILE = sys.argv
WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(model: nn.Module, manager: Manager) -> None:
    """Shard ``model``, and replicate it across the groups."""
    if LAYOUT == "hsdp":
        mesh = ft_init_device_mesh(
            device_type="cpu",
            mesh_shape=(2, dist.get_world_size()),
            mesh_dim_names=("replicate", "shard"),
            replicate_dim=0,
            manager=manager,
        )
    elif LAYOUT == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    else:
        shape = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tp"))
        for block in (model[1], model[2]):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        mesh = mesh["shard"]
    half = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    for block in (model[1], model[2]):
        fully_shard(block, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh)
    if LAYOUT != "hsdp":
        replicate_across_groups(manager, model)


def fingerprint(state: Any) -> str:
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, DTensor):
            value = value._local_tensor
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(state)
    return digest.hexdigest()[:16]


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    # Every group begins with weights of its own, in which its workers agree.
    torch.manual_seed(zlib.crc32(os.environ["REPLICA_GROUP_ID"].encode()))
    model = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))

    def save() -> dict[str, Any]:
        return {"model": sharded_state_dict(model), "adam": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    manager = Manager(
        state_dict=save,
        load_state_dict=load,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=40),
    )
    build(model, manager)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer = OptimizerWrapper(manager, adam)
    rank = dist.get_rank()
    data_rank = rank // 2 if LAYOUT == "fsdp+tp" else rank  # workers of one tensor share their data
    while (step := manager.current_step()) < int(LAST_STEP):
        optimizer.zero_grad()
        for part in range(2):  # two microbatches
            model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            group = manager.participating_rank() or 0
            seed = 1000 * step + 100 * group + 10 * data_rank + part
            inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(seed))
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean() / 2
            loss.backward()
        if LAYOUT != "fsdp+tp":  # torch clips over one mesh only
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if optimizer.step():
            told = {
                "step": manager.current_step(),
                "group_rank": rank,
                "pid": os.getpid(),
                "loss": round(2 * loss.item(), 4),
                "groups": manager.num_participants(),
                "hash": fingerprint(save()),
            }
            with open(FILE, "a") as file:  # one write: lines of several workers do not mix
                file.write(json.dumps(told) + "\n")
    manager.shutdown()
    dist.destroy_process_group()


main()
