"""Tests programs that compile their model, or a whole step, with torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.training import Trainer, assert_identical, lighthouse, together, trainers

NUM_STEPS = 3


def compiled_model(group: Trainer) -> Callable[[], bool]:
    parallel = torch.compile(group.parallel, backend="eager")

    def step() -> bool:
        group.optimizer.zero_grad()
        parallel(torch.randn(3, 4, generator=group.data)).square().mean().backward()
        return group.optimizer.step()

    return step


def compiled_step(group: Trainer) -> Callable[[], bool]:
    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def step(batch: torch.Tensor) -> bool:
        group.optimizer.zero_grad()
        group.parallel(batch).square().mean().backward()
        return group.optimizer.step()

    return lambda: step(torch.randn(3, 4, generator=group.data))


def compiled_loop_of_its_own(group: Trainer) -> Callable[[], bool]:
    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def step(batch: torch.Tensor) -> bool:
        group.manager.start_quorum()
        group.inner.zero_grad()
        group.parallel(batch).square().mean().backward()
        loss = batch.sum()
        group.manager.allreduce(loss).wait()
        with group.manager.commit() as committed:
            if committed:
                group.inner.step()
        return committed

    return lambda: step(torch.randn(3, 4, generator=group.data))


@pytest.mark.parametrize("compiled", [compiled_model, compiled_step, compiled_loop_of_its_own])
def test_compiled_programs(compiled: Callable[[Trainer], Callable[[], bool]]) -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as groups:
        steps = [compiled(group) for group in groups]

        def train(step: Callable[[], bool]) -> list[bool]:
            return [step() for _ in range(NUM_STEPS)]

        together(*(lambda step=step: train(step) for step in steps))
        assert [group.manager.current_step() for group in groups] == [NUM_STEPS] * 2
        assert_identical(groups)
