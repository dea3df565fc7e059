"""Compares LocalSGD and DiLoCo by public names with plain loops of what is documented of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.diloco_numbers import EXPECTED
from support.running import eventually, steady_address
from support.training import together
from torch import nn

from torchft_svc.client.algorithms import DecoupledDiLoCo
from torchft_svc.compat.coordination import LighthouseServer
from torchft_svc.compat.local_sgd import DiLoCo, LocalSGD
from torchft_svc.compat.manager import Manager
from torchft_svc.compat.process_group import ProcessGroupGloo

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

LONG = timedelta(seconds=30)
NUM_GROUPS = 2
SIZE = 5  # elements of a fragment
STEPS_BEFORE = 2  # the first step of a job makes all weights equal

Weights = list[torch.Tensor]  # of each fragment
# The gradient of a fragment: of its weights, the group's number, and the inner step.
Gradient = Callable[[torch.Tensor, int, int], torch.Tensor]
Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Plan:
    """What both the loop and the groups train."""

    gradient: Gradient
    make_outer: Outer
    fragments: int = 2
    sync_every: int = 6
    delay: int = 0
    alpha: float = 0.0
    steps: int = 16
    inner_lr: float = 1.0
    first_step: int = 0  # of the manager: which fragment is next follows from it
    start: Weights = field(default_factory=list)


def quadratic(weights: torch.Tensor, group: int, step: int) -> torch.Tensor:
    """Return a gradient towards a point that is another one in each group and step."""
    made = torch.Generator().manual_seed(100 * group + step)
    return weights - torch.randn(weights.shape, generator=made)


def constant(weights: torch.Tensor, group: int, step: int) -> torch.Tensor:
    return torch.full_like(weights, 2.0)


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def twice(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2.0)


def start_weights(fragments: int) -> Weights:
    made = torch.Generator().manual_seed(7)
    return [torch.randn(SIZE, generator=made) for _ in range(fragments)]


def train_diloco_in_a_loop(plan: Plan) -> list[list[Weights]]:
    """Return each group's weights before each inner step: the documented algorithm, in one loop."""
    groups = [[each.clone() for each in plan.start] for _ in range(NUM_GROUPS)]
    merged = [each.clone().requires_grad_() for each in plan.start]
    outers = [plan.make_outer([each]) for each in merged]
    interval = plan.sync_every // plan.fragments
    seen: list[list[Weights]] = [[] for _ in groups]
    count, number = 0, plan.first_step
    for step in range(plan.steps):
        for group, weights in enumerate(groups):
            seen[group].append([each.clone() for each in weights])
            for each in weights:
                each -= plan.inner_lr * plan.gradient(each, group, step)
        count += 1
        turn = number % plan.fragments
        if count == interval - plan.delay:
            parts = [merged[turn].detach() - weights[turn] for weights in groups]
            average = torch.stack(parts).mean(0)
        if count == interval:
            merged[turn].grad = average
            outers[turn].step()
            for weights in groups:
                weights[turn] = torch.lerp(merged[turn].detach(), weights[turn], plan.alpha)
            count, number = 0, number + 1
    return seen


def train_local_sgd_in_a_loop(plan: Plan) -> list[list[Weights]]:
    """Return each group's weights before each inner step, averaged after every so many of them."""
    groups = [[each.clone() for each in plan.start] for _ in range(NUM_GROUPS)]
    seen: list[list[Weights]] = [[] for _ in groups]
    for step in range(plan.steps):
        for group, weights in enumerate(groups):
            seen[group].append([each.clone() for each in weights])
            for each in weights:
                each -= plan.inner_lr * plan.gradient(each, group, step)
        if (step + 1) % plan.sync_every == 0:
            for number, parts in enumerate(zip(*groups, strict=True)):
                average = torch.stack(parts).mean(0)
                for weights in groups:
                    weights[number] = average.clone()
    return seen


class Fragment(nn.Module):
    """A part of a model that is one vector."""

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())


def make_manager(
    address: str, name: str, state: nn.Module | None = None, timeout: timedelta = LONG
) -> Manager:
    return Manager(
        pg=ProcessGroupGloo(timeout=LONG),
        load_state_dict=(lambda _: None) if state is None else state.load_state_dict,
        state_dict=(lambda: {"nothing": 0}) if state is None else state.state_dict,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timeout,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        replica_id=name,
    )


