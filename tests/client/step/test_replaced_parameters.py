"""Tests that a load function which replaces parameters is refused, and not trained on with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training import Trainer, assert_identical, in_step, lighthouse, together
from torch import nn

from torchft_svc.errors import ConfigError, RequestRefused


class Loading(Trainer):
    """A group whose ``load`` loads the model."""

    load: Callable[[nn.Module, dict[str, Any]], object] | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.load is None:
            super().load_state_dict(state)
            return
        self.load(self.model, state["model"])
        self.inner.load_state_dict(state["optimizer"])


def assigns(model: nn.Module, state: dict[str, Any]) -> None:
    model.load_state_dict(state, assign=True)


def assigns_one_layer(model: nn.Module, state: dict[str, Any]) -> None:
    assert isinstance(model, nn.Sequential)
    layer = {name.removeprefix("2."): each for name, each in state.items() if name[0] == "2"}
    model[2].load_state_dict(layer, assign=True)
    model.load_state_dict(state)


def makes_a_parameter(model: nn.Module, state: dict[str, Any]) -> None:
    assert isinstance(model, nn.Sequential)
    model[0].weight = nn.Parameter(state["0.weight"].clone())
    model.load_state_dict(state)


@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("load", "names"),
    [
        (assigns, r"0\.weight and 3 more"),
        (assigns_one_layer, r"2\.weight and 1 more"),
        (makes_a_parameter, r"0\.weight"),
    ],
)
def test_a_heal_that_replaces_parameters_is_refused(
    load: Callable[[nn.Module, dict[str, Any]], None], names: str, use_async_quorum: bool
) -> None:
    options = {"use_async_quorum": use_async_quorum}
    with lighthouse() as address, Loading(address, "a", 0, **options) as a:
        a.steps(2)
        b = Loading(address, "b", 1, **options)
        b.load = load

        def joins() -> None:
            with pytest.raises(ConfigError, match=rf"{names}.*the former parameters.*assign=True"):
                b.step()
            with pytest.raises(RequestRefused, match="not applied completely"):
                b.manager.state_dict()
            b.manager.shutdown()

        together(joins, lambda: a.meets(2) or True)
        step = a.manager.current_step()
        a.steps(2)
        assert a.manager.current_step() == step + 2, "the others continue"


def test_a_load_function_that_copies_is_trained_on_with() -> None:
    """A load function may copy into new memory, which belongs to the same parameters."""

    def copies(model: nn.Module, state: dict[str, Any]) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = state[name].clone()

    with lighthouse() as address, Loading(address, "a", 0) as a:
        a.steps(2)
        with Loading(address, "b", 1) as b:
            b.load = copies
            in_step(5, a, b)
            assert_identical([a, b])


class WithoutWrapper(Loading):
    """A loop that averages its gradients itself; the manager knows the parameters by name only from
    its optimizer."""

    def backward(self) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(3, 4, generator=self.data)
        self.model(inputs).square().mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)


def assigns_the_same_memory(model: nn.Module, state: dict[str, Any]) -> None:
    """Do what ``assign=True`` does with a state that was received in place."""
    model.load_state_dict(state)
    model.load_state_dict(model.state_dict(), assign=True)


def replaces_a_layer(model: nn.Module, state: dict[str, Any]) -> None:
    assert isinstance(model, nn.Sequential)
    model[2] = nn.Linear(8, 2)
    model.load_state_dict(state)


@pytest.mark.parametrize(
    ("load", "names"),
    [
        (assigns, r"Linear\.weight and 3 more"),
        (assigns_the_same_memory, r"Linear\.weight and 3 more"),
        (replaces_a_layer, "parameters of Adam"),
    ],
)
def test_parameters_of_an_optimizer_are_compared_without_a_wrapper_too(
    load: Callable[[nn.Module, dict[str, Any]], None], names: str
) -> None:
    with lighthouse() as address, WithoutWrapper(address, "a", 0) as a:
        a.parallel = a.model  # type: ignore[assignment]
        a.steps(2)
        with WithoutWrapper(address, "b", 1) as b:
            b.parallel = b.model  # type: ignore[assignment]
            b.load = load

            def joins() -> bool:
                with pytest.raises(ConfigError, match=rf"{names}.*assign=True"):
                    b.step()
                b.manager.shutdown()
                return True

            together(joins, lambda: a.meets(2) or True)


def test_a_frozen_part_may_be_assigned() -> None:
    """An assignment to a frozen part replaces nothing that is trained."""

    class Frozen(Loading):
        def __init__(self, address: str, name: str, seed: int) -> None:
            self.encoder = nn.Linear(2, 2).requires_grad_(False)
            super().__init__(address, name, seed)

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "encoder": self.encoder.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.encoder.load_state_dict(state["encoder"], assign=True)

    with lighthouse() as address, Frozen(address, "a", 0) as a:
        a.steps(2)
        with Frozen(address, "b", 1) as b:
            in_step(5, a, b)
            assert_identical([a, b])
