"""What the workers of the tests of soft restarts run; each prints what it sees."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchft_svc.elastic import (
    WorkerInfo,
    ack_worker_event,
    get_worker_info,
    init_world,
    leave_world,
    world_changed,
)
from torchft_svc.elastic.world_group import WorldGroup

# Leaves the processors to others.
PACE_S = 0.005


def say(*words: object) -> None:
    print(*words, flush=True)


def reduce_for_ever(style: str = "plain") -> None:
    """Sum over each world, again and again: as the design's example does, or with `init_world`, or
    with ``tcp://`` (``own``)."""
    while True:
        try:
            if style == "plain":
                info = get_worker_info()
                dist.init_process_group("gloo", **info.get_pg_parameters())
            elif style == "own":
                info = init_own()
            else:
                info = init_world("gloo")
            say("in", info.round, "size", dist.get_world_size(), "rank", dist.get_rank())
            while True:
                time.sleep(PACE_S)
                leaves = torch.tensor([float(world_changed())])
                dist.all_reduce(leaves)
                if leaves.item():
                    break
        except Exception as error:
            say("lost", type(error).__name__, str(error).splitlines()[0])
        if style == "plain":
            if dist.is_initialized():
                dist.destroy_process_group()
        else:
            leave_world()


def broadcast_for_ever(style: str) -> None:
    """Send more than fits into a connection, again and again, in a process group that ``style``
    (``plain`` or ``init_world``) forms."""
    tensor = torch.ones(10_000_000)
    while True:
        if style == "plain":
            info = get_worker_info()
            dist.init_process_group("gloo", **info.get_pg_parameters())
        else:
            info = init_world("gloo")
        say("in", info.round, "size", dist.get_world_size(), "rank", dist.get_rank())
        try:
            for count in itertools.count():
                dist.broadcast(tensor, 0)
                if count == 5:
                    say("sends in", info.round)
        except RuntimeError as error:
            say("lost", type(error).__name__, str(error).splitlines()[0])
        if style == "plain":
            dist.destroy_process_group()


def train_large_with_ddp(what: str) -> None:
    """Send much in each step of DDP, again and again: the gradients of many buckets, a buffer of
    40 MB, or (``hook``) as much in a communication hook; ``unawaited``: beside DDP, and nobody
    waits for it."""
    tensor = torch.ones(10_000_000)
    sizes = [700] * 12 if what == "gradients" else [8]
    model = torch.nn.Sequential(*(torch.nn.Linear(size, size) for size in sizes))
    if what == "buffer":
        model.register_buffer("large", tensor)
    works: list[Any] = []
    while True:
        info = get_worker_info()
        dist.init_process_group("gloo", **info.get_pg_parameters())
        say("in", info.round, "size", dist.get_world_size(), "rank", dist.get_rank())
        try:
            wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
            if what == "hook":
                # torch refuses the annotations of this file.
                wrapped.register_comm_hook(
                    tensor, lambda state, bucket: send_besides(state, bucket)
                )
            for count in itertools.count():
                if what == "unawaited":
                    works = [dist.broadcast(tensor, 0, async_op=True)]
                wrapped(torch.ones(2, sizes[0])).sum().backward()
                if count == 2:
                    say("trains in", info.round)
        except RuntimeError as error:
            say("lost", type(error).__name__, str(error).splitlines()[0])
        dist.destroy_process_group()
        wrapped = None
        works.clear()


def send_besides(tensor: torch.Tensor, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    """A communication hook: sum a bucket, and then send ``tensor``."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer, async_op=True)
    sent: Any = dist.broadcast(tensor, 0, async_op=True)

    def after(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises the error of the operation
        return buffer

    future: torch.futures.Future[Any] = sent.get_future().then(after)
    return future


def train_with_ddp() -> None:
    """Wrap the model anew in each world; print a digest of its parameters after every step."""
    torch.manual_seed(os.getpid())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    while True:
        info = init_world("gloo")
        try:
            steps = torch.tensor([step])
            dist.all_reduce(steps, dist.ReduceOp.MAX)
            step = int(steps)
            wrapped = DistributedDataParallel(model)  # all get the parameters of rank 0
            while True:
                time.sleep(PACE_S)
                optimizer.zero_grad()
                wrapped(torch.randn(16, 4)).square().sum().backward()
                leaves = torch.tensor([float(world_changed())])
                dist.all_reduce(leaves)
                optimizer.step()
                step += 1
                digest = sum(each.double().sum().item() for each in model.parameters())
                say("in", info.round, "size", info.world_size, "step", step, "digest", repr(digest))
                if leaves.item():
                    break
        except RuntimeError as error:
            say("lost", type(error).__name__, str(error).splitlines()[0])
        wrapped = None


def init_own() -> WorkerInfo:
    """A process group of which the worker API knows nothing."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as agents set it for workers
    info = get_worker_info()
    ack_worker_event()
    address = f"tcp://{info.master_addr}:{info.master_port}"
    dist.init_process_group("gloo", address, rank=info.rank, world_size=info.world_size)
    return info


def stop_before_connecting() -> None:
    """Freeze when all workers have arrived, before gloo connects them."""
    meet = WorldGroup.meet

    def meet_and_stop(group: WorldGroup, *arguments: Any) -> Any:
        store = meet(group, *arguments)
        say("freezing in", group.round)
        os.kill(os.getpid(), signal.SIGSTOP)
        return store

    WorldGroup.meet = meet_and_stop  # type: ignore[method-assign]
    reduce_for_ever()
