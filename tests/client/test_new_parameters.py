"""Tests that parameters which a module gets after it was wrapped are found in any step."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from support.training import lighthouse, make_manager
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.utils import parametrize

from torchft_svc.client import DistributedDataParallel, Manager, Optimizer, replicate_across_groups
from torchft_svc.errors import ConfigError

IDS = torch.tensor([0, 1, 2])


class Language(nn.Module):
    """A model whose first and last weights are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3)
        self.inner = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Linear(3, 4, bias=False)
        self.last.weight = self.words.weight
        self.more: list[str] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.frozen(self.inner(self.words(ids)))
        for name in self.more:
            states = self.get_submodule(name)(states)
        outputs: torch.Tensor = self.last(states)
        return outputs


class Program:
    """Trains the model with one group."""

    def __init__(self, manager: Manager) -> None:
        torch.manual_seed(0)
        self.manager = manager
        self.model = Language()
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = Optimizer(manager, self.sgd)
        self.wrap()

    def wrap(self) -> None:
        self.parallel = DistributedDataParallel(self.manager, self.model)

    def step(self, *, averages: bool = False) -> bool:
        self.optimizer.zero_grad()
        self.parallel(IDS).square().mean().backward()
        if averages:
            self.manager.allreduce(torch.ones(1)).wait()
        return self.optimizer.step()

    def failure(self) -> str:
        """The error of a step; its traceback would keep the wrapper."""
        try:
            self.step()
        except ConfigError as error:
            return str(error)
        raise AssertionError("the step has not failed")


@pytest.fixture
def program() -> Iterator[Program]:
    """Train, and change the model in the middle of a quorum."""
    with lighthouse() as address, make_manager(address, "a") as manager:
        program = Program(manager)
        assert program.step()
        assert program.step()
        yield program


# -- changes that leave a gradient without an average ----------------------------------------------


def replaces_a_weight(model: Language) -> None:
    model.inner.weight = nn.Parameter(torch.zeros(3, 3))


def replaces_a_weight_behind_torch(model: Language) -> None:
    model.inner._parameters["weight"] = nn.Parameter(torch.zeros(3, 3))


def replaces_a_layer(model: Language) -> None:
    model.inner = nn.Linear(3, 3)


def replaces_a_layer_behind_torch(model: Language) -> None:
    model._modules["inner"] = nn.Linear(3, 3)


def resizes_the_embedding(model: Language) -> None:
    model.words = nn.Embedding(6, 3)
    model.last.weight = model.words.weight


def separates_shared_weights(model: Language) -> None:
    model.last.weight = nn.Parameter(model.words.weight.detach().clone())


def adds_a_layer(model: Language) -> None:
    model.adapter = nn.Linear(3, 3)
    model.more = ["adapter"]


def adds_a_layer_to_a_leaf(model: Language) -> None:
    model.inner.adapter = nn.Linear(3, 3)
    model.more = ["inner.adapter"]


def trains_what_was_frozen_late(model: Language) -> None:
    """Unfreeze a part in the forward pass, behind the wrapper's own check."""
    model.register_forward_pre_hook(lambda *_: model.frozen.requires_grad_(True) and None)


def normalizes_a_weight(model: Language) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.inner)


NEW = {
    replaces_a_weight: r"inner\.weight",
    replaces_a_weight_behind_torch: r"inner\.weight",
    replaces_a_layer: r"inner\.weight",
    replaces_a_layer_behind_torch: r"inner\.weight",
    resizes_the_embedding: r"words\.weight",
    separates_shared_weights: r"last\.weight",
    adds_a_layer: r"adapter\.weight",
    adds_a_layer_to_a_leaf: r"inner\.adapter\.weight",
    trains_what_was_frozen_late: r"frozen\.weight",
    normalizes_a_weight: r"inner\.parametrizations\.weight\.original0",
}


@pytest.mark.parametrize(("change", "name"), NEW.items())
def test_a_new_parameter_is_refused_until_the_module_is_wrapped_again(
    program: Program, change: Callable[[Language], None], name: str
) -> None:
    change(program.model)
    before = program.manager.current_step()
    assert re.search(rf"^{name}=.*wrap the module again", program.failure())
    assert program.manager.current_step() == before
    if change is trains_what_was_frozen_late:
        return  # the wrapper's own check follows
    program.wrap()  # while the traceback of the error may still hold the wrapper before
    program.sgd.param_groups.clear()
    program.sgd.add_param_group({"params": list(program.model.parameters()), "lr": 0.1})
    assert program.step()
    assert program.step()


def test_a_model_of_new_parameters_alone(program: Program) -> None:
    """The wrapper sums nothing, and the vote has to report why."""
    resizes_the_embedding(program.model)
    replaces_a_layer(program.model)
    assert "wrap the module again" in program.failure()
    assert "wrap the module again" in str(program.manager.errored())


