"""Learns to read scikit-learn's digits while its workers are killed every few seconds.

    python examples/train_digits.py                                  # processes of this machine
    python examples/train_digits.py --fault-tolerance per-step       # the others train on
    python examples/train_digits.py --backend ray                    # actors of Ray
    python examples/train_digits.py --kill-every 0                   # undisturbed, to compare

It ends with status 1 if fewer than 97 % of the digits that it has not seen are read correctly.
Needs scikit-learn; with matplotlib it draws the run (--report run.png).
"""

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torchft_svc.trainer import Trainer

NUM_TRAINED = 1437
WANTED = 0.97


def read_digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 64) in 0 to 1, and the digits (1797,), in an order that is always the same."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.data, dtype=torch.float32)[order] / 16
    return images, torch.tensor(found.target)[order]


def make_model(config: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_data(config: Mapping[str, Any]) -> tuple[TensorDataset, TensorDataset]:
    images, digits = config["digits"]
    return (
        TensorDataset(images[:NUM_TRAINED], digits[:NUM_TRAINED]),
        TensorDataset(images[NUM_TRAINED:], digits[NUM_TRAINED:]),
    )


def make_optimizer(model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=config["lr"])


def batch_loss(
    model: nn.Module, batch: tuple[Tensor, Tensor], info: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    images, digits = batch
    output = model(images)
    if model.training:
        time.sleep(info["step_s"])  # only in this example: the run takes long enough to be killed
    right = (output.argmax(1) == digits).float().mean()
    return functional.cross_entropy(output, digits), {"accuracy": right}


class Killer(threading.Thread):
    """Kills a worker every ``every_s`` seconds, about; which one and when follows from ``seed``."""

    def __init__(self, trainer: Trainer, every_s: float, seed: int) -> None:
        super().__init__(name="killer", daemon=True)
        self._trainer, self._every_s = trainer, every_s
        self._dice = random.Random(seed)  # noqa: S311
        self._stop_now = threading.Event()
        self.num_kills = 0

    def run(self) -> None:
        while not self._stop_now.wait(self._every_s * self._dice.uniform(0.5, 1.5)):
            pids = sorted(self._trainer.worker_pids.values())
            if not pids:
                continue
            try:
                os.kill(self._dice.choice(pids), signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                continue
            self.num_kills += 1

    def end(self) -> None:
        self._stop_now.set()
        self.join()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn to read digits while workers are killed.")
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--fault-tolerance", choices=["restart", "per-step"], default="restart")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=25, help="over the data")
    parser.add_argument("--kill-every", type=float, default=4.0, help="seconds; 0: never")
    parser.add_argument("--step-s", type=float, default=0.03, help="what a step takes at least")
    parser.add_argument("--seed", type=int, default=0, help="of the kills, and of training")
    parser.add_argument("--checkpoint-dir", help="default: a temporary one")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint directory")
    parser.add_argument("--report", metavar="PNG", help="draw the run")
    return parser.parse_args()


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model_creator=make_model,
            data_creator=make_data,
            optimizer_creator=make_optimizer,
            batch_loss=batch_loss,
            config={"digits": read_digits(), "lr": 5e-3, "batch_size": 32 // options.workers},
            num_workers=options.workers,
            backend=options.backend,
            fault_tolerance=options.fault_tolerance,
            checkpoint_dir=options.checkpoint_dir or folder,
            resume="auto" if options.resume else None,
            seed=options.seed,
        )
        with trainer:
            accuracy = train(trainer, options)
    if accuracy < WANTED:
        sys.exit(f"only {accuracy:.2%} of the digits are read")


def train(trainer: Trainer, options: argparse.Namespace) -> float:
    """The part of the digits that are read at the end."""
    info = {"step_s": options.step_s}
    killer = Killer(trainer, options.kill_every, options.seed)
    if options.kill_every > 0:
        killer.start()
    retries = 0
    while trainer.position.epoch < options.passes:
        result = trainer.train(max_retries=-1, checkpoint="auto", info=info)
        retries += result["retries"]
        loss = result.get("train_loss", math.nan)  # none: the pass was done before a restart
        print(
            f"pass {result['epoch']:2d} step {result['step']:4d} loss {loss:.3f} "
            f"workers {result['num_workers']} retries {result['retries']}",
            flush=True,
        )
    if killer.is_alive():
        killer.end()
    accuracy = float(trainer.validate(info=info)["accuracy"])
    lost = trainer.history.as_dict()
    print(
        f"{accuracy:.2%} of the digits are read, after {killer.num_kills} kills: "
        f"{lost['incidents']} incidents, {retries} retries, "
        f"{lost['lost_steps']} steps and {lost['lost_s']:.1f} s lost"
    )
    if options.report:
        trainer.report(options.report)
    return accuracy


if __name__ == "__main__":
    main()
