"""The workers that train together: how a worker joins them, and how it stops waiting for them.

`TorchWorld` is a process group of torch, which one lost worker breaks for all. The trainer then
orders the others to abandon it. `per_step` has the world that survives.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from torchft_svc import env
from torchft_svc.client.data.plan import Turn
from torchft_svc.elastic import world_group
from torchft_svc.elastic.world_group import FORMING_TIMEOUT_S, WorldGroup
from torchft_svc.host.address import parse_address
from torchft_svc.trainer.backend import Link
from torchft_svc.trainer.job import WorkerJob
from torchft_svc.trainer.messages import JoinWorld, Position, StoreOpened

log = logging.getLogger(__name__)

# The sum of so many numbers has the same bits in any order.
_COMMUTES = 2


class TrainingWorld(Protocol):
    """The workers that train together, seen by one of them; `abandon` is for other threads."""

    def join(self, command: JoinWorld, position: Position) -> None:
        """Meet the others; this worker begins at ``position``, unless it heals from another."""

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], schedulers: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Wrap what is trained, so that all workers make the same updates."""

    @property
    def turn(self) -> Turn:
        """The rank of this worker in the step that was begun last, or in the world at its start."""

    def begin_step(self) -> None:
        """Wait for the others, if they may have changed; this may load their state."""

    def has_lost_vote(self) -> bool:
        """Whether the last update was not applied, as the step was discarded; returned once."""

    def abandon(self, reason: str) -> None:
        """Make all that waits for the others fail."""

    def leave(self) -> None:
        """Disconnect; may be called twice, and after `abandon`."""


class TorchWorld:
    """torch's default process group, with its wrapper for data parallel training."""

    def __init__(self, link: Link, job: WorkerJob, device: torch.device) -> None:
        self._link, self._job, self._device = link, job, device
        self._store: TCPStore | None = None
        self._group: WorldGroup | None = None
        self._turn = Turn(0, 1)
        self._abandoned = ""

    def join(self, command: JoinWorld, position: Position) -> None:
        address = command.address or self._open_store(command.world)
        where = parse_address(address)
        rank, size = command.rank, command.world_size
        self._turn = Turn(rank, size)
        group = self._group = WorldGroup(command.world)
        if self._abandoned:
            self.abandon(self._abandoned)
        # Otherwise its watchdog ends the process, with the state that this worker has to offer.
        env.set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        store = group.meet(where.host, where.port, size, self._job.join_timeout_s)
        on_gpu = self._device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=FORMING_TIMEOUT_S),
        )
        group.end_forming()
        world_group.set_timeout(self._job.timeout_s)

    def _open_store(self, world: int) -> str:
        host = self._link.host
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        shown = f"[{host}]" if ":" in host else host
        address = f"{shown}:{self._store.port}"
        self._link.send(StoreOpened(world=world, address=address))
        return address

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], schedulers: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        return [self._wrap(model) for model in models], list(optimizers), list(schedulers)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        arguments: Mapping[str, Any] = self._job.ddp_args
        if self._device.type == "cuda":
            arguments = {"device_ids": [self._device.index], **arguments}
        wrapped = TorchDataParallel(model, **arguments)
        if self._turn.size > _COMMUTES:
            _settle_buckets(wrapped)
        return wrapped

    @property
    def turn(self) -> Turn:
        return self._turn

    def begin_step(self) -> None:
        pass

    def has_lost_vote(self) -> bool:
        return False

    def abandon(self, reason: str) -> None:
        self._abandoned = reason
        if self._group is not None:
            self._group.supersede(reason, is_broken=True)

    def leave(self) -> None:
        world_group.leave()
        self._store = None


def _settle_buckets(wrapped: TorchDataParallel) -> None:
    """Make the layout of the buckets the same in the first step as in all others.

    torch arranges them anew after the first backward pass, in the order in which gradients came.
    Where a gradient lies decides in which order its parts are summed, so the first step after a
    restart would have other bits than the same step without one. A pass of zeros, in the reverse
    order of the parameters, goes before it.
    """
    if wrapped.find_unused_parameters or wrapped.static_graph:
        return  # the first is never arranged anew, the other one needs a real pass
    parameters = [each for each in wrapped.module.parameters() if each.requires_grad]
    nothing = [parameter.flatten()[:1].sum() * 0.0 for parameter in parameters]
    wrapped.reducer.prepare_for_forward()
    wrapped.reducer.prepare_for_backward([])
    torch.autograd.backward(nothing)
    for parameter in parameters:
        parameter.grad = None
