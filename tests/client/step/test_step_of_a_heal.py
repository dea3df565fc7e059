"""Tests what depends on the step number in the step in which a group heals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training import Trainer, bits, lighthouse, together
from torch import nn

from torchft_svc.client import DistributedDataParallel
from torchft_svc.errors import CheckpointError

Program = Callable[[Trainer], bool]


def rate_after_the_backward_pass(trainer: Trainer) -> bool:
    trainer.backward()
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + trainer.manager.current_step())
    return trainer.optimizer.step()


def sums_around_the_backward_pass(trainer: Trainer) -> bool:
    """Looks at step and rates while the others wait for the sums that are still to come."""
    trainer.optimizer.zero_grad()
    loss = trainer.loss()
    trainer.manager.allreduce(loss.detach().clone()).wait()
    trainer.manager.current_step()
    loss.backward()
    rates = [0.1 / (1 + trainer.manager.current_step()) for _ in trainer.optimizer.param_groups]
    trainer.manager.allreduce(torch.ones(1)).wait()
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return trainer.optimizer.step()


def rate_in_a_hook(trainer: Trainer) -> bool:
    def hook(*_: object) -> None:
        for group in trainer.inner.param_groups:
            group["lr"] = 0.1 / trainer.manager.current_step()

    handle = trainer.inner.register_step_pre_hook(hook)
    try:
        return trainer.step()
    finally:
        handle.remove()


def rate_in_the_block(trainer: Trainer) -> bool:
    trainer.backward()
    with trainer.manager.commit() as committed:
        if committed:
            for group in trainer.inner.param_groups:
                group["lr"] = 0.1 / trainer.manager.current_step()
            trainer.inner.step()
    return committed


def layer(trainer: Trainer) -> nn.Module:
    return trainer.model.get_submodule("0")


def layer_is_trained_later(trainer: Trainer) -> bool:
    layer(trainer).requires_grad_(trainer.manager.current_step() >= 3)
    trainer.backward()
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.01)
    return trainer.optimizer.step()


def layer_is_frozen_later(trainer: Trainer) -> bool:
    layer(trainer).requires_grad_(trainer.manager.current_step() < 3)
    trainer.backward()
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.01)
    return trainer.optimizer.step()


def seen_after_a_join(program: Program, **wrapping: Any) -> dict[str, dict[int, Any]]:
    """The bits of a group that has trained, and of one that joins it, after each step."""
    seen: dict[str, dict[int, Any]] = {"a": {}, "b": {}}
    over = threading.Event()

    def step(trainer: Trainer) -> None:
        if program(trainer):
            seen[trainer.name][trainer.manager.current_step()] = bits(trainer.state_dict())

    def goes_on(trainer: Trainer) -> None:
        while not over.is_set():
            step(trainer)

    def joins(trainer: Trainer) -> None:
        try:
            while len(seen[trainer.name]) < 4:
                step(trainer)
        finally:
            over.set()
            trainer.manager.shutdown()

    def made(name: str, seed: int) -> Trainer:
        trainer = Trainer(address, name, seed)
        trainer.parallel = DistributedDataParallel(trainer.manager, trainer.model, **wrapping)
        return trainer

    with lighthouse() as address, made("a", 0) as a:
        while a.manager.current_step() < 6:
            step(a)
        with made("b", 1) as b:
            together(lambda: goes_on(a), lambda: joins(b))
    return seen


@pytest.mark.parametrize(
    "program",
    [
        rate_after_the_backward_pass,
        sums_around_the_backward_pass,
        rate_in_a_hook,
        rate_in_the_block,
        layer_is_trained_later,
        layer_is_frozen_later,
    ],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("is_view", [True, False], ids=["views", "copies"])
def test_i3_the_step_in_which_a_group_heals_is_that_of_the_others(
    program: Program, is_view: bool
) -> None:
    seen = seen_after_a_join(program, gradient_as_bucket_view=is_view)
    both = seen["a"].keys() & seen["b"].keys()
    assert len(both) >= 3
    assert [step for step in sorted(both) if seen["a"][step] != seen["b"][step]] == []


def test_what_is_trained_is_checked_before_it_is_loaded() -> None:
    with lighthouse() as address, Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1) as b:
            b.parallel = DistributedDataParallel(b.manager, nn.Linear(1, 1))
            before = bits(b.state_dict())
            state = a.manager._registry.collect({"step": 2, "batches_committed": 2}, 1.0)
            problem = "it trains 4 parameters of a wrapped model, here are 2"
            with pytest.raises(CheckpointError, match=problem):
                b.manager._registry.check(state, "a")
            assert bits(b.state_dict()) == before
