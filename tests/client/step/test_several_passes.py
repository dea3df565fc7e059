"""Tests steps of several passes with cleared gradients between, and loops that give a step up."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.bounds import check
from support.training import (
    Trainer,
    assert_identical,
    bits,
    in_step,
    lighthouse,
    together,
    trainers,
)


class Ascending(Trainer):
    """Sharpness-aware minimization: the second pass is made at the worst weights nearby."""

    def backward(self) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(3, 4, generator=self.data)
        self.parallel(inputs).square().mean().backward()
        with torch.no_grad():
            before = [each.clone() for each in self.model.parameters()]
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=0.5)
        self.optimizer.zero_grad()
        self.parallel(inputs).square().mean().backward()
        with torch.no_grad():
            for parameter, was in zip(self.model.parameters(), before, strict=True):
                parameter.copy_(was)


class Attacked(Trainer):
    """Adversarial training: passes in a loop, each at inputs that the last one has changed."""

    def backward(self) -> None:
        inputs = torch.randn(3, 4, generator=self.data)
        for _ in range(3):
            self.optimizer.zero_grad(set_to_none=False)
            inputs.requires_grad_(True)
            self.parallel(inputs).square().mean().backward()
            assert inputs.grad is not None
            inputs = (inputs + 0.1 * inputs.grad.sign()).detach()


class ByHelper(Trainer):
    """Both passes are made by one function, which clears the gradients first."""

    def backward(self) -> None:
        super().backward()
        super().backward()


KINDS: list[type[Trainer]] = [Ascending, Attacked, ByHelper]


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("kind", KINDS)
def test_i3_a_group_that_joins_such_a_job_trains_with_it(
    address: str,
    kind: type[Trainer],
    use_async_quorum: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"use_async_quorum": use_async_quorum}
    with kind(address, "a", 0, **options) as a:
        assert a.steps(3) == [True, True, True]
        with kind(address, "b", 1, **options) as b:
            in_step(8, a, b)
            assert_identical([a, b])
    assert not [each for each in caplog.messages if "began another" in each]
    # A step that went on without a question when the other one joined is in vain, once or twice.
    assert len([each for each in caplog.messages if "is discarded" in each]) <= 3


def test_both_passes_are_averaged_and_the_second_one_is_applied() -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as (a, b):

        def step(group: Trainer, scale: float) -> list[torch.Tensor]:
            weight = group.model.get_submodule("2").get_parameter("bias")
            grads = []
            group.optimizer.zero_grad()
            (group.parallel(torch.ones(1, 4)) * scale).sum().backward()
            assert weight.grad is not None
            grads.append(weight.grad.clone())
            group.optimizer.zero_grad()
            (group.parallel(torch.ones(1, 4)) * scale * 10).sum().backward()
            grads.append(weight.grad.clone())
            assert group.optimizer.step()
            assert group.manager._stepper.state.epoch == 1, "one step"
            return grads

        ours, theirs = together(lambda: step(a, 1.0), lambda: step(b, 3.0))
        assert [each.tolist() for each in ours] == [[2.0, 2.0], [20.0, 20.0]]
        assert [each.tolist() for each in theirs] == [each.tolist() for each in ours]
        assert bits(a.state_dict()) == bits(b.state_dict())


def test_a_second_pass_from_some_step_on(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Plain steps first, then sharpness-aware ones."""
    caplog.set_level(logging.WARNING)
    with Ascending(address, "a", 0) as a:
        for _ in range(2):
            Trainer.backward(a)
            assert a.optimizer.step()
        assert a.steps(3) == [True] * 3
        assert a.manager.current_step() == 5
    assert not [each for each in caplog.messages if "is discarded" in each]


class Raising(Trainer):
    """A loop that goes on after an exception in one of its two passes."""

    fails_in = 0
    between = False

    def pass_(self, number: int) -> None:
        fails = self.fails_in == number
        if fails and self.between:
            self.fails_in = 0
            raise ZeroDivisionError
        loss = self.loss()
        if not fails:
            loss.backward()
            return
        self.fails_in = 0
        weights = self.model.get_submodule("0").get_parameter("weight")
        hook = weights.register_hook(lambda _: 1 / 0)  # the last layer's sum is under way
        try:
            loss.backward()
        finally:
            hook.remove()

    def backward(self) -> None:
        while True:
            with contextlib.suppress(ZeroDivisionError):
                self.optimizer.zero_grad()
                self.pass_(1)
                self.optimizer.zero_grad()
                self.pass_(2)
                return


def with_trouble(
    a: Trainer, b: Trainer, num_before: int, begin_trouble: Callable[[], None]
) -> None:
    """Both train; ``a`` has trouble after some steps. Equal steps have equal bits, and the other
    group waits for nothing: each wait would last as long as a collective may."""
    seen: list[dict[int, Any]] = [{}, {}]

    def step(index: int, group: Trainer) -> None:
        if group.step():
            seen[index][group.manager.current_step()] = bits(group.state_dict())

    def has_trouble() -> None:
        try:
            while a.manager.current_step() < num_before:
                step(0, a)
            begin_trouble()
            began_at = time.monotonic()
            until = a.manager.current_step() + 3
            while a.manager.current_step() < until:
                step(0, a)
            check("trouble in a pass", time.monotonic() - began_at, 5.0)
        finally:
            is_over.set()
            a.manager.shutdown()

    def goes_on() -> None:
        while not is_over.is_set():
            step(1, b)

    is_over = threading.Event()
    together(has_trouble, goes_on)
    common = seen[0].keys() & seen[1].keys()
    assert len(common) >= 3
    assert all(seen[0][step] == seen[1][step] for step in common)


@pytest.mark.parametrize("num_before", [1, 3])
@pytest.mark.parametrize("fails_in", [1, 2])
@pytest.mark.parametrize("between", [False, True], ids=["in the pass", "before it"])
def test_an_exception_in_a_pass_begins_another_step(
    address: str, num_before: int, fails_in: int, between: bool
) -> None:
    with Raising(address, "a", 0) as a, Raising(address, "b", 1) as b:

        def begin() -> None:
            a.fails_in, a.between = fails_in, between

        with_trouble(a, b, num_before, begin)
        assert not a.fails_in


def test_an_exception_in_the_first_step_of_all_begins_another_one(address: str) -> None:
    with Raising(address, "a", 0) as a:
        a.fails_in = 1
        assert a.step()
        assert a.manager.current_step() == 1
        assert a.manager._stepper.state.epoch == 2


class Skipping(Trainer):
    """A loop that leaves out a batch after its backward pass, as for a loss that is not finite."""

    num_bad = 0

    def backward(self) -> None:
        while True:
            self.optimizer.zero_grad()
            self.loss().backward()
            if not self.num_bad:
                return
            self.num_bad -= 1


@pytest.mark.parametrize("num_bad", [1, 3])
def test_a_batch_that_is_left_out_after_its_pass_begins_another_step(
    address: str, num_bad: int
) -> None:
    with Skipping(address, "a", 0) as a, Skipping(address, "b", 1) as b:

        def begin() -> None:
            a.num_bad = num_bad

        with_trouble(a, b, 2, begin)
        assert not a.num_bad