def test_one_that_a_program_may_average_by_hand_is_only_warned_of(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    adds_a_layer(program.model)
    with caplog.at_level(logging.WARNING):
        assert program.step(averages=True)
        assert program.step(averages=True)
    warnings = [each for each in caplog.messages if "wrap the module again" in each]
    assert len(warnings) == 1
    assert warnings[0].startswith("adapter.weight=")


def test_what_an_optimizer_updates_besides_is_warned_of_in_a_later_step(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    apart = nn.Parameter(torch.ones(2))
    program.sgd.add_param_group({"params": [apart], "lr": 0.1})
    assert program.step()
    assert not caplog.messages, "it has no gradient"
    apart.grad = torch.ones(2)
    program.optimizer.zero_grad()
    (program.parallel(IDS).square().mean() + apart.sum()).backward()
    assert program.optimizer.step()
    assert any("nothing averages the gradients of 1 parameters" in each for each in caplog.messages)


def test_one_that_is_wrapped_within_its_first_step_is_not_warned_of(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    assert program.step()
    program.manager.start_quorum()
    program.model.frozen.requires_grad_(True)
    program.wrap()
    assert program.step()
    assert not caplog.messages


# -- changes of the kind of a parameter ------------------------------------------------------------


def to_bfloat16(model: Language) -> None:
    model.bfloat16()


def to_double(model: Language) -> None:
    model.double()


def resizes_in_place(model: Language) -> None:
    model.words.weight.data = torch.zeros(6, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (to_bfloat16, r"'\(\d.*\) float32 on cpu before, .* bfloat16 on cpu now'"),
        (to_double, r"float32 on cpu before, .* float64 on cpu now"),
        (
            resizes_in_place,
            r"^words\.weight='\(4, 3\) float32 on cpu before, \(6, 3\) float32 on cpu now'",
        ),
    ],
)
def test_parameters_of_another_kind_are_refused_until_the_module_is_wrapped_again(
    program: Program, change: Callable[[Language], None], reason: str
) -> None:
    change(program.model)
    failure = program.failure()
    assert re.search(reason, failure)
    assert "wrap the module again after .to(), .bfloat16()" in failure
    assert not program.optimizer.step()
    program.wrap()
    assert program.step()


# -- changes that are nobody's fault ---------------------------------------------------------------


def nothing(model: Language) -> None:
    pass


def freezes_a_layer(model: Language) -> None:
    model.inner.requires_grad_(False)


def adds_a_frozen_layer(model: Language) -> None:
    adds_a_layer(model)
    model.adapter.requires_grad_(False)


def adds_a_layer_that_is_not_used(model: Language) -> None:
    adds_a_layer(model)
    model.more = []


def drops_a_layer(model: Language) -> None:
    model.inner = nn.Identity()  # type: ignore[assignment]


def moves_a_layer(model: Language) -> None:
    model.elsewhere = model.inner
    model.inner = nn.Identity()  # type: ignore[assignment]
    model.more = ["elsewhere"]


def replaces_memory(model: Language) -> None:
    """Replace the memory, as programs do that train on with averaged weights."""
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()


def parametrizes_a_weight(model: Language) -> None:
    parametrize.register_parametrization(model.inner, "weight", nn.Tanh())


def computes_with_other_weights(model: Language) -> None:
    weights = {f"module.{name}": each.detach() for name, each in model.named_parameters()}
    with torch.no_grad():
        functional_call(
            model, {name.removeprefix("module."): w for name, w in weights.items()}, IDS
        )


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        freezes_a_layer,
        adds_a_frozen_layer,
        adds_a_layer_that_is_not_used,
        drops_a_layer,
        moves_a_layer,
        replaces_memory,
        parametrizes_a_weight,
        computes_with_other_weights,
    ],
)
def test_other_changes_are_none_of_our_business(
    program: Program, change: Callable[[Language], None], caplog: pytest.LogCaptureFixture
) -> None:
    change(program.model)
    assert program.step()
    assert program.step()
    assert not [each for each in caplog.messages if "averages" in each]


def test_an_adapter_of_a_sharded_model() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with lighthouse() as address, make_manager(address, "a") as manager:
            model = Language()
            mesh = init_device_mesh("cpu", (1,))
            fully_shard(model.inner, mesh=mesh)
            fully_shard(model, mesh=mesh)
            replicate_across_groups(manager, model)

            def step() -> bool:
                manager.start_quorum()
                model(IDS).square().mean().backward()
                return manager.should_commit()

            assert step()
            assert step()
            adds_a_layer(model)
            with pytest.raises(ConfigError, match=r"^adapter\.weight=.*wrap the module again"):
                step()
    finally:
        dist.destroy_process_group()
