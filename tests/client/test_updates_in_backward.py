"""Tests that an optimizer which steps in the backward pass is refused, and what else may change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import lighthouse, make_manager
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from torchft_svc.client import DistributedDataParallel, Manager, Optimizer, replicate_across_groups
from torchft_svc.errors import ConfigError

Hook = Callable[[nn.Parameter], None]


@pytest.fixture
def alone() -> Iterator[Manager]:
    with lighthouse() as address, make_manager(address, "a") as manager:
        yield manager


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


# -- updates within the pass -----------------------------------------------------------------------


def step_each(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Any:
    def hook_of(parameter: nn.Parameter) -> Hook:
        optimizer = make([parameter])

        def step(parameter: nn.Parameter) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    return hook_of


def by_hand(_: nn.Parameter) -> Hook:
    def step(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)

    return step


STEPS: dict[str, Callable[[nn.Parameter], Hook]] = {
    "SGD": step_each(lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "Adam": step_each(lambda parameters: torch.optim.Adam(parameters)),
    "foreach": step_each(lambda parameters: torch.optim.AdamW(parameters, foreach=True)),
    "fused": step_each(lambda parameters: torch.optim.Adam(parameters, fused=True)),
    "by hand": by_hand,
}


@pytest.mark.parametrize("is_registered_first", [True, False])
@pytest.mark.parametrize("hook_of", STEPS.values(), ids=STEPS)
def test_an_optimizer_that_steps_in_hooks_is_refused(
    alone: Manager, hook_of: Callable[[nn.Parameter], Hook], is_registered_first: bool
) -> None:
    model = net()
    if not is_registered_first:
        parallel = DistributedDataParallel(alone, model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook_of(parameter))  # type: ignore[no-untyped-call]
    if is_registered_first:
        parallel = DistributedDataParallel(alone, model)
    is_by_hand = hook_of is by_hand
    assert_refused(alone, parallel, r"\d\.(weight|bias)", by_optimizer=not is_by_hand)


def test_a_single_parameter_with_such_a_hook_is_named(alone: Manager) -> None:
    model = net()
    parallel = DistributedDataParallel(alone, model)
    weight = model.get_parameter("2.weight")
    weight.register_post_accumulate_grad_hook(by_hand(weight))  # type: ignore[no-untyped-call]
    assert_refused(alone, parallel, r"2\.weight", by_optimizer=False)


def test_a_hook_of_a_gradient_that_updates_another_parameter(alone: Manager) -> None:
    """Optimizers that keep one gradient only use the one before when one arrives."""
    model = net()
    parallel = DistributedDataParallel(alone, model)
    last = model.get_parameter("2.bias")

    def step(gradient: torch.Tensor) -> torch.Tensor:
        if last.grad is not None:
            with torch.no_grad():
                last.sub_(last.grad)
        return gradient

    model.get_parameter("0.weight").register_hook(step)  # type: ignore[no-untyped-call]
    assert_refused(alone, parallel, r"2\.bias", by_optimizer=False)


def test_torch_s_optimizer_in_the_backward_pass(alone: Manager) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    assert_refused(alone, DistributedDataParallel(alone, model), r"\d\.(weight|bias)")


@pytest.mark.parametrize("name", ["SGD", "fused", "by hand"])
def test_sharded_parameters(alone: Manager, name: str) -> None:
    """FSDP calls the hooks itself, with averages, but before the vote."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = net()
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)  # type: ignore[index]
        fully_shard(model, mesh=mesh)
        replicate_across_groups(alone, model)
        alone.start_quorum()
        model(torch.ones(3, 4)).sum().backward()
        assert alone.should_commit()
        for parameter in model.parameters():
            hook = STEPS[name](parameter)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        is_by_hand = name == "by hand"
        # FSDP itself cannot continue after an error in a pass.
        assert_refused(alone, model, r"\d\.(weight|bias)", by_optimizer=not is_by_hand, times=1)
    finally:
        dist.destroy_process_group()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """Copies; of sharded parameters the local parts."""
    return [getattr(each, "_local_tensor", each.detach()).clone() for each in model.parameters()]


