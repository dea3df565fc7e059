"""Measures how long training stands still when workers of a trainer are killed."""

from __future__ import annotations

import importlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tools.benchmarks.options import json_option
from tools.benchmarks.table import Column, Result, hand_over
from torchft_svc.trainer import Trainer

_STEP_S = 0.02
_NUM_SAMPLES = 1 << 16
# Training goes on undisturbed for so long between two kills.
_CALM_S = (1.0, 2.0)
_PATIENCE_S = 60.0
_COLUMNS = (
    Column("mode", "fault tolerance"),
    Column("killed", "SIGKILL to"),
    Column("kills", "kills", 0),
    Column("pause_s", "next step, s", 3),
    Column("pause_worst_s", "worst", 3),
    Column("lost_steps", "steps lost", 0),
    Column("back_s", "all back, s", 3),
)

Killed = Literal["the leader", "another worker", "all workers"]
FaultTolerance = Literal["restart", "per-step"]
Engine = Literal["local", "ray"]
_MODES: tuple[FaultTolerance, ...] = ("restart", "per-step")
_KILLED: tuple[Killed, ...] = ("the leader", "another worker", "all workers")


def _model(config: Mapping[str, Any]) -> nn.Module:
    return nn.Linear(64, 10)


def _data(config: Mapping[str, Any]) -> TensorDataset:
    return TensorDataset(
        torch.zeros(_NUM_SAMPLES, 64), torch.zeros(_NUM_SAMPLES, dtype=torch.int64)
    )


def _optimizer(model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor], info: Mapping[str, Any]) -> Tensor:
    """Notes when this worker begins a step: the clock is that of all processes of the machine."""
    with open(f"{info['folder']}/{os.getpid()}", "a") as log:
        log.write(f"{time.monotonic_ns()}\n")
    time.sleep(_STEP_S)
    images, digits = batch
    return functional.cross_entropy(model(images), digits)


@dataclass(slots=True)
class _Course:
    """One mode and one kind of kill, and what was measured."""

    mode: FaultTolerance
    killed: Killed
    num_kills: int
    num_workers: int
    engine: Engine
    dice: random.Random
    pauses_s: list[float] = field(default_factory=list)
    backs_s: list[float] = field(default_factory=list)
    lost_steps: int = 0

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "steps").mkdir()
            trainer = Trainer(
                model_creator=_model,
                data_creator=_data,
                optimizer_creator=_optimizer,
                batch_loss=_loss,
                config={"batch_size": 4},
                num_workers=self.num_workers,
                backend=self.engine,
                fault_tolerance=self.mode,
                checkpoint_dir=f"{folder}/checkpoints",
                checkpoint_every=20,
                show_progress=False,
            )
            with trainer:
                self._train(trainer, Path(folder) / "steps")

    def _train(self, trainer: Trainer, folder: Path) -> None:
        over = threading.Event()

        def train() -> None:
            while not over.is_set():
                trainer.train(
                    num_steps=20, max_retries=-1, checkpoint="auto", info={"folder": str(folder)}
                )

        thread = threading.Thread(target=train, name="training")
        thread.start()
        try:
            _wait_until_all_step(folder, set(), self.num_workers, time.monotonic_ns())
            for _ in range(self.num_kills):
                time.sleep(self.dice.uniform(*_CALM_S))
                self._kill(trainer, folder)
        finally:
            over.set()
            thread.join(_PATIENCE_S)
        self.lost_steps = trainer.history.as_dict()["lost_steps"]

    def _kill(self, trainer: Trainer, folder: Path) -> None:
        pids = trainer.worker_pids  # by rank
        doomed = {
            "the leader": [pids[0]],
            "another worker": [self.dice.choice([pid for rank, pid in pids.items() if rank])],
            "all workers": list(pids.values()),
        }[self.killed]
        at_ns = time.monotonic_ns()
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        back_ns = _wait_until_all_step(folder, set(doomed), self.num_workers, at_ns)
        self.backs_s.append((back_ns - at_ns) / 1e9)
        # A step is done when the next one begins. Survivors may begin one that they discard.
        has_survivors = self.mode == "per-step" and len(doomed) < len(pids)
        num_before = 2 if has_survivors else 1
        nexts = [
            times[num_before]
            for pid, times in _steps(folder, at_ns).items()
            if pid not in doomed and len(times) > num_before
        ]
        self.pauses_s.append((min(nexts) - at_ns) / 1e9)

    def row(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "killed": self.killed,
            "kills": len(self.pauses_s),
            "pause_s": statistics.median(self.pauses_s),
            "pause_worst_s": max(self.pauses_s),
            "back_s": statistics.median(self.backs_s),
            "lost_steps": self.lost_steps,
        }


def _steps(folder: Path, after_ns: int) -> dict[int, list[int]]:
    """Times at which each process began its steps since ``after_ns``."""
    found = {}
    for path in folder.iterdir():
        times = [int(line) for line in path.read_text().split("\n")[:-1]]
        found[int(path.name)] = [time for time in times if time > after_ns]
    return found


def _wait_until_all_step(folder: Path, without: set[int], num_workers: int, after_ns: int) -> int:
    """Time when ``num_workers`` workers but ``without`` had done a step after ``after_ns`` (ns)."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        done = sorted(
            times[1]
            for pid, times in _steps(folder, after_ns).items()
            if pid not in without and len(times) > 2
        )
        if len(done) >= num_workers:
            return done[num_workers - 1]
        time.sleep(0.05)
    raise TimeoutError(f"no {num_workers} workers train within {_PATIENCE_S:g} s")


@click.command(context_settings={"show_default": True})
@click.option("--kills", type=click.IntRange(1), default=10, help="Of each kind.")
@click.option("--workers", type=click.IntRange(2), default=3)
@click.option("--backend", "engine", type=click.Choice(("local", "ray")), default="local")
@click.option("--mode", "modes", type=click.Choice(_MODES), multiple=True, default=_MODES)
@click.option("--killed", "kinds", type=click.Choice(_KILLED), multiple=True, default=_KILLED)
@click.option("--seed", type=int, default=0)
@json_option
def main(
    kills: int,
    workers: int,
    engine: Engine,
    modes: tuple[FaultTolerance, ...],
    kinds: tuple[Killed, ...],
    seed: int,
    json_file: Path | None,
) -> None:
    """Kill workers of a trainer on this machine, and measure when the next step is done."""
    result = Result(
        "trainer",
        "From SIGKILL to the next step that any worker has done, and until all train again",
        _COLUMNS,
        {
            "kills": kills,
            "workers": workers,
            "backend": engine,
            "step_s": _STEP_S,
            "seed": seed,
        },
    )
    if engine == "ray":  # also where there are fewer processors than workers
        ray = importlib.import_module("ray")
        ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
    dice = random.Random(seed)
    for mode in modes:
        for killed in kinds:
            course = _Course(mode, killed, kills, workers, engine, dice)
            course.run()
            result.rows.append(course.row())
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
