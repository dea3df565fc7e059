"""Tests that a group with another order of equal parameters is refused, however it wraps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.torch_world import alone_in_torch
from support.training import lighthouse, make_manager, together
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchft_svc.client import DistributedDataParallel, Manager, replicate_across_groups
from torchft_svc.errors import RequestRefused

Wrap = Callable[[Manager, nn.Module], object]


@pytest.fixture
def inside() -> Iterator[None]:
    """The process group of a worker that is alone in its group."""
    with alone_in_torch():
        yield


def heads(*names: str) -> nn.Module:
    parts = {name: nn.Linear(2, 2) for name in names}
    return nn.Sequential(nn.ModuleDict(parts))


def alone(manager: Manager, model: nn.Module) -> object:
    return DistributedDataParallel(manager, model)


def behind_another(manager: Manager, model: nn.Module) -> object:
    return [DistributedDataParallel(manager, each) for each in (nn.Linear(2, 2), model)]


def among_many(manager: Manager, model: nn.Module) -> object:
    """What they sum has a longer description than what is sent."""
    before = [nn.Linear(2, 2) for _ in range(20)]
    return [DistributedDataParallel(manager, each) for each in (*before, model)]


def sharded(manager: Manager, model: nn.Module) -> object:
    mesh = init_device_mesh("cpu", (1,))
    for part in model[0].values():  # type: ignore[operator, index]
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    replicate_across_groups(manager, model)
    return model


def sharded_at_once(manager: Manager, model: nn.Module) -> object:
    replicate_across_groups(manager, fully_shard(model, mesh=init_device_mesh("cpu", (1,))))
    return model


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("wrap", [alone, behind_another, among_many, sharded, sharded_at_once])
def test_another_order_of_equal_parameters_is_refused(wrap: Wrap) -> None:
    with lighthouse() as address, make_manager(address, "a") as a:
        of_a = wrap(a, heads("x", "y"))
        a.start_quorum()
        with make_manager(address, "b") as b:
            of_b = wrap(b, heads("y", "x"))
            with pytest.raises(RequestRefused, match=r"'b:.* differs from 'a:") as refused:
                b.start_quorum()
        assert any(f"0.{name}.weight in 'b:" in str(refused.value) for name in "xy")
        del of_a, of_b


def plain(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[no-any-return]


def partly_compiled(model: nn.Module) -> nn.Module:
    model[0] = torch.compile(model[0])  # type: ignore[operator]
    return model


def recomputed(model: nn.Module) -> nn.Module:
    model[0] = checkpoint_wrapper(model[0])  # type: ignore[operator, index]
    return model


@pytest.mark.parametrize("other", [compiled, partly_compiled, recomputed])
def test_a_group_that_compiles_or_recomputes_its_model_joins_one_that_does_not(
    other: Callable[[nn.Module], nn.Module],
) -> None:
    with lighthouse() as address, make_manager(address, "a") as a, make_manager(address, "b") as b:
        models = [
            alone(manager, wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh())))
            for manager, wrap in ((a, plain), (b, other))
        ]
        together(a.start_quorum, b.start_quorum)
        del models