def train_in_groups(plan: Plan, algorithm: str) -> list[list[Weights]]:
    """Return the same of two groups that train by the public names."""

    def train(group: int, address: str) -> list[Weights]:
        parts = nn.ModuleList(Fragment(each) for each in plan.start)
        inner = torch.optim.SGD(parts.parameters(), lr=plan.inner_lr)
        manager = make_manager(address, f"group_{group}", parts)
        seen: list[Weights] = []
        try:
            for _ in range(STEPS_BEFORE):
                manager.start_quorum()
                manager.allreduce(torch.ones(1)).wait()
                assert manager.should_commit()
            made: Any
            if algorithm == "local":
                made = LocalSGD(manager, parts, inner, plan.sync_every)
            else:
                made = DiLoCo(
                    manager,
                    list(parts),
                    inner,
                    [plan.make_outer(list(part.parameters())) for part in parts],
                    plan.sync_every,
                    fragment_sync_delay=plan.delay,
                    fragment_update_alpha=plan.alpha,
                )
            with made:
                for step in range(plan.steps):
                    weights = [part.weight.detach() for part in parts]
                    seen.append([each.clone() for each in weights])
                    for part, each in zip(parts, weights, strict=True):
                        part.weight.grad = plan.gradient(each, group, step)
                    inner.step()
        finally:
            manager.shutdown()
        return seen

    with LighthouseServer("127.0.0.1:0", NUM_GROUPS, join_timeout_ms=20_000) as server:
        where = server.address()
        return together(*[lambda n=n: train(n, where) for n in range(NUM_GROUPS)])  # type: ignore[misc]


@pytest.mark.parametrize(("delay", "alpha"), EXPECTED)
def test_the_loop_has_the_published_numbers(delay: int, alpha: float) -> None:
    ones = [torch.ones(1) for _ in range(2)]
    plan = Plan(constant, twice, delay=delay, alpha=alpha, start=ones)
    first, second, _, _ = EXPECTED[delay, alpha]
    for seen in train_diloco_in_a_loop(plan):
        rows = [[each.item() for each in weights] for weights in seen]
        assert rows == [list(pair) for pair in zip(first, second, strict=True)]


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha"), [(1, 0, 0.0), (2, 0, 0.0), (2, 1, 0.0), (3, 1, 0.25)]
)
def test_diloco_has_the_numbers_of_the_loop(fragments: int, delay: int, alpha: float) -> None:
    plan = Plan(
        quadratic,
        nesterov,
        fragments=fragments,
        sync_every=2 * fragments,
        delay=delay,
        alpha=alpha,
        steps=14,
        inner_lr=0.1,
        first_step=STEPS_BEFORE,
        start=start_weights(fragments),
    )
    torch.testing.assert_close(train_in_groups(plan, "diloco"), train_diloco_in_a_loop(plan))


def test_local_sgd_has_the_numbers_of_the_loop() -> None:
    plan = Plan(quadratic, nesterov, sync_every=3, steps=11, inner_lr=0.1, start=start_weights(2))
    expected = train_local_sgd_in_a_loop(plan)
    torch.testing.assert_close(train_in_groups(plan, "local"), expected)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What the merger warns of."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchft_svc.client.algorithms.merging")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def test_decoupled_diloco_goes_on_without_a_lighthouse(warnings: list[str]) -> None:
    """The native algorithm with the manager of a program for the public release."""
    address = steady_address()
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    ends = threading.Event()
    errors: list[BaseException] = []

    def train(learner: DecoupledDiLoCo) -> None:
        try:
            while not ends.wait(0.02):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 1e-3)
                inner.step()
        except BaseException as error:
            errors.append(error)

    def start_lighthouse() -> LighthouseServer:
        return LighthouseServer(address, 1, join_timeout_ms=100)

    lighthouse = start_lighthouse()
    manager = make_manager(address, "a", timeout=timedelta(seconds=3))
    try:
        learner = DecoupledDiLoCo(manager, list(model), inner, nesterov, sync_every=4)
        with learner:
            thread = threading.Thread(target=train, args=(learner,))
            thread.start()
            try:
                eventually(lambda: learner.merges >= 2)
                lighthouse.shutdown()
                eventually(
                    lambda: errors or any("no merges for now" in each for each in warnings), 60
                )
                seen = learner.tokens
                eventually(lambda: errors or learner.tokens > seen + 10)
                lighthouse = start_lighthouse()
                merges = learner.merges
                eventually(lambda: errors or learner.merges >= merges + 2, 60)
            finally:
                ends.set()
                thread.join()
    finally:
        manager.shutdown()
        lighthouse.shutdown()
    assert not errors
