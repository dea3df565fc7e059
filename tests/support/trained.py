"""Programs for the tests of the trainer, whose workers are killed, frozen or fail at a step."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from torchft_svc.trainer import LocalBackend, TrainContext, Trainer

NUM_SAMPLES = 48
BATCH_SIZE = 4
FEATURES = 6
# A worker that is to be killed waits so long for the others; with ``per-step`` there may be none.
OTHERS_S = 3.0


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, FEATURES, generator=generator)
    return TensorDataset(features, features @ torch.arange(float(FEATURES)).reshape(-1, 1))


def data(config: Mapping[str, Any]) -> Any:
    return samples(), samples()


def model(config: Mapping[str, Any]) -> nn.Module:
    return nn.Linear(FEATURES, 1)


def optimizer(net: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


class Faults:
    """What is to happen in workers; each fault happens once, whichever process meets it.

    A fault is ``(step, rank, what)``; ``what`` is ``kill``, ``kill all`` (the
    others at the same moment), ``freeze`` or the words of an error. With
    ``-step`` it comes after the step that is the last one of a pass, before the pass is ended.
    """

    def __init__(self, folder: Path, *faults: tuple[int, int, str]) -> None:
        self._folder, self._faults = folder, faults

    def meet_after_pass(self, step: int, rank: int) -> None:
        Faults.meet(self, -step, rank)

    def meet(self, step: int, rank: int) -> None:
        (self._folder / f"worker-{os.getpid()}").touch()
        (self._folder / f"step-{step}-of-{rank}").touch()
        for number, (at, whose, what) in enumerate(self._faults):
            if (at, whose) != (step, rank) or not self._is_first(number):
                continue
            if what == "kill all":
                self._kill_all()
            elif what == "kill":
                self._wait_for_others(step, rank)
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                raise ValueError(what)

    def _wait_for_others(self, step: int, rank: int) -> None:
        """Else this one alone may have made the update before, which then is lost with it."""
        deadline = time.monotonic() + OTHERS_S
        while time.monotonic() < deadline:
            met = {path.name for path in self._folder.glob(f"step-{step}-of-*")}
            if met - {f"step-{step}-of-{rank}"}:
                return
            time.sleep(0.002)

    def _kill_all(self) -> None:
        others = {int(each.name.split("-")[1]) for each in self._folder.glob("worker-*")}
        for pid in (*others - {os.getpid()}, os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_first(self, number: int) -> bool:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._folder / f"fault-{number}", os.O_CREAT | os.O_EXCL))
            return True
        return False


def train(context: TrainContext) -> int:
    """A loop of the user's own, with ``epochs`` passes, that meets ``faults`` inside of steps."""
    config = context.config
    net = model(config)
    net, steps = context.prepare(net, optimizer(net, config))
    while context.position.epoch < config["epochs"]:
        losses = []
        for features, target in context.batches(samples(), BATCH_SIZE):
            config["faults"].meet(context.position.step, context.rank)
            steps.zero_grad()
            loss = nn.functional.mse_loss(net(features), target)
            loss.backward()
            steps.step()
            losses.append(loss.item())
        config["faults"].meet_after_pass(context.position.step, context.rank)
        context.report(losses=losses)
    return context.position.step


class Sharing(LocalBackend):
    """One fork server for all trainers of a module: `close` ends the workers alone."""

    def close(self) -> None:
        for worker in self.pids:
            self.kill(worker)
        while self.pids:
            self.wait(1.0)
        self.wait(0.0)

    def close_all(self) -> None:
        super().close()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = trainer.state_dict()["parts"]["model"]
    return found


def assert_equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    """Bitwise."""
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@contextlib.contextmanager
def shared() -> Iterator[Sharing]:
    backend = Sharing()
    try:
        yield backend
    finally:
        backend.close_all()
