"""Trains a sharded model in one worker of a replica group; run by test_hsdp.py."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchft_svc.client import (
    Manager,
    OptimizerWrapper,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ft_init_device_mesh,
    replicate_across_groups,
    sharded_state_dict,
)

WIDTH = 16
TENSOR_PARALLEL = 2
TIMEOUT = timedelta(seconds=20)
# A step takes at least so long: groups that start need the processors.
PACE_S = 0.02


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(model: nn.Module, manager: Manager, layout: str, device: str) -> None:
    """Shard ``model`` over devices of this type, and replicate it across the groups."""
    workers = dist.get_world_size()
    if layout == "hsdp":
        mesh = ft_init_device_mesh(
            device_type=device,
            mesh_shape=(2, workers),
            mesh_dim_names=("replicate", "shard"),
            replicate_dim=0,
            manager=manager,
        )
    elif layout == "fsdp":
        model[1] = checkpoint_wrapper(model[1])  # type: ignore[index,operator]
        mesh = init_device_mesh(device, (workers,), mesh_dim_names=("shard",))
    else:
        shape = (workers // TENSOR_PARALLEL, TENSOR_PARALLEL)
        both = init_device_mesh(device, shape, mesh_dim_names=("shard", "tp"))
        split_tensors(model, both["tp"])
        mesh = both["shard"]
    half = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    for block in (model[1], model[2]):
        fully_shard(block, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh)
    if layout != "hsdp":
        replicate_across_groups(manager, model)


def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter becomes a DTensor over ``mesh``: torch clips over one mesh only."""
    first, *blocks, last = model.children()
    parallelize_module(first, mesh, ColwiseParallel(output_layouts=Replicate()))
    for block in blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
        distribute_module(block.norm, mesh, input_fn=_enter, output_fn=_leave)
    parallelize_module(last, mesh, RowwiseParallel(input_layouts=Replicate()))


def _enter(_: nn.Module, inputs: tuple[torch.Tensor], mesh: DeviceMesh) -> tuple[DTensor]:
    return (DTensor.from_local(*inputs, mesh, [Replicate()], run_check=False),)


def _leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    return output.to_local()


def fingerprint(state: Any) -> str:
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, DTensor):
            value = value._local_tensor
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
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


class Pauses:
    """Pauses between two steps, when a signal has asked for it.

    SIGUSR1 asks for a pause of the main thread alone, SIGUSR2 for one of the whole process, until
    SIGCONT.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: int | None = None
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        self._due = number

    def take(self) -> None:
        due, self._due = self._due, None
        if due == signal.SIGUSR1:
            time.sleep(self._seconds)
        elif due == signal.SIGUSR2:
            os.kill(os.getpid(), signal.SIGSTOP)


def run(
    layout: str,
    file: Path,
    device: str,
    quorum_timeout_s: float = 40.0,
    changes_at: int = 0,
) -> None:
    """Train until this process is ended.

    ``layout``: ``fsdp``, ``hsdp`` or ``fsdp+tp``. ``device``: ``cpu`` (gloo) or ``cuda`` (NCCL, and
    all workers of all groups are on one device). Appends to ``file`` one JSON object for every
    committed step, with a hash of this worker's part of the weights and of the optimizer's state.
    A pause takes longer than ``quorum_timeout_s``. ``changes_at``: the step in which rank 1 of
    group b changes its part (0: none); then all groups compare their states in every step.
    """
    pauses = Pauses(2 * quorum_timeout_s)
    on_gpu = device == "cuda"
    if on_gpu:
        # NCCL refuses two workers on one device of one host, so each names a host of its own.
        os.environ["NCCL_HOSTID"] = f"{os.environ['REPLICA_GROUP_ID']}-{os.environ['RANK']}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    # Every group begins with weights of its own, in which its workers agree.
    torch.manual_seed(zlib.crc32(os.environ["REPLICA_GROUP_ID"].encode()))
    model = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1)).to(device)

    def save() -> dict[str, Any]:
        return {"model": sharded_state_dict(model), "adam": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    manager = Manager(
        pg=ProcessGroupNCCL(TIMEOUT) if on_gpu else ProcessGroupGloo(TIMEOUT),
        state_dict=save,
        load_state_dict=load,
        hostname="127.0.0.1",
        timeout=min(TIMEOUT, timedelta(seconds=quorum_timeout_s)),
        connect_timeout=min(TIMEOUT, timedelta(seconds=quorum_timeout_s)),
        quorum_timeout=timedelta(seconds=quorum_timeout_s),
        check_every=1 if changes_at else None,
    )
    build(model, manager, layout, device)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer = OptimizerWrapper(manager, adam)
    rank = dist.get_rank()
    changes = bool(changes_at) and (os.environ["REPLICA_GROUP_ID"], rank) == ("b", 1)
    # Workers that share tensors share their data.
    data_rank = rank // TENSOR_PARALLEL if layout == "fsdp+tp" else rank
    while True:
        time.sleep(PACE_S)
        pauses.take()
        if changes and manager.current_step() >= changes_at:
            changes = False
            with torch.no_grad():
                next(p.to_local() for p in model.parameters() if p.to_local().numel()).add_(1e-3)
        optimizer.zero_grad()
        step, group = manager.current_step(), manager.participating_rank() or 0
        for part in range(2):  # two microbatches
            model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            seed = 1000 * step + 100 * group + 10 * data_rank + part
            dice = torch.Generator().manual_seed(seed)
            inputs = torch.randn(32, 4, generator=dice).to(device)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean() / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if optimizer.step():
            report = {
                "step": manager.current_step(),
                "group_rank": rank,
                "pid": os.getpid(),
                "loss": round(2 * loss.item(), 4),
                "groups": manager.num_participants(),
                "hash": fingerprint(save()),
            }
            with file.open("a") as lines:  # one write: those of several workers do not mix
                lines.write(json.dumps(report) + "\n")
