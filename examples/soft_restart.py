"""Trains a character model in one world after the other; what survives a world stays in memory.

    python -m torchft_svc.elastic.run --restart-policy soft --nnodes 1:3 --nproc-per-node 2 \\
        --rdzv-backend lighthouse --rdzv-endpoint localhost:29510 --rdzv-id soft \\
        examples/soft_restart.py

Start it on two nodes or in two terminals, kill a worker or a launcher, start another one: the other
workers keep their process ids, and their step goes on. Each prints a line a step.
"""

import argparse
import io
import os
import sysconfig
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import torchft_svc
from torchft_svc.elastic import (
    WorkerEvent,
    WorkerInfo,
    WorkerState,
    WorldChangeEvent,
    ack_worker_event,
    get_worker_info,
    leave_world,
    on_worker_event,
    world_changed,
)

CONTEXT, BATCH, WIDTH, VOCABULARY = 16, 64, 32, 128
TIMEOUT = timedelta(seconds=60)
HEALTHY = WorkerState.HEALTHY
# Reconfigurable process groups of this package; "torch" is the default process group.
GROUPS = {
    "gloo": "ProcessGroupGloo",
    "nccl": "ProcessGroupNCCL",
    "isolated-gloo": "ProcessGroupBabyGloo",
    "isolated-nccl": "ProcessGroupBabyNCCL",
}


class Group(Protocol):
    """The workers of the present world."""

    def join(self, info: WorkerInfo) -> None: ...
    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None: ...
    def broadcast(self, tensor: Tensor, source: int) -> None: ...
    def leave(self) -> None: ...


class TorchGroup:
    """torch's default process group, a new one for every world."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def join(self, info: WorkerInfo) -> None:
        parameters = info.get_pg_parameters()  # rank, world size, and where the others are
        dist.init_process_group(self.backend, timeout=TIMEOUT, **parameters)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        dist.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, source)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class ReconfigurableGroup:
    """A process group of this package: one for all worlds, which gets new members."""

    def __init__(self, name: str) -> None:
        self.pg = getattr(torchft_svc, GROUPS[name])(timeout=TIMEOUT)
        self.pg.prepare()  # an isolated group starts a process, which the others need not wait for
        self.round = 0
        self.newest: WorkerEvent | None = None
        on_worker_event(self.record_event)

    def record_event(self, event: WorkerEvent) -> None:
        """End waits for members that are frozen or will never come; called on another thread."""
        self.newest = event
        self.pg.lose_member(self.round, "another world replaces this one")
        if event.change_event is WorldChangeEvent.SCALE_DOWN:
            self.pg.cut()

    def join(self, info: WorkerInfo) -> None:
        self.round = info.round
        ack_worker_event()
        newest = self.newest  # `record_event` may have been called before it knew this round
        if newest is not None and (newest.worker_info, newest.worker_state) != (info, HEALTHY):
            raise RuntimeError("another world has replaced this one")
        store = f"{info.master_addr}:{info.master_port}/soft_restart/{info.round}"
        self.pg.configure(store, f"rank{info.rank}", info.rank, info.world_size, info.round)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        self.pg.allreduce([tensor], options).wait(TIMEOUT)  # without it, NCCL would not raise

    def broadcast(self, tensor: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self.pg.broadcast([tensor], options).wait(TIMEOUT)

    def leave(self) -> None:
        self.pg.abort()
        leave_world()


class Training:
    """What lives on in memory: model, optimizer, step, and position in the data."""

    def __init__(self, device: str) -> None:
        self.device = device
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.text = self.text.clamp(max=VOCABULARY - 1)
        shuffled = torch.Generator().manual_seed(0)  # the same order in all workers
        self.order = torch.randperm(len(self.text) - CONTEXT, generator=shuffled)
        self.model = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Flatten(),
            nn.Linear(CONTEXT * WIDTH, 128),
            nn.ReLU(),
            nn.Linear(128, VOCABULARY),
        ).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.step = 0
        self.position = 0

    def batch(self, info: WorkerInfo) -> tuple[Tensor, Tensor]:
        """This worker's part of the next ``world_size * BATCH`` examples."""
        first = self.position + info.rank * BATCH
        starts = self.order[torch.arange(first, first + BATCH) % len(self.order)].unsqueeze(1)
        contexts = self.text[starts + torch.arange(CONTEXT)]
        return contexts.to(self.device), self.text[starts[:, 0] + CONTEXT].to(self.device)

    def save(self) -> bytes:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "position": self.position,
        }
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.position = state["step"], state["position"]

    def digest(self) -> str:
        """Equal in all workers after every step, to the bit."""
        sum_ = 0
        for parameter in self.model.parameters():
            sum_ = zlib.crc32(parameter.detach().cpu().numpy().tobytes(), sum_)
        return f"{sum_:08x}"


