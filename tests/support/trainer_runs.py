"""A small training run of a `Trainer` with real workers, whose result follows from its steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torchft_svc.trainer import Trainer

NUM_WORKERS = 2
STEPS_PER_PASS = 12
NUM_PASSES = 3
# Its checkpoints take some milliseconds to write.
_WIDTH = 1 << 14


def make_model(config: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, _WIDTH),
        nn.BatchNorm1d(_WIDTH),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(_WIDTH, 1),
    )


def make_data(config: Mapping[str, Any]) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS_PER_PASS * NUM_WORKERS * 4, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def make_optimizer(model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: Mapping[str, Any]
) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=7)


def batch_loss(model: nn.Module, batch: tuple[Tensor, Tensor], info: Mapping[str, Any]) -> Tensor:
    inputs, wanted = batch
    time.sleep(info.get("step_s", 0.0))
    return functional.mse_loss(model(inputs), wanted)


def small_trainer(folder: Path | str, **options: Any) -> Trainer:
    """A trainer whose checkpoints are in ``folder``; it writes one after each second step."""
    settings: dict[str, Any] = {
        "model_creator": make_model,
        "data_creator": make_data,
        "optimizer_creator": make_optimizer,
        "scheduler_creator": make_scheduler,
        "scheduler_step": "step",
        "batch_loss": batch_loss,
        "num_workers": NUM_WORKERS,
        "batch_size": 4,
        "checkpoint_dir": str(folder),
        "checkpoint_every": 2,
        "show_progress": False,
    }
    return Trainer(**(settings | options))


def train_to_the_end(folder: str, step_s: float) -> None:
    """A program as a user would write it: started again, it goes on."""
    with small_trainer(folder, resume="auto") as trainer:
        while trainer.position.epoch < NUM_PASSES:
            trainer.train(checkpoint="auto", info={"step_s": step_s})
