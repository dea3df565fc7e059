"""The training that every trainer of a benchmark does, its commands and its output.

Only torch is needed, so that the public release's trainer runs this very code. A trainer prints
``built AT_NS`` when it has a model and ``ready AT_NS`` when it can train, and then obeys lines on
its standard input (instants are those of the monotonic clock, which all processes share):

``measure N``  train N steps; answers with one line of JSON: milliseconds for each phase of each.
``train``      train until killed, with a line ``commit STEP PARTICIPANTS AT_NS`` for each commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from tools.benchmarks.children.phases import PHASES, WRAPPERS

_WIDTH_OF_CLASSES = 16


@dataclass(frozen=True)
class Shape:
    """An MLP of ``depth`` square layers; ``batch`` samples a step.

    ``pause_s``: how long each step of `Training.train` sleeps, as if it computed elsewhere.
    """

    width: int
    depth: int
    batch: int
    pause_s: float = 0.0

    def draw_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (batch, width) and labels (batch,)."""
        labels = torch.randint(_WIDTH_OF_CLASSES, (self.batch,))
        return torch.randn(self.batch, self.width), labels


def shape_from_flags() -> tuple[Shape, argparse.Namespace]:
    """The flags that every trainer has; the rest is the trainer's own business."""
    parser = argparse.ArgumentParser()
    for flag, default in (("width", 728), ("depth", 8), ("batch", 16)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--group-size", type=int, default=1)
    parser.add_argument("--name", default="0")
    parser.add_argument("--store-port", type=int, default=0)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--wrapper", choices=WRAPPERS, default=WRAPPERS[0])
    parser.add_argument("--spare", action="store_true")
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    flags = parser.parse_args()
    return Shape(flags.width, flags.depth, flags.batch, flags.pause_s), flags


def build(shape: Shape) -> tuple[nn.Module, SGD]:
    """The same weights everywhere: a benchmark must not measure the first synchronization.

    Making the first optimizer imports a large part of torch: that belongs to "built", too.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(shape.depth):
        layers += [nn.Linear(shape.width, shape.width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(shape.width, _WIDTH_OF_CLASSES))
    sgd = SGD(model.parameters(), lr=1e-3)
    print_line(f"built {time.monotonic_ns()}")
    return model, sgd


def no_participants() -> int:
    return 0


@dataclass
class Training:
    """What a trainer has set up; ``current_step`` counts commits, where there are any.

    ``average`` is called after the backward pass, where nothing averages during it.
    """

    shape: Shape
    model: nn.Module
    optimizer: Any
    current_step: Callable[[], int] | None = None
    num_participants: Callable[[], int] = no_participants
    close: Callable[[], None] = lambda: None
    lap: Callable[[], dict[str, float]] = dict
    average: Callable[[], None] = lambda: None
    _batch: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    def obey(self) -> None:
        """Serve standard input until it ends."""
        print_line(f"ready {time.monotonic_ns()}")
        for line in sys.stdin:
            command, *arguments = line.split()
            if command == "measure":
                print_line(json.dumps(self.measure(int(arguments[0]))))
            elif command == "train":
                self.train()
                break
        self.close()

    def step(self) -> list[int]:
        """One step; the instants (ns) between its phases."""
        inputs, labels = self._data()
        at = [time.monotonic_ns()]
        self.optimizer.zero_grad()
        at.append(time.monotonic_ns())
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        at.append(time.monotonic_ns())
        loss.backward()  # type: ignore[no-untyped-call]
        self.average()
        at.append(time.monotonic_ns())
        self.optimizer.step()
        at.append(time.monotonic_ns())
        return at

    def measure(self, num_steps: int) -> dict[str, list[float]]:
        """Milliseconds of each phase, each lap and the whole step (``total``), for each step.

        ``discarded`` is how many steps were not committed, as a list of one number.
        """
        found: dict[str, list[float]] = {phase: [] for phase in (*PHASES, "total")}
        self.lap()  # what was counted before does not belong here
        before = self.current_step() if self.current_step else 0
        for _ in range(num_steps):
            at = self.step()
            for phase, begin, end in zip(PHASES, at[:-1], at[1:], strict=True):
                found[phase].append((end - begin) / 1e6)
            found["total"].append((at[-1] - at[0]) / 1e6)
            for part, time_ms in self.lap().items():
                found.setdefault(part, []).append(time_ms)
        committed = self.current_step() - before if self.current_step else num_steps
        return {**found, "discarded": [num_steps - committed]}

    def train(self) -> None:
        """Train on until standard input ends, and print every commit."""
        assert self.current_step is not None
        gone = threading.Event()
        threading.Thread(target=_wait_for_end, args=(gone,), name="stdin", daemon=True).start()
        inputs, labels = self._data()
        while not gone.is_set():
            before = self.current_step()
            self.optimizer.zero_grad()
            time.sleep(self.shape.pause_s)
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.average()
            participants = self.num_participants()
            self.optimizer.step()
            if self.current_step() > before:
                print_line(f"commit {self.current_step()} {participants} {time.monotonic_ns()}")

    def _data(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._batch is None:
            self._batch = self.shape.draw_batch()
        return self._batch


def print_line(line: str) -> None:
    print(line, flush=True)


def _wait_for_end(gone: threading.Event) -> None:
    sys.stdin.read()
    gone.set()