def agree(training: Training, group: Group, info: WorkerInfo) -> None:
    """Everybody continues with the newest state.

    A worker that was lost in a step may have left some survivors before that step's update, and
    others after it. Newcomers are at step 0.
    """
    device = training.device
    newest, oldest = torch.tensor([training.step, -training.step], device=device).unbind()
    steps = torch.stack((newest, oldest))
    group.all_reduce(steps, dist.ReduceOp.MAX)
    newest_step, oldest_step = int(steps[0]), -int(steps[1])
    if newest_step == oldest_step and newest_step > 0:
        return
    is_source = training.step == newest_step
    source = torch.tensor([info.rank if is_source else info.world_size], device=device)
    group.all_reduce(source, dist.ReduceOp.MIN)
    saved = training.save()
    size = torch.tensor([len(saved)], device=device)
    group.broadcast(size, int(source))
    content = torch.empty(int(size), dtype=torch.uint8, device=device)
    if info.rank == int(source):
        content.copy_(torch.frombuffer(bytearray(saved), dtype=torch.uint8))
    group.broadcast(content, int(source))
    if info.rank != int(source):
        training.load(content.cpu().numpy().tobytes())


def train_step(training: Training, group: Group, info: WorkerInfo) -> bool:
    """Make one update with all workers; returns whether all of them leave this world now."""
    contexts, targets = training.batch(info)
    training.optimizer.zero_grad()
    loss = functional.cross_entropy(training.model(contexts), targets)
    loss.backward()

    # One all-reduce for all gradients, for the loss, and for whether anybody wants to leave: if
    # each worker decided for itself, one would wait in a collective that another has left for.
    gradients = [parameter.grad for parameter in training.model.parameters()]
    extra = torch.tensor([loss.item(), float(world_changed())], device=training.device)
    flat = torch.cat([*(each.flatten() for each in gradients if each is not None), extra])
    group.all_reduce(flat, dist.ReduceOp.SUM)
    flat /= info.world_size

    # From here on nothing fails: this worker does the whole update, or none of it.
    offset = 0
    for gradient in gradients:
        if gradient is not None:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()
    training.optimizer.step()
    training.step += 1
    training.position += info.world_size * BATCH
    print(
        f"pid {os.getpid()} rank {info.rank} of {info.world_size} round {info.round} "
        f"step {training.step} loss {flat[-2].item():.4f} digest {training.digest()}\n",
        end="",
        flush=True,
    )
    return bool(flat[-1] > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train in one world after the other.")
    parser.add_argument("--steps", type=int, default=1000, help="updates to do")
    parser.add_argument("--group", choices=["torch", *GROUPS], default="torch")
    parser.add_argument("--backend", default="gloo", help="of torch's own process group")
    parser.add_argument("--init-s", type=float, default=0.0, help="an expensive initialization")
    parser.add_argument("--step-s", type=float, default=0.0, help="time to add to each step")
    options = parser.parse_args()

    is_cuda = "nccl" in (options.group, options.backend) or options.group == "isolated-nccl"
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if is_cuda else "cpu"
    training = Training(device)
    time.sleep(options.init_s)
    group: Group
    if options.group == "torch":
        group = TorchGroup(options.backend)
    else:
        group = ReconfigurableGroup(options.group)

    worker_info = get_worker_info()  # reports to the launcher that the initialization is over
    while training.step < options.steps:
        try:
            group.join(worker_info)
            agree(training, group, worker_info)
            leaves = False
            while training.step < options.steps and not leaves:
                leaves = train_step(training, group, worker_info)
                time.sleep(options.step_s)
        except Exception as error:  # noqa: BLE001 - a peer is gone; or the world was replaced meanwhile
            print(f"pid {os.getpid()} lost world {worker_info.round}: {error}", flush=True)
        group.leave()
        if training.step < options.steps:
            worker_info = get_worker_info()  # waits for the next world


if __name__ == "__main__":
    main()
