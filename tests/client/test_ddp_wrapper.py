"""Tests the parallel wrapper as a module: its attributes, and the checks of its arguments."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator

import pytest
import torch
from support.training import lighthouse
from torch import nn

from torchft_svc.client import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft_svc.errors import ConfigError
from torchft_svc.testing import FakeProcessGroupWrapper

from .test_ddp import ONE, Branches, mlp


@pytest.fixture
def alone() -> Iterator[Manager]:
    with lighthouse() as address, Manager(lighthouse_addr=address, in_process=True) as manager:
        yield manager


def test_it_is_a_module_with_torch_s_names(alone: Manager) -> None:
    model = mlp()
    parallel = DistributedDataParallel(alone, model)
    assert parallel.module is model
    assert list(parallel.state_dict()) == [f"module.{key}" for key in model.state_dict()]
    assert not parallel.eval().module.training


def test_a_model_that_is_only_used_needs_no_step(alone: Manager) -> None:
    parallel = DistributedDataParallel(alone, mlp())
    with torch.no_grad():
        assert parallel(ONE).shape == (2, 2)


def test_what_belongs_to_its_process_cannot_be_copied(alone: Manager) -> None:
    parallel = DistributedDataParallel(alone, mlp())
    with pytest.raises(TypeError, match=r"copy or save \.module"):
        copy.deepcopy(parallel)
    assert copy.deepcopy(parallel.module)
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        pickle.dumps(alone)


def test_a_parameter_that_was_frozen_cannot_be_trained(alone: Manager) -> None:
    model = mlp()
    model.get_submodule("0").requires_grad_(False)
    parallel = DistributedDataParallel(alone, model)
    parallel(ONE)
    model.get_submodule("0").requires_grad_(True)
    with pytest.raises(ConfigError, match=r"0\.weight\.requires_grad=True.*wrap the module again"):
        parallel(ONE)


@pytest.mark.parametrize("is_averaged", [False, True])
def test_gradients_that_nothing_averages_are_warned_of_once(
    alone: Manager, is_averaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, loss = mlp(), nn.Linear(2, 1)
    sgd = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    parallel, optimizer = DistributedDataParallel(alone, model), Optimizer(alone, sgd)
    for _ in range(2):
        optimizer.zero_grad()
        loss(parallel(ONE)).sum().backward()
        for parameter in loss.parameters() if is_averaged else ():
            assert parameter.grad is not None
            alone.allreduce(parameter.grad).wait()
        assert optimizer.step()
    messages = [each.message for each in caplog.records if "nothing averages" in each.message]
    assert len(messages) == int(not is_averaged)
    assert all("2 parameters (the first one's shape is (1, 2))" in each for each in messages)


def test_a_group_that_is_alone_keeps_its_gradients_once(alone: Manager) -> None:
    """A lone group's gradients are not copied into buckets, whose memory is not touched then."""
    model = mlp()
    other = copy.deepcopy(model)
    parallel = DistributedDataParallel(alone, model)
    for bucket in parallel._reducer._buckets:
        bucket.memory.fill_(7)
    for _ in range(2):
        alone.start_quorum()
        model.zero_grad()
        parallel(ONE).sum().backward()
        assert alone.should_commit()
        got = [parameter.grad for parameter in model.parameters()]
        other.zero_grad()
        other(ONE).sum().backward()
        torch.testing.assert_close(got, [parameter.grad for parameter in other.parameters()])
    for bucket in parallel._reducer._buckets:
        assert all((view == 7).all() for view in bucket.views)


def test_a_wrapper_leaves_no_hooks_behind(alone: Manager) -> None:
    """The parameters may have hooks of the program, which stay."""
    model = mlp()
    first, *_ = model.parameters()
    calls: list[object] = []
    first.register_post_accumulate_grad_hook(calls.append)  # type: ignore[no-untyped-call]

    def num_hooks() -> list[int]:
        return [len(each._post_accumulate_grad_hooks or ()) for each in model.parameters()]  # type: ignore[attr-defined]

    parallel = DistributedDataParallel(alone, model)
    once = num_hooks()
    assert min(once) >= 1
    for _ in range(3):
        parallel = DistributedDataParallel(alone, model)
        gc.collect()
        assert num_hooks() == once
    alone.start_quorum()
    parallel(ONE).sum().backward()
    assert alone.should_commit()
    assert calls == [first]
    del parallel
    gc.collect()
    assert num_hooks() == [1, *[0] * (len(once) - 1)]


