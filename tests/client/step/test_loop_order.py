"""Tests loops that call the parts of a step in a wrong order, or leave one out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bounds import check
from support.training import TIMEOUT, Trainer, assert_identical, lighthouse, together, trainers
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchft_svc.client import (
    DistributedDataParallel,
    Manager,
    WorldSizeMode,
    replicate_across_groups,
)
from torchft_svc.errors import RequestRefused

SPARES = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 1}


def forgets_backward(trainer: Trainer) -> bool:
    trainer.optimizer.zero_grad()
    trainer.loss()
    return trainer.optimizer.step()


def never_averages(trainer: Trainer) -> bool:
    trainer.optimizer.zero_grad()
    with trainer.parallel.no_sync():
        trainer.loss().backward()
    return trainer.optimizer.step()


def fails_early(trainer: Trainer) -> bool:
    trainer.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="does not require grad"):
        trainer.loss().detach().backward()
    return trainer.optimizer.step()


@pytest.mark.parametrize("options", [{}, SPARES], ids=["dynamic", "spares"])
@pytest.mark.parametrize("leaves_out", [forgets_backward, never_averages, fails_early])
def test_a_step_in_which_one_group_averages_nothing_is_discarded_at_once(
    leaves_out: Callable[[Trainer], bool], options: dict[str, Any]
) -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 2, **options) as (a, b):
        assert together(a.step, b.step) == [True, True]
        spare = a if a.manager.participating_rank() is None else b
        other = b if spare is a else a
        began_at = time.monotonic()
        assert together(lambda: leaves_out(spare), other.step) == [False, False]
        check("a step without a backward pass", time.monotonic() - began_at, 5.0)
        assert "has to call backward()" in str(spare.manager.errored())
        assert together(a.step, b.step) == [True, True]
        assert_identical([a, b])


def test_a_step_in_which_nobody_averages_is_discarded() -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as (a, b):
        assert together(a.step, b.step) == [True, True]
        both = (lambda: forgets_backward(a), lambda: forgets_backward(b))
        assert together(*both) == [False, False]
        assert together(a.step, b.step) == [True, True]
        assert_identical([a, b])


@pytest.mark.parametrize("use_async_quorum", [True, False])
@pytest.mark.parametrize("num", [1, 2])
def test_a_forward_pass_before_the_first_zero_grad_is_refused(
    num: int, use_async_quorum: bool
) -> None:
    options = {"use_async_quorum": use_async_quorum}
    with lighthouse(min_replicas=num) as address, trainers(address, num, **options) as groups:

        def loses_its_graph(trainer: Trainer) -> None:
            loss = trainer.loss()
            trainer.optimizer.zero_grad()
            with pytest.raises(RequestRefused, match=r"call zero_grad\(\) first"):
                loss.backward()

        together(*(lambda trainer=trainer: loses_its_graph(trainer) for trainer in groups))
        outcomes = together(*(trainer.step for trainer in groups))
        assert outcomes == [True] * num
        assert_identical(groups)


def test_a_graph_from_before_a_heal_is_refused() -> None:
    with lighthouse() as address, trainers(address, 1) as (a,):
        a.steps(2)
        healed = threading.Event()

        def join() -> None:
            with Trainer(address, "b", 1) as b:
                b.backward()
                kept = b.loss()
                b.optimizer.step()
                assert b.manager.current_step() >= 2
                with pytest.raises(RequestRefused, match=r"call zero_grad\(\) first"):
                    kept.backward()
                healed.set()

        def train() -> None:
            while not healed.is_set():
                a.step()

        together(join, train)


def test_a_graph_may_be_kept_for_a_later_step() -> None:
    """A generator's output trains the discriminator in one step, and itself in the next."""
    with (
        lighthouse() as address,
        Manager(lighthouse_addr=address, in_process=True, timeout=TIMEOUT) as manager,
    ):
        generator = DistributedDataParallel(manager, nn.Linear(2, 2))
        judge = DistributedDataParallel(manager, nn.Linear(2, 1))
        for _ in range(2):
            manager.start_quorum()
            made = generator(torch.ones(1, 2))
            judge(made.detach()).sum().backward()
            assert manager.should_commit()
            manager.start_quorum()
            judge(made).sum().backward()
            assert manager.should_commit()


@pytest.fixture
def sharded() -> Iterator[tuple[Manager, nn.Module]]:
    """A group of one worker, whose model FSDP2 shards all the same."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with (
        lighthouse() as address,
        Manager(lighthouse_addr=address, in_process=True, timeout=TIMEOUT) as manager,
    ):
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        mesh = init_device_mesh("cpu", (1,))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
        replicate_across_groups(manager, model)
        yield manager, model
    dist.destroy_process_group()


def test_the_same_with_a_model_that_fsdp_shards(sharded: tuple[Manager, nn.Module]) -> None:
    manager, model = sharded

    def step(mistake: str = "") -> bool:
        early = model(torch.ones(1, 2)) if mistake == "early" else None
        manager.start_quorum()
        if mistake == "ended":  # between two layers
            model.get_submodule("1").register_full_backward_hook(lambda *_: 1 / 0)
        loss = (model(torch.ones(1, 2)) if early is None else early).sum()
        if early is not None:
            with pytest.raises(RequestRefused, match=r"call zero_grad\(\) first"):
                loss.backward()
        elif mistake == "ended":
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        elif mistake != "none":
            loss.backward()
        return manager.should_commit()

    assert not step("early")
    assert step()
    assert not step("none")
    assert "has to call backward()" in str(manager.errored())
    assert step()
    assert not step("ended")
    assert "not finished" in str(manager.errored())
