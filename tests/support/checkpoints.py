"""States of a small training run, and a process that writes checkpoints of them without end."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from torchft_svc.trainer.checkpoint import CheckpointStore
from torchft_svc.trainer.messages import Position
from torchft_svc.trainer.state import TrainingState

# Writing so many weights takes some milliseconds: long enough to be interrupted.
_NUM_WEIGHTS = 1 << 21


def large_state(step: int) -> TrainingState:
    """A state that follows from ``step`` and takes 8 MiB."""
    weights = torch.randn(_NUM_WEIGHTS, generator=torch.Generator().manual_seed(step))
    return TrainingState(position=Position(step=step), parts={"model": {"weight": weights}})


def trained_state(step: int) -> TrainingState:
    """A state that follows from ``step``: of a model, its optimizer, and a scheduler."""
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1), torch.nn.BatchNorm1d(1))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3 / (step + 1))
    plan = torch.optim.lr_scheduler.MultiStepLR(adam, milestones=[2, 5])
    model(torch.randn(4, 64)).sum().backward()
    adam.step()
    plan.step()
    return TrainingState(
        position=Position(epoch=step // 10, step=step, num_samples=4 * (step % 10)),
        parts={
            "model": model.state_dict(),
            "optimizer": adam.state_dict(),
            "scheduler": plan.state_dict(),
        },
        counters={"retries": step},
    )


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, to the last bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and bool((one.view(-1) == other.view(-1)).all())
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, TrainingState):
        return (
            one.position == other.position
            and same(one.parts, other.parts)
            and same(one.counters, other.counters)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def write_without_end(directory: str) -> None:
    """Write checkpoints of steps that grow, until this process is killed."""
    store = CheckpointStore(directory, keep_last=2)
    listed = store.checkpoints()
    first = listed[0].position.step + 1 if listed else 0
    for step in itertools.count(first):
        store.write(large_state(step))