def assert_refused(
    manager: Manager,
    parallel: nn.Module,
    name: str,
    *,
    by_optimizer: bool = True,
    times: int = 2,
) -> None:
    """The first pass raises, and its step is not committed, even if the program goes on.

    A step of an optimizer is refused before it changes anything.
    """
    for _ in range(times):
        manager.start_quorum()
        reason = rf"^{name}=.*steps in a hook.*Remove the hook, and step the optimizer after"
        before = weights_of(parallel)
        with pytest.raises(ConfigError, match=reason):
            parallel(torch.ones(3, 4)).sum().backward()
        if by_optimizer:
            torch.testing.assert_close(weights_of(parallel), before, rtol=0, atol=0)
        assert re.search(reason, str(manager.errored()))
        assert not manager.should_commit()


# -- what a pass may change ------------------------------------------------------------------------


def plain(model: nn.Module) -> nn.Module:
    return model


def normalized(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    parametrizations.spectral_norm(model[0])
    parametrizations.weight_norm(model[2])
    return model


def normalized_as_before(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    torch.nn.utils.spectral_norm(model[0])
    torch.nn.utils.weight_norm(model[2])
    return model


class Clamped(nn.Module):
    """Changes its weights in place in each forward pass, and repeats that in the backward pass."""

    def __init__(self, model: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.model = model
        self.table = nn.Embedding(4, 4, max_norm=0.5)
        self.use_reentrant = use_reentrant

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.3, 0.3)
        embedded = self.table(torch.tensor([0, 1, 2]))
        outputs: torch.Tensor = self.model(inputs + embedded)
        return outputs

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone().requires_grad_()
        outputs: torch.Tensor = checkpoint(self.compute, inputs, use_reentrant=self.use_reentrant)
        return outputs


def clamped(model: nn.Module) -> nn.Module:
    return Clamped(model, use_reentrant=False)


def clamped_in_a_nested_pass(model: nn.Module) -> nn.Module:
    return Clamped(model, use_reentrant=True)


def with_averaged_weights(model: nn.Module) -> nn.Module:
    averages = {id(each): each.detach().clone() for each in model.parameters()}

    def average(parameter: nn.Parameter) -> None:
        averages[id(parameter)].lerp_(parameter.detach(), 0.1)

    return with_hooks(model, average)


def with_clipped_gradients(model: nn.Module) -> nn.Module:
    def clip(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-3, 1e-3)

    return with_hooks(model, clip)


def with_an_optimizer_of_its_own(model: nn.Module) -> nn.Module:
    """Use an optimizer of something else than the wrapped model."""
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    optimizer = torch.optim.SGD([other], lr=0.1)
    return with_hooks(model, lambda _: optimizer.step())


def with_hooks(model: nn.Module, hook: Callable[[nn.Parameter], object]) -> nn.Module:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return model


CHANGES = [
    plain,
    normalized,
    normalized_as_before,
    clamped,
    clamped_in_a_nested_pass,
    with_averaged_weights,
    with_clipped_gradients,
    with_an_optimizer_of_its_own,
]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_are_no_updates(
    alone: Manager, change: Callable[[nn.Module], nn.Module]
) -> None:
    model = change(net())
    parallel = DistributedDataParallel(alone, model)
    optimizer = Optimizer(alone, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        with parallel.no_sync():
            parallel(torch.ones(3, 4)).sum().backward()
        parallel(torch.ones(3, 4)).sum().backward()
        with torch.no_grad():  # between two passes all may change, as for sharpness
            for parameter in model.parameters():
                parameter.add_(1e-3)
        parallel(torch.ones(3, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert optimizer.step()


def test_gradients_that_a_program_clips_in_a_hook_are_averaged_clipped(alone: Manager) -> None:
    model = with_clipped_gradients(net())
    parallel = DistributedDataParallel(alone, model)
    alone.start_quorum()
    parallel(torch.ones(3, 4)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() == pytest.approx(1e-3)