class Lookup(nn.Module):
    """A layer whose gradient is sparse, which no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(inputs, self.table, sparse=True)


def test_a_sparse_gradient_is_refused_in_the_first_step(alone: Manager) -> None:
    parallel = DistributedDataParallel(alone, Lookup())
    alone.start_quorum()
    loss = parallel(torch.tensor([1])).sum()
    with pytest.raises(ConfigError, match=r"table='torch\.sparse_coo'.*use sparse=False"):
        loss.backward()
    assert not alone.should_commit()


def test_a_parameter_without_a_shape_is_refused(alone: Manager) -> None:
    with pytest.raises(ConfigError, match=r"0\.weight='not initialized'.*call the module once"):
        DistributedDataParallel(alone, nn.Sequential(nn.LazyLinear(2)))


def test_arguments_that_cannot_be_honored(alone: Manager) -> None:
    with pytest.raises(ConfigError, match="no parameter to train"):
        DistributedDataParallel(alone, nn.ReLU())
    with pytest.raises(ConfigError, match=r"0\.sparse=True.*sparse gradients"):
        DistributedDataParallel(alone, nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    with pytest.raises(ConfigError, match=r"process_group=.*brings its own"):
        DistributedDataParallel(alone, mlp(), process_group=object())
    with pytest.raises(TypeError, match="no argument 'colour'"):
        DistributedDataParallel(alone, mlp(), colour="red")
    with pytest.warns(UserWarning, match="device_ids has no effect"):
        DistributedDataParallel(alone, mlp(), device_ids=[0])
    with pytest.warns(UserWarning, match="broadcast_buffers has no effect: each group keeps"):
        DistributedDataParallel(alone, mlp(), broadcast_buffers=True)
    DistributedDataParallel(
        alone, mlp(), find_unused_parameters=True, broadcast_buffers=False, device_ids=None
    )


def test_torch_s_wrapper_of_another_model_is_none_of_ours(
    alone: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch notes the one whose forward pass is under way for all threads at once."""
    other = nn.parallel.DistributedDataParallel
    monkeypatch.setattr(other, "_active_ddp_module", nn.Sequential(nn.Linear(2, 2)))
    parallel = DistributedDataParallel(alone, mlp())
    with torch.no_grad():
        assert parallel(ONE).shape == (2, 2)


@pytest.mark.parametrize("failing", ["launch", "future", "quorum"])
@pytest.mark.parametrize("hands_out", [False, True])
def test_a_step_that_fails_leaves_gradients_in_the_same_parameters(
    hands_out: bool, failing: str
) -> None:
    """The other workers of a group may have averages, and reduce what they have in the group."""
    pg = FakeProcessGroupWrapper(ProcessGroupGloo())
    torch.manual_seed(0)
    with (
        lighthouse() as address,
        Manager(pg=pg, lighthouse_addr=address, in_process=True) as manager,
    ):
        model = Branches()
        optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        parallel = DistributedDataParallel(
            manager, model, bucket_cap_mb=1e-5, gradient_as_bucket_view=hands_out
        )
        for fails in (False, True, False):
            if fails:
                error = RuntimeError("a connection broke")
                if failing == "quorum":
                    pg.abort()
                    pg.report_configure_error(error)
                elif failing == "launch":
                    pg.report_launch_error(error)
                else:
                    pg.report_future_error(error)
            optimizer.zero_grad()
            parallel(ONE).sum().backward()
            grads = {name: each.grad for name, each in model.named_parameters()}
            with_grads = {name for name, grad in grads.items() if grad is not None}
            assert with_grads == {name for name in grads if not name.startswith("frozen")}
            for name in ("negative.weight", "negative.bias"):
                assert not torch.count_nonzero(grads[name] if grads[name] is not None else ONE)
            assert optimizer.step() is not fails
