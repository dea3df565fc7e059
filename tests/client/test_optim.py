"""Tests the optimizer's wrapper: what schedulers, hooks and loops expect of an optimizer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.training import (
    Trainer,
    assert_identical,
    bits,
    in_step,
    lighthouse,
    together,
    trainers,
)
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from torchft_svc.client import Optimizer, OptimizerWrapper
from torchft_svc.errors import ConfigError, DeadlineExceeded, PeerError, RequestRefused


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with lighthouse() as address, Trainer(address, "a", 0) as trainer:
        yield trainer


@pytest.fixture
def scaling_trainer() -> Iterator[Trainer]:
    with lighthouse() as address, Trainer(address, "a", 0, use_async_quorum=False) as trainer:
        yield trainer


def test_it_is_an_optimizer_with_the_wrapped_one_s_parts(trainer: Trainer) -> None:
    optimizer, inner = trainer.optimizer, trainer.inner
    assert OptimizerWrapper is Optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    trainer.step()
    assert bits(optimizer.state_dict()) == bits(inner.state_dict())
    optimizer.load_state_dict(inner.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(inner.param_groups) == 2
    assert "Adam" in repr(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
        lambda optimizer: CosineAnnealingLR(optimizer, 10),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
    ],
    ids=["step", "cosine", "one cycle"],
)
@pytest.mark.filterwarnings("error")
def test_learning_rate_schedulers(trainer: Trainer, make: object) -> None:
    scheduler = make(trainer.optimizer)  # type: ignore[operator]
    rates = []
    for _ in range(3):
        if trainer.step():
            scheduler.step()
        rates.append(trainer.inner.param_groups[0]["lr"])
    assert len(set(rates)) == 3


def test_step_hooks_run_for_updates_that_are_applied(trainer: Trainer) -> None:
    calls: list[str] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    trainer.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    trainer.step()
    assert calls == ["before", "after"]
    trainer.backward()
    trainer.manager.report_error(RuntimeError("a bad batch"))
    trainer.optimizer.step()
    assert calls == ["before", "after"]


def test_clearing_gradients_twice_begins_one_step(trainer: Trainer) -> None:
    trainer.step()
    trainer.optimizer.zero_grad()
    epoch = trainer.manager._stepper.state.epoch
    trainer.optimizer.zero_grad(set_to_none=False)
    assert trainer.manager._stepper.state.epoch == epoch
    trainer.loss().backward()
    assert trainer.optimizer.step()


def test_clearing_gradients_after_the_step_works_too(trainer: Trainer) -> None:
    trainer.optimizer.zero_grad()
    for _ in range(3):
        trainer.loss().backward()
        assert trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    assert trainer.manager.current_step() == 3


def test_a_step_without_a_quorum_is_begun_again_with_the_next_zero_grad() -> None:
    short = timedelta(seconds=2)
    with (
        lighthouse(min_replicas=2) as address,
        Trainer(address, "a", 0, use_async_quorum=False, timeout=short, quorum_timeout=short) as a,
    ):
        for _ in range(2):
            with pytest.raises(PeerError):
                a.optimizer.zero_grad()
        with Trainer(address, "b", 1, use_async_quorum=False) as b:

            def retries() -> bool:
                while True:
                    with contextlib.suppress(PeerError):
                        a.optimizer.zero_grad()
                        break
                a.loss().backward()
                return a.optimizer.step()

            assert together(retries, b.step) == [True, True]


def test_accumulated_gradients(trainer: Trainer) -> None:
    for _ in range(2):
        trainer.optimizer.zero_grad()
        with trainer.parallel.no_sync():
            trainer.loss().backward()
        trainer.loss().backward()
        assert trainer.optimizer.step()
    assert trainer.manager.current_step() == 2


def test_the_state_may_be_read_again_after_the_step(trainer: Trainer) -> None:
    trainer.step()
    with trainer.manager._registry.gate.reading(timeout_s=0.0):
        pass
    trainer.backward()
    assert trainer.manager.should_commit()
    with pytest.raises(DeadlineExceeded), trainer.manager._registry.gate.reading(0.0):
        pass


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled before"])
def test_scaled_gradients(scaling_trainer: Trainer, fused: bool, unscales: bool) -> None:
    weights = scaling_trainer.model.get_submodule("2").get_parameter("weight")
    sgd = torch.optim.SGD([weights], lr=1.0, fused=fused)
    optimizer = Optimizer(scaling_trainer.manager, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(loss_of_one: float) -> bool | None:
        optimizer.zero_grad()
        # Not through the wrapper of the model, which would average other parameters as well.
        scaler.scale((weights * loss_of_one).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        committed: bool | None = scaler.step(optimizer)
        scaler.update()
        return committed

    before = weights.detach().clone()
    assert step(0.5)
    torch.testing.assert_close(weights.detach(), before - 0.5)
    assert step(float("inf")), "the others commit it, too"
    torch.testing.assert_close(weights.detach(), before - 0.5)
    assert scaler.get_scale() == 512.0
    assert step(0.25)
    torch.testing.assert_close(weights.detach(), before - 0.75)
    assert scaling_trainer.manager.current_step() == 3


def test_an_update_that_raises_spoils_the_weights(trainer: Trainer) -> None:
    trainer.step()
    saved = trainer.manager.state_dict()
    hook = trainer.inner.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.step()
    hook.remove()
    with pytest.raises(
        RequestRefused, match=r"step 2 was not applied completely \(ZeroDivisionError"
    ):
        trainer.step()
    trainer.manager.load_state_dict(saved)
    assert trainer.step()


def test_closures_are_refused(trainer: Trainer) -> None:
    trainer.backward()
    with pytest.raises(ConfigError, match=r"with manager\.commit\(\)"):
        trainer.optimizer.step(lambda: 0.0)


class Quasi(Trainer):
    """A group that trains by LBFGS, whose closure returns the loss of the averaged pass."""

    def __init__(self, address: str, name: str, seed: int, **options: Any) -> None:
        super().__init__(address, name, seed, **options)
        self.lbfgs = torch.optim.LBFGS(self.model.parameters(), lr=0.5, max_iter=1, history_size=4)
        self.optimizer = Optimizer(self.manager, self.lbfgs)
        self.manager.register_state_dict_fn(
            "lbfgs", self.lbfgs.load_state_dict, self.lbfgs.state_dict
        )

    def step(self) -> bool:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        with self.manager.commit() as committed:
            if committed:
                self.lbfgs.step(lambda: loss)
        return committed


def test_i3_an_optimizer_with_a_closure_is_stepped_in_the_block_of_commit() -> None:
    def history(group: Quasi) -> Any:
        state = group.lbfgs.state_dict()["state"][0]
        return bits({name: each for name, each in state.items() if name != "prev_loss"})

    with lighthouse() as address, Quasi(address, "a", 0) as a:
        a.steps(3)
        with Quasi(address, "b", 1) as b:
            seen: list[dict[int, Any]] = [{}, {}]

            def trains(index: int, group: Quasi) -> bool:
                while len(seen[1]) < 6 and not over.is_set():
                    if group.step():
                        step = group.manager.current_step()
                        seen[index][step] = (bits(group.model.state_dict()), history(group))
                if group is b:
                    over.set()
                    b.manager.shutdown()
                return True

            over = threading.Event()
            together(lambda: trains(0, a), lambda: trains(1, b))
    common = seen[0].keys() & seen[1].keys()
    assert len(common) >= 4
    assert all(seen[0][step] == seen[1][step] for step in common)


def test_an_optimizer_without_its_closure_is_refused_before_the_vote(trainer: Trainer) -> None:
    lbfgs = torch.optim.LBFGS(trainer.model.parameters())
    optimizer = Optimizer(trainer.manager, lbfgs)
    optimizer.zero_grad()
    trainer.loss().backward()
    with pytest.raises(ConfigError, match=r"LBFGS needs max_iter=1"):
        optimizer.step()
    assert trainer.manager.current_step() == 0
    assert trainer.optimizer.step(), "the step is still under way"


def test_what_is_not_an_optimizer(trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="optim='Linear'"):
        Optimizer(trainer.manager, nn.Linear(1, 1))  # type: ignore[arg-type]


def split(trainer: Trainer) -> list[torch.optim.Optimizer]:
    """Two optimizers, each for one layer of the trainer's model."""
    first, last = (trainer.model.get_submodule(name).parameters() for name in ("0", "2"))
    return [torch.optim.Adam(first, lr=0.01), torch.optim.SGD(last, lr=0.1, momentum=0.9)]


