"""Tests of LocalSGD with whole groups: what is averaged, and what a refusal restores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.training import bits, lighthouse, make_manager, together
from torch import nn

from torchft_svc.client.algorithms import LocalSGD
from torchft_svc.client.process_groups.gloo import ProcessGroupGloo
from torchft_svc.errors import ConfigError


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=2) as address:
        yield address


class RecordingGloo(ProcessGroupGloo):
    """gloo, which records the memory that it sums."""

    def __init__(self) -> None:
        super().__init__(timedelta(seconds=20))
        self.memory: set[int] = set()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        self.memory |= {each.untyped_storage().data_ptr() for each in tensors}
        return super().allreduce(tensors, opts)


class Group:
    """A replica group with a small model, whose inner steps subtract ``pace`` from each weight."""

    def __init__(self, address: str, name: str, pace: float, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
        for number, parameter in enumerate(self.model.parameters()):
            nn.init.constant_(parameter, float(number))
        self.start = [each.detach().clone() for each in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.pace = pace
        self.manager = make_manager(
            address,
            name,
            state_dict=self.model.state_dict,
            load_state_dict=self.model.load_state_dict,
            **options,
        )
        self.algorithm = LocalSGD(self.manager, self.model, self.optimizer, sync_every=3)

    def inner_step(self) -> None:
        for each in self.model.parameters():
            each.grad = torch.full_like(each, self.pace)
        self.optimizer.step()

    def train(self, num_steps: int) -> None:
        with self.algorithm:
            for _ in range(num_steps):
                self.inner_step()

    def moved(self) -> float:
        """How far all weights are from their start, which is equal for all."""
        found = {
            round((now - before).item(), 4)
            for parameter, start in zip(self.model.parameters(), self.start, strict=True)
            for now, before in zip(parameter.detach().flatten(), start.flatten(), strict=True)
        }
        assert len(found) == 1, found
        (only,) = found
        return only


@contextlib.contextmanager
def groups(address: str, **options: Any) -> Iterator[list[Group]]:
    made = together(
        lambda: Group(address, "a", 1.0, **options), lambda: Group(address, "b", 2.0, **options)
    )
    try:
        yield made
    finally:
        for each in made:
            each.manager.shutdown()


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_the_weights_are_averaged_after_every_third_step(
    address: str, use_async_quorum: bool
) -> None:
    # Without init_sync nobody heals in step 0, where the first group's weights would be copied.
    with groups(address, use_async_quorum=use_async_quorum, init_sync=False) as (a, b):
        together(lambda: a.train(8), lambda: b.train(8))
        assert a.manager.current_step() == b.manager.current_step() == 2
        assert (a.moved(), b.moved()) == (-9 - 2, -9 - 4)
        assert bits(a.algorithm._state_dict()) == bits(b.algorithm._state_dict())
        together(lambda: a.train(1), lambda: b.train(1))
        assert bits(a.model.state_dict()) == bits(b.model.state_dict())
        assert a.moved() == -13.5


def test_a_refused_synchronization_restores_the_last_agreed_weights(address: str) -> None:
    with groups(address, init_sync=False) as (a, b):
        together(lambda: a.train(5), lambda: b.train(5))
        error = RuntimeError("the program refuses")

        def refuse(group: Group) -> None:
            begin = group.algorithm._begin_sync

            def begin_and_refuse() -> None:
                begin()
                group.manager.report_error(error)

            group.algorithm._begin_sync = begin_and_refuse  # type: ignore[method-assign]
            group.train(1)
            del group.algorithm._begin_sync

        together(lambda: refuse(a), lambda: refuse(b))
        assert a.moved() == b.moved() == -4.5
        together(lambda: a.train(3), lambda: b.train(3))
        assert a.moved() == b.moved() == -9


def test_what_is_summed_is_the_memory_of_the_averages(address: str) -> None:
    """A copy would be held until the vote: as much memory as the model once more."""
    pgs = RecordingGloo(), RecordingGloo()
    made = together(
        lambda: Group(address, "a", 1.0, pg=pgs[0]), lambda: Group(address, "b", 2.0, pg=pgs[1])
    )

    def average(group: Group) -> list[torch.Tensor]:
        algorithm = group.algorithm
        algorithm._begin_sync()
        algorithm._averaging.launch(algorithm._weights.write_weights)
        algorithm._averaging.wait()
        averages = algorithm._averaging.pop_averages()
        assert group.manager.should_commit()
        return averages

    try:
        found = together(*(lambda group=group: average(group) for group in made))
    finally:
        for group in made:
            group.manager.shutdown()
    for pg, averages in zip(pgs, found, strict=True):
        assert {each.untyped_storage().data_ptr() for each in averages} <= pg.memory


def test_groups_at_different_operations_apply_nothing(address: str) -> None:
    """One of them sums a number more than the other in each synchronization."""
    with groups(address, init_sync=False, timeout=timedelta(seconds=5)) as (a, b):
        together(lambda: a.train(9), lambda: b.train(9))
        agreed = a.moved()
        begin = a.algorithm._begin_sync

        def begin_and_sum() -> None:
            begin()
            a.manager.allreduce(torch.ones(1)).wait()

        a.algorithm._begin_sync = begin_and_sum  # type: ignore[method-assign]
        together(lambda: a.train(3), lambda: b.train(3))
        assert a.moved() == b.moved() == agreed
        assert "gradients: sum of" in str(a.manager.errored())


def test_hooks_are_removed_at_the_end_of_the_block(address: str) -> None:
    with groups(address, init_sync=False) as (a, b):
        together(lambda: a.train(2), lambda: b.train(2))
        for _ in range(5):
            a.inner_step()
        assert a.manager.current_step() == 0
        assert a.algorithm.inner_steps == 2
        with a.algorithm, pytest.raises(ConfigError, match="entered twice"):
            a.algorithm.__enter__()


def test_wrong_arguments(address: str) -> None:
    with make_manager(address, "a") as manager:
        model = nn.Linear(2, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for every in (0, -1, 2.5, True):
            with pytest.raises(ConfigError, match="sync_every"):
                LocalSGD(manager, model, sgd, every)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="no parameters that could be averaged"):
            LocalSGD(manager, nn.Tanh(), sgd, 2)
        LocalSGD(manager, model, sgd, 2)
        with pytest.raises(ConfigError, match="its manager serves another algorithm"):
            LocalSGD(manager, model, sgd, 2)
