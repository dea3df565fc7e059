"""Tests that a group that leaves between two steps costs the others no step (rule E9)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.running import eventually
from support.training import (
    DEADLINE_S,
    Trainer,
    assert_identical,
    in_step,
    lighthouse,
    together,
    trainers,
)
from torch import nn

from torchft_svc.coordination import LighthouseClient


@contextmanager
def in_term(num: int, address: str = "", **options: Any) -> Iterator[list[Trainer]]:
    """Groups at one step, all of which begin the next one without a question.

    ``address``: that of a lighthouse (default: one of their own).
    """
    with ExitStack() as stack:
        address = address or stack.enter_context(lighthouse())
        all_groups = stack.enter_context(trainers(address, num, **options))
        in_step(3, *all_groups)
        deadline = time.monotonic() + DEADLINE_S
        while not all(each.manager._worker.round.keeps_quorum for each in all_groups):
            assert time.monotonic() < deadline, "the quorum never becomes a term"
            together(*(each.step for each in all_groups))
        yield all_groups


def _step_with_an_allreduce(trainer: Trainer) -> bool:
    trainer.backward()
    trainer.manager.allreduce(torch.ones(3))
    return trainer.optimizer.step()


def knows_of_a_loss(trainer: Trainer) -> None:
    eventually(trainer.manager._stepper._worker.who_is_lost)


@pytest.mark.parametrize("num_left", [1, 2])
def test_a_group_that_shuts_down_between_two_steps_costs_the_others_none(num_left: int) -> None:
    with in_term(num_left + 1) as (*others, leaver):
        step = leaver.manager.current_step()
        batches = leaver.manager.batches_committed()

        def train(trainer: Trainer) -> Callable[[], list[bool]]:
            return lambda: trainer.steps(4)

        def leave() -> list[bool]:
            leaver.manager.shutdown()
            return []

        *committed, _ = together(*map(train, others), leave)
        assert committed == [[True] * 4] * num_left
        for each in others:
            assert each.manager.current_step() == step + 4
            assert each.manager.batches_committed() == batches + 4 * num_left
        assert_identical(others)


def test_the_average_is_that_of_the_groups_that_are_left() -> None:
    """The news come before the first sum, and the gradients are those of two passes."""
    with in_term(3) as (a, b, c):
        losses, sums = [], []
        for each in (a, b):
            inputs = [torch.randn(3, 4, generator=each.data) for _ in range(2)]
            alone = [each.model(batch).square().mean() for batch in inputs]
            sums.append(torch.autograd.grad(alone[0] + alone[1], list(each.model.parameters())))
            each.optimizer.zero_grad()
            with each.parallel.no_sync():
                each.parallel(inputs[0]).square().mean().backward()
            losses.append(each.parallel(inputs[1]).square().mean())
        c.manager.shutdown()
        for each in (a, b):
            knows_of_a_loss(each)
        together(*(loss.backward for loss in losses))
        means = [(one + other) / 2 for one, other in zip(*sums, strict=True)]
        for each in (a, b):
            for parameter, mean in zip(each.model.parameters(), means, strict=True):
                torch.testing.assert_close(parameter.grad, mean)
        assert together(a.optimizer.step, b.optimizer.step) == [True, True]
        assert_identical([a, b])


def test_a_step_whose_connections_have_broken_is_summed_again_without_news_of_a_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Groups that see a kill before the lighthouse reports it; here nobody is lost."""
    caplog.set_level(logging.INFO)
    with in_term(2) as (a, b):
        step = a.manager.current_step()
        together(a.optimizer.zero_grad, b.optimizer.zero_grad)
        for each in (a, b):
            each.manager._runtime.deps.pg.abort()
        together(a.loss().backward, b.loss().backward)
        assert together(a.optimizer.step, b.optimizer.step) == [True, True]
        assert [each.manager.current_step() for each in (a, b)] == [step + 1] * 2
        assert_identical([a, b])
    again = [each for each in caplog.messages if "is summed in another quorum" in each]
    assert len(again) == 2, again


def keeps_gradients_in_the_sums(trainer: Trainer) -> None:
    trainer.inner.zero_grad(set_to_none=False)


def chooses_by_the_number_of_groups(trainer: Trainer) -> None:
    assert trainer.manager.num_participants() == 2


def reduces_before(trainer: Trainer) -> None:
    trainer.manager.allreduce(torch.ones(3))


def fails(trainer: Trainer) -> None:
    trainer.manager.report_error(RuntimeError("the program's own"))


@pytest.mark.parametrize(
    "act", [keeps_gradients_in_the_sums, chooses_by_the_number_of_groups, reduces_before, fails]
)
def test_a_step_that_depends_on_the_group_that_left_is_discarded(
    act: Callable[[Trainer], None],
) -> None:
    """The step's sums were overwritten, or its result is wrong, or is for other members."""
    with in_term(2) as (a, b):
        a.manager.start_quorum()
        act(a)
        if act is not keeps_gradients_in_the_sums:
            for parameter in a.model.parameters():
                parameter.grad = None
        loss = a.loss()
        b.manager.shutdown()
        loss.backward()
        assert not a.optimizer.step()
        assert a.step()


def counts_passes(trainer: Trainer) -> None:
    """Let the model's state change in each forward pass, as a momentum encoder's does."""
    trainer.model.register_buffer("passes", torch.zeros(1))

    def count(model: nn.Module, _: object) -> None:
        model.get_buffer("passes").add_(1.0)

    trainer.model.register_forward_pre_hook(count)


def test_a_group_that_heals_before_its_passes_gets_a_state_from_before_them() -> None:
    with lighthouse() as address, in_term(2, address, use_async_quorum=False) as (a, b):
        for each in (a, b):
            counts_passes(each)
        together(a.step, b.step)
        a.optimizer.zero_grad()
        loss = a.loss()
        b.manager.shutdown()
        knows_of_a_loss(a)
        with Trainer(address, "c", 7, use_async_quorum=False) as c:
            counts_passes(c)
            until = a.manager.current_step() + 3

            def train(trainer: Trainer) -> None:
                while trainer.manager.current_step() < until:
                    trainer.step()

            def end_step() -> None:
                status = LighthouseClient(address, timedelta(seconds=10)).status
                eventually(lambda: any(group.asking for group in status()[0].groups))
                loss.backward()
                a.optimizer.step()
                train(a)

            together(end_step, lambda: train(c))
            assert_identical([a, c])


def test_groups_that_end_at_one_step_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with in_term(3) as groups:
        caplog.clear()
        together(*(each.manager.shutdown for each in groups))
    client = [each for each in caplog.records if each.name.startswith("torchft_svc.client")]
    assert [each.getMessage() for each in client if each.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("step_of", [Trainer.step, _step_with_an_allreduce])
def test_a_group_that_takes_the_place_of_one_that_left_blames_nobody(
    step_of: Callable[[Trainer], bool], caplog: pytest.LogCaptureFixture
) -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as (a, b):

        def train(trainer: Trainer, until: int) -> None:
            while trainer.manager.current_step() < until:
                step_of(trainer)

        def leave_and_come_back() -> None:
            train(b, 4)
            b.manager.shutdown()
            with Trainer(address, "b", 2) as again:
                train(again, 8)

        together(lambda: train(a, 8), leave_and_come_back)
    assert [each for each in caplog.messages if "different operations" in each] == []
