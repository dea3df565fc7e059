"""Tests the optimizer's wrapper: what schedulers, hooks and loops expect of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from torchft_svc.client import Optimizer, OptimizerWrapper
from torchft_svc.errors import ConfigError, DeadlineExceeded, RequestRefused

from .training import Trainer, bits, lighthouse


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with lighthouse() as address, Trainer(address, "a", 0) as trainer:
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
def test_scaled_gradients(trainer: Trainer, fused: bool, unscales: bool) -> None:
    weights = trainer.model.get_submodule("2").get_parameter("weight")
    sgd = torch.optim.SGD([weights], lr=1.0, fused=fused)
    optimizer = Optimizer(trainer.manager, sgd)
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
    assert trainer.manager.current_step() == 3


def test_an_update_that_raises_spoils_the_weights(trainer: Trainer) -> None:
    trainer.step()
    saved = trainer.manager.state_dict()
    hook = trainer.inner.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.step()
    hook.remove()
    with pytest.raises(RequestRefused, match=r"step 2 was not applied whole \(ZeroDivisionError"):
        trainer.step()
    trainer.manager.load_state_dict(saved)
    assert trainer.step()


def test_closures_are_refused(trainer: Trainer) -> None:
    trainer.backward()
    with pytest.raises(ConfigError, match="one backward pass"):
        trainer.optimizer.step(lambda: 0.0)


def test_what_is_not_an_optimizer(trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="optim='Linear'"):
        Optimizer(trainer.manager, nn.Linear(1, 1))  # type: ignore[arg-type]
