"""A replica group of the slow links' benchmark: it trains, or sums, as a line on its input asks.

``train ALGORITHM SECONDS`` is answered with ``step SECONDS TOKENS LOSS`` after each step, and with
``end LOSS`` of text that nobody trains on. ``sum FORMAT NUMEL REPEAT`` is answered with ``sum
SECONDS ERROR``, the mean relative error of an average of normal numbers, and with ``end``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from tools.benchmarks.children.characters import (
    ALPHA,
    BATCH,
    DELAY,
    OUTER,
    SYNC_EVERY,
    Text,
    make_model,
)
from torchft_svc.client import DistributedDataParallel, Manager, OptimizerWrapper
from torchft_svc.client.algorithms import DecoupledDiLoCo, DiLoCo, LocalSGD

TIMEOUT = timedelta(seconds=60)


class Group:
    """A replica group of one worker, which waits in each step as if a device computed meanwhile."""

    def __init__(self, lighthouse: str, number: int, num_groups: int, device_s: float) -> None:
        self._lighthouse = lighthouse
        self._number = number
        self._num_groups = num_groups
        self._device_s = device_s

    def train(self, algorithm: str, seconds: float) -> None:
        """Train a new model for ``seconds``, which begin when all groups are there."""
        model, text = make_model(), Text(self._number)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        is_decoupled = algorithm.startswith("decoupled")

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            adam.load_state_dict(state["adam"])

        states: dict[str, Any] = {
            "state_dict": lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
            "load_state_dict": load,
        }
        if is_decoupled:  # it heals the merged weights alone
            states = {}
        manager = self._manager(use_async_quorum=algorithm == "ddp", **states)
        learner: DecoupledDiLoCo | None = None
        trained: nn.Module = model
        optimizer: torch.optim.Optimizer | OptimizerWrapper = adam
        with contextlib.ExitStack() as stack:
            if algorithm == "ddp":
                trained = DistributedDataParallel(manager, model)
                optimizer = OptimizerWrapper(manager, adam)
            elif is_decoupled:
                learner = _make_learner(algorithm, manager, model, adam, self._num_groups)
            else:
                stack.enter_context(_algorithm(algorithm, manager, model, adam))
            self._meet(manager)
            if learner is not None:  # from here on its own thread begins the manager's steps
                stack.enter_context(learner)
            began_at = time.monotonic()
            while time.monotonic() < began_at + seconds:
                optimizer.zero_grad()
                loss = text.loss(trained)
                time.sleep(self._device_s)
                loss.backward()  # type: ignore[no-untyped-call]
                if learner is not None:
                    learner.add_tokens(BATCH)
                optimizer.step()
                print(
                    f"step {time.monotonic() - began_at:.3f} {BATCH} {loss.item():.4f}", flush=True
                )
        if learner is not None:
            learner.load_merged_weights()
        print(f"end {text.unseen_loss(model):.4f}", flush=True)

    def sum(self, number_format: str, numel: int, repeat: int) -> None:
        """Average normal numbers over the groups, ``repeat`` times after one that warms up."""
        quantized = False if number_format == "float32" else number_format
        parts = [
            torch.randn(numel, generator=torch.Generator().manual_seed(number))
            for number in range(self._num_groups)
        ]
        exact = sum(parts) / len(parts)
        assert isinstance(exact, Tensor)
        with self._manager(
            use_async_quorum=False, state_dict=dict, load_state_dict=lambda _: None
        ) as manager:
            for turn in range(repeat + 1):
                self._meet(manager)
                tensor = parts[self._number].clone()
                manager.start_quorum()
                manager.allreduce(torch.zeros(1)).wait()  # all begin at the same time
                began_at = time.monotonic()
                manager.allreduce(tensor, quantized).wait()
                took_s = time.monotonic() - began_at
                assert manager.should_commit()
                error = ((tensor - exact).abs().mean() / exact.abs().mean()).item()
                if turn:
                    print(f"sum {took_s:.4f} {error:.6f}", flush=True)
        print("end", flush=True)

    def _manager(self, **options: Any) -> Manager:
        return Manager(
            lighthouse_addr=self._lighthouse,
            replica_id=f"group-{self._number}",
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            **options,
        )

    def _meet(self, manager: Manager) -> None:
        """Return when all groups are in a step together."""
        while True:
            manager.start_quorum()
            manager.allreduce(torch.zeros(1), reduce_op=ReduceOp.SUM).wait()
            is_complete = manager.num_participants() == self._num_groups
            if manager.should_commit() and is_complete:
                return


def _algorithm(
    name: str, manager: Manager, model: nn.Sequential, adam: torch.optim.Optimizer
) -> LocalSGD | DiLoCo:
    """Return the algorithm that is called ``name``, such as ``streaming-int8``."""
    kind, _, number_format = name.partition("-")
    if kind == "local_sgd":
        return LocalSGD(manager, model, adam, SYNC_EVERY)
    fragments: list[nn.Module] = [model] if kind == "diloco" else list(model)
    options: dict[str, Any] = {}
    if kind == "streaming":
        options = {"fragment_sync_delay": DELAY, "fragment_update_alpha": ALPHA}
    if number_format:
        options |= {"should_quantize": number_format, "error_feedback": True}
    outer = [torch.optim.SGD(each.parameters(), **OUTER) for each in fragments]
    return DiLoCo(manager, fragments, adam, outer, SYNC_EVERY, **options)


def _make_learner(
    name: str, manager: Manager, model: nn.Sequential, adam: torch.optim.Optimizer, num: int
) -> DecoupledDiLoCo:
    """Return the learner of ``decoupled`` or ``decoupled-int8``, one of ``num``."""
    number_format = name.partition("-")[2]
    return DecoupledDiLoCo(
        manager,
        list(model),
        adam,
        lambda weights: torch.optim.SGD(weights, **OUTER),
        SYNC_EVERY,
        min_replicas=num,
        should_quantize=number_format or False,
        error_feedback=bool(number_format),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--device-ms", type=float, required=True)
    options = parser.parse_args()
    group = Group(options.lighthouse, options.number, options.groups, options.device_ms / 1000)
    print("ready", flush=True)
    for line in sys.stdin:
        what, name, *numbers = line.split()
        if what == "train":
            group.train(name, float(numbers[0]))
        else:
            group.sum(name, int(numbers[0]), int(numbers[1]))


if __name__ == "__main__":
    main()
