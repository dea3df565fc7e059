"""A replica group that trains alone between synchronizations, and prints each of them.

``python slow_link_worker.py ALGORITHM SYNCS``: the algorithm is ``local_sgd``, ``diloco``,
``streaming`` (with delay and alpha), ``quantized`` (the same in 8-bit numbers, with error feedback)
or ``decoupled``. After each synchronization it prints ``agreed STEP DIGEST LOSS INNER``: a digest
of what is equal in all groups then, the loss on data that all groups share, and how many inner
steps this process has made. A learner of ``decoupled`` prints a line after each merge that it
notices, with two more numbers: of all fragments together, the tokens that are merged, and those
that it has contributed itself. Several workers of a learner (``WORLD_SIZE``) shard the model; all
but the first one get each decision a little later. One makes no inner step while there is the file
that ``LATE_WHILE`` names.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchft_svc.client import Manager
from torchft_svc.client.algorithms import DecoupledDiLoCo, DiLoCo, LocalSGD
from torchft_svc.client.step.stepper import Update
from torchft_svc.testing.transport_contract import bits

SYNC_EVERY, INNER_S = 6, 0.01
DECISION_LATE_S = 0.01
_STREAMING: dict[str, Any] = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
_OPTIONS: dict[str, dict[str, Any]] = {
    "streaming": _STREAMING,
    "quantized": _STREAMING | {"should_quantize": True, "error_feedback": True},
}
_IN_FRAGMENTS = ("streaming", "quantized", "decoupled")


def digest(state: Any) -> str:
    return hashlib.sha256(repr(bits(state)).encode()).hexdigest()[:16]


def main() -> None:
    name, last = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    training = Training([0, 2] if name in _IN_FRAGMENTS else [])
    if name == "decoupled":
        train_decoupled(training, last)
    else:
        train(training, name, last)


class Training:
    """A small model in ``fragments``, its inner optimizer, and data of this process alone.

    ``layers``: those that are fragments; none: the whole model is one.
    """

    def __init__(self, layers: list[int]) -> None:
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.fragments: list[nn.Module] = [self.model[layer] for layer in layers] or [self.model]
        if dist.is_initialized():
            for part in (*self.fragments, self.model):
                fully_shard(part)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.num_inner = 0
        self._data = torch.Generator().manual_seed(os.getpid())
        self._shared = torch.randn(64, 16, generator=torch.Generator().manual_seed(7))

    def step(self) -> None:
        self.inner.zero_grad()
        self._loss_on(torch.randn(16, 16, generator=self._data)).backward()
        time.sleep(INNER_S)
        self.num_inner += 1
        self.inner.step()

    def _loss_on(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.model(inputs) - inputs.sum(1, keepdim=True).tanh()).square().mean()

    def report(self, step: int, agreed: Any, *numbers: int) -> None:
        with torch.no_grad():
            loss = self._loss_on(self._shared).item()
        words = ["agreed", step, digest(agreed), f"{loss:.4f}", self.num_inner, *numbers]
        print(" ".join(map(str, words)) + "\n", end="", flush=True)  # at once: threads log, too


def outer_optimizer(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)


def train(training: Training, name: str, last: int) -> None:
    model, inner = training.model, training.inner
    outer = [outer_optimizer(each.parameters()) for each in training.fragments]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        load_state_dict=load,
        use_async_quorum=name == "local_sgd",
        timeout=timedelta(seconds=20),
    )
    algorithm: LocalSGD | DiLoCo
    if name == "local_sgd":
        algorithm, outer = LocalSGD(manager, model, inner, SYNC_EVERY), []
    else:
        options = _OPTIONS.get(name, {})
        algorithm = DiLoCo(manager, training.fragments, inner, outer, SYNC_EVERY, **options)
    with algorithm:
        while (step := manager.current_step()) < last:
            training.step()
            if manager.current_step() > step:
                agreed = [each.state_dict() for each in algorithm._agreed]
                outside = [each.state_dict() for each in outer]
                training.report(manager.current_step(), [agreed, outside])
    manager.shutdown()


def decide_late() -> None:
    """Get each decision a little later than the first worker of this group, as may happen."""
    enter = Update.__enter__

    def enter_late(update: Update) -> bool:
        committed = enter(update)
        time.sleep(DECISION_LATE_S)
        return committed

    Update.__enter__ = enter_late  # type: ignore[method-assign]


def train_decoupled(training: Training, last: int) -> None:
    if int(os.environ.get("RANK", "0")) > 0:
        decide_late()
    late_file = os.environ.get("LATE_WHILE")
    manager = Manager(use_async_quorum=False, timeout=timedelta(seconds=20))
    learner = DecoupledDiLoCo(
        manager, training.fragments, training.inner, outer_optimizer, SYNC_EVERY
    )
    with learner:
        shown = learner.merges
        while shown < last:
            while late_file and Path(late_file).exists():
                time.sleep(INNER_S)
            training.step()
            if learner.merges > shown:
                with learner._settled():  # all of one merge
                    state = copy.deepcopy(learner._merger.save_state())
                    contributed = sum(each._seen for each in learner._fragments)
                shown = state["merges"]
                training.report(shown, state, state["merged_tokens"], contributed)
    manager.shutdown()


if __name__ == "__main__":
    main()
