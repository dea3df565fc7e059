"""Tests that each of torch's schedulers is in a group that heals what it is in the others."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training import Trainer, assert_identical, in_step, lighthouse
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

# The steps in which a group joins, and in which the test ends; milestones are before and after.
JOINS, ENDS = 4, 14


class Decay:
    """A function of the program with a state of its own, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**self.calls


SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
    lambda optimizer: LambdaLR(optimizer, Decay()),
    lambda optimizer: MultiplicativeLR(optimizer, lambda step: 0.9),
    lambda optimizer: StepLR(optimizer, 3, gamma=0.5),
    lambda optimizer: MultiStepLR(optimizer, [2, 6, 6, 9], gamma=0.5),
    lambda optimizer: ConstantLR(optimizer, factor=0.5, total_iters=6),
    lambda optimizer: LinearLR(optimizer, total_iters=8),
    lambda optimizer: ExponentialLR(optimizer, gamma=0.9),
    lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer), MultiStepLR(optimizer, [3, 5])], milestones=[5]
    ),
    lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer), MultiStepLR(optimizer, [1, 4])], milestones=[2]
    ),
    lambda optimizer: PolynomialLR(optimizer, total_iters=9),
    lambda optimizer: CosineAnnealingLR(optimizer, T_max=8),
    lambda optimizer: ChainedScheduler(
        [MultiStepLR(optimizer, [6, 8]), ExponentialLR(optimizer, 0.9)], optimizer=optimizer
    ),
    lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=2, cooldown=1),
    lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, scale_fn=lambda _: 0.5),
    lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2),
    lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=40),
    lambda optimizer: SWALR(optimizer, swa_lr=0.05, anneal_epochs=8),
]


class Plans:
    """A scheduler of each kind, with an optimizer of its own."""

    def __init__(self) -> None:
        self.optimizers = [
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
            for _ in SCHEDULERS
        ]
        self.schedulers = [
            make(each) for make, each in zip(SCHEDULERS, self.optimizers, strict=True)
        ]

    def step(self) -> None:
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(1.0)
            else:
                scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [each.state_dict() for each in self.optimizers],
            "schedulers": [each.state_dict() for each in self.schedulers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kind, pieces in (("optimizers", self.optimizers), ("schedulers", self.schedulers)):
            for piece, its_state in zip(pieces, state[kind], strict=True):
                piece.load_state_dict(its_state)

    def rates(self) -> list[Any]:
        return [each.param_groups[0]["lr"] for each in self.optimizers]


class Planned(Trainer):
    """A group whose schedulers follow its committed steps; notes their rates after each."""

    def __init__(self, address: str, name: str, seed: int, **options: Any) -> None:
        self.plans = Plans()
        self.rates: dict[int, list[Any]] = {}
        super().__init__(address, name, seed, **options)
        self.inner.register_step_post_hook(lambda *_: self.plans.step())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "plans": self.plans.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.plans.load_state_dict(state["plans"])

    def backward(self) -> None:
        super().backward()
        self.rates.setdefault(self.manager._worker.state.step, self.plans.rates())


def test_the_table_has_all_of_torch_s_schedulers() -> None:
    tested = {type(each) for each in Plans().schedulers}
    known = {
        kind
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, LRScheduler) and not name.startswith("_")
    }
    assert known - {LRScheduler} <= tested


@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["in the step", "before the step"])
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_i3_schedulers_of_a_group_that_heals_go_on_as_those_of_the_others(
    use_async_quorum: bool,
) -> None:
    alone = Plans()  # in a program without replica groups
    expected = []
    for _ in range(ENDS + 1):
        expected.append(alone.rates())
        alone.step()
    with lighthouse() as address:
        with Planned(address, "a", 0, use_async_quorum=use_async_quorum) as a:
            a.until(JOINS)
            before = copy.deepcopy(a.plans.state_dict()["schedulers"])
            with Planned(address, "b", 1, use_async_quorum=use_async_quorum) as b:
                in_step(ENDS, a, b)
                assert_identical([a, b])
        assert before != a.plans.state_dict()["schedulers"]
        for group in (a, b):
            for step, rates in group.rates.items():
                if step in range(1 if group is b else 0, ENDS):
                    assert rates == expected[step], f"{group.name} in step {step}"