def test_a_list_of_optimizers_has_one_vote(trainer: Trainer) -> None:
    adam, sgd = split(trainer)
    optimizer = Optimizer(trainer.manager, [adam, sgd])
    schedulers = [StepLR(adam, 1, gamma=0.5), StepLR(sgd, 1, gamma=0.1)]
    before = bits(trainer.model.state_dict())
    optimizer.zero_grad()
    trainer.loss().backward()
    assert optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    assert trainer.manager.current_step() == 1
    after = bits(trainer.model.state_dict())
    assert all(before[name] != after[name] for name in before)
    assert optimizer.param_groups == adam.param_groups + sgd.param_groups
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.1 * 0.1]
    saved = optimizer.state_dict()
    assert bits(saved["optimizers"]) == bits([adam.state_dict(), sgd.state_dict()])
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    trainer.manager.report_error(RuntimeError("a bad batch"))
    assert not optimizer.step()
    assert bits(trainer.model.state_dict()) == after


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_scaled_gradients_of_several_optimizers(scaling_trainer: Trainer, fused: bool) -> None:
    weights = [
        scaling_trainer.model.get_submodule(name).get_parameter("weight") for name in ("0", "2")
    ]
    optims = [torch.optim.SGD([each], lr=1.0, fused=fused) for each in weights]
    optimizer = Optimizer(scaling_trainer.manager, optims)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [each.detach().clone() for each in weights]
    for loss_of_one in (0.5, float("inf")):
        optimizer.zero_grad()
        scaler.scale(sum((each * loss_of_one).sum() for each in weights)).backward()
        assert scaler.step(optimizer)
        scaler.update()
    for each, was in zip(weights, before, strict=True):
        torch.testing.assert_close(each.detach(), was - 0.5)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_scaled_update_whose_second_part_raises_spoils_the_weights(
    scaling_trainer: Trainer, fused: bool
) -> None:
    weights = [
        scaling_trainer.model.get_submodule(name).get_parameter("weight") for name in ("0", "2")
    ]
    optims = [torch.optim.SGD([each], lr=1.0, fused=fused) for each in weights]
    optimizer = Optimizer(scaling_trainer.manager, optims)
    optims[1].register_step_pre_hook(lambda *_: 1 / 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale(sum(each.sum() for each in weights)).backward()
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    with pytest.raises(
        RequestRefused, match=r"step 1 was not applied completely \(ZeroDivisionError"
    ):
        scaling_trainer.manager.state_dict()


def test_a_scale_is_forgotten_if_the_step_raises(scaling_trainer: Trainer) -> None:
    weights = scaling_trainer.model.get_submodule("2").get_parameter("weight")
    optimizer = Optimizer(scaling_trainer.manager, torch.optim.SGD([weights], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = weights.detach().clone()
    for arguments in ([lambda: 0.0], []):
        optimizer.zero_grad()
        scaler.scale((weights * 0.5).sum()).backward()
        with pytest.raises(ConfigError) if arguments else contextlib.nullcontext():
            assert scaler.step(optimizer, *arguments)
        scaler.update(scaler.get_scale())
    torch.testing.assert_close(weights.detach(), before - 0.5)


def test_a_scale_that_may_be_older_than_the_state_is_refused(trainer: Trainer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    trainer.optimizer.zero_grad()
    scaler.scale(trainer.loss()).backward()
    with pytest.raises(ConfigError, match=r"use_async_quorum.*GradScaler"):
        scaler.step(trainer.optimizer)
    assert trainer.manager.current_step() == 0


def test_what_a_list_of_optimizers_cannot_do_says_so(trainer: Trainer) -> None:
    adam, sgd = split(trainer)
    optimizer = Optimizer(trainer.manager, [adam, sgd])
    with pytest.raises(ConfigError, match=r"add_param_group.*use the single optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ConfigError, match="param_groups"):
        optimizer.param_groups = []
    with pytest.raises(AttributeError, match="of 2 optimizers has no 'defaults'"):
        _ = optimizer.defaults
    with pytest.raises(ConfigError, match="each of 2 optimizers"):
        optimizer.load_state_dict(adam.state_dict())
    for optims, problem in (
        ([], "one optimizer or more"),
        ([adam, adam], "twice"),
        ([adam, trainer.model], r"optim\[1\]='Sequential'"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Optimizer(trainer.manager, optims)  # type: ignore[arg-type]


Loop = Callable[[Trainer, list[torch.optim.Optimizer]], bool]


def by_the_wrapper(trainer: Trainer, optims: list[torch.optim.Optimizer]) -> bool:
    optimizer = Optimizer(trainer.manager, optims)
    optimizer.zero_grad()
    trainer.loss().backward()
    return optimizer.step()


def by_hand(trainer: Trainer, optims: list[torch.optim.Optimizer]) -> bool:
    trainer.manager.start_quorum()
    for optim in optims:
        optim.zero_grad()
    trainer.loss().backward()
    with trainer.manager.commit() as committed:
        if committed:
            for optim in optims:
                optim.step()
    return committed


@pytest.mark.parametrize("loop", [by_the_wrapper, by_hand], ids=["wrapped", "by hand"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_i3_an_update_whose_second_part_raises_is_healed(
    loop: Loop, error: type[BaseException]
) -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as (a, b):
        optims = {group: split(group) for group in (a, b)}
        for group in (a, b):
            wrapped = Optimizer(group.manager, optims[group])
            group.manager.register_state_dict_fn(
                "optimizers", wrapped.load_state_dict, wrapped.state_dict
            )

        def fails_once() -> bool:
            def fails(*_: object) -> None:
                hook.remove()
                raise error("once")

            hook = optims[a][1].register_step_pre_hook(fails)
            step = a.manager.current_step()
            with contextlib.suppress(error):
                loop(a, optims[a])
            assert a.manager.current_step() == step, "the step does not count here"
            with pytest.raises(RequestRefused, match=f"step {step + 1} was not applied completely"):
                a.manager.state_dict()
            return loop(a, optims[a])

        def goes_on() -> bool:
            loop(b, optims[b])
            # One that goes on without a question is in vain: the other group asks.
            return loop(b, optims[b]) or loop(b, optims[b])

        together(lambda: loop(a, optims[a]), lambda: loop(b, optims[b]))
        together(fails_once, goes_on)
        in_step(5, a, b)
        assert_identical([a, b])


def test_a_block_that_applies_an_update(trainer: Trainer) -> None:
    manager = trainer.manager
    trainer.backward()
    with manager.commit() as committed:
        assert committed
        assert manager.current_step() == 1, "hooks and schedules see the step that is being made"
        with pytest.raises(DeadlineExceeded), manager._registry.gate.reading(0.0):
            pass
        trainer.inner.step()
    with manager._registry.gate.reading(0.0):
        pass
    trainer.backward()
    manager.report_error(RuntimeError("a bad batch"))
    with manager.commit() as committed:
        assert not committed
    assert manager.current_step() == 1
    with pytest.raises(RequestRefused, match="no step under way"), manager.commit():
        pass


def test_a_vote_that_nobody_follows_up_counts_with_the_next_step(trainer: Trainer) -> None:
    for _ in range(2):
        trainer.backward()
        assert trainer.manager.should_commit()
        trainer.inner.step()
    assert trainer.manager.current_step() == trainer.manager.batches_committed() == 2
    trainer.manager.allow_state_dict_read()
    trainer.manager.report_spoiled_update(RuntimeError("found too late"))
    with pytest.raises(RequestRefused, match="step 2 was not applied completely"):
        trainer.step()
