"""Tests that the programs of the design paper run as printed there, in a real training."""

# No annotations from __future__: torch reads those of the hook.

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import TIMEOUT, lighthouse, together
from torch import nn, optim
from torch.nn import parallel

from torchft_svc.client import (
    CheckpointTransport,
    FaultToleranceManager,
    HTTPTransport,
    Manager,
    OptimizerWrapper,
    ProcessGroup,
    ProcessGroupDummy,
)
from torchft_svc.coordination import ManagerClient, ManagerServer
from torchft_svc.errors import ConfigError, RequestRefused
from torchft_svc.testing.transport_contract import bits

NUM_STEPS = 6
# Torch has one generator for all threads, which make their models at the same time.
_SEEDING = threading.Lock()


# As printed in section 5.2, but for annotations.
class DistributedDataParallel(parallel.DistributedDataParallel):
    def __init__(self, manager: Manager, module: nn.Module, **kwargs: Any) -> None:
        # use a dummy PG to soak up the init all reduce, actual comms will go
        # through the comm_hook.
        pg = ProcessGroupDummy(0, 1)
        super().__init__(module, process_group=pg, **kwargs)
        self.register_comm_hook(manager, self._comm_hook)

    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return state.allreduce_grad(bucket.buffer())


class Group:
    """A replica group that trains a model of its own weights and data with the paper's classes."""

    def __init__(self, address: str, name: str, seed: int, **kwargs: Any) -> None:
        with _SEEDING:
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
        self.sgd = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.data = torch.Generator().manual_seed(seed)
        self.manager = FaultToleranceManager(
            self.state_dict,
            self.load_state_dict,
            lighthouse_addr=address,
            replica_id=name,
            in_process=True,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
        )
        self.optimizer = OptimizerWrapper(self.manager, self.sgd)
        self.ddp = DistributedDataParallel(self.manager, self.model, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.sgd.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.sgd.load_state_dict(state["optim"])

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(3, 4, generator=self.data)
        return inputs, torch.randint(2, (3,), generator=self.data)

    def train(self, until: int) -> int:
        """The paper's loop; returns the number of steps that were discarded."""
        num_discarded = 0
        while self.manager.current_step() < until:
            inputs, labels = self.batch()
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.ddp(inputs), labels)
            loss.backward()
            num_discarded += not self.optimizer.step()
        return num_discarded


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=2) as address:
        yield address


def equal(*groups: Group) -> bool:
    first, *others = (bits(group.state_dict()) for group in groups)
    return all(other == first for other in others)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.0002},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002},
    ],
    ids=str,
)
def test_the_papers_wrapper_trains_and_groups_that_join_are_equal(
    address: str, options: dict[str, Any]
) -> None:
    groups = together(
        *(lambda i=i: Group(address, "ab"[i], i, **options) for i in range(2))  # type: ignore[misc]
    )
    together(*(lambda group=group: group.train(NUM_STEPS) for group in groups))  # type: ignore[misc]
    assert equal(*groups)
    before = bits(groups[0].state_dict())
    groups[1].manager.shutdown()
    groups[1] = Group(address, "b", 7, **options)
    together(*(lambda group=group: group.train(2 * NUM_STEPS) for group in groups))  # type: ignore[misc]
    assert equal(*groups)
    assert bits(groups[0].state_dict()) != before
    for group in groups:
        group.manager.shutdown()


def test_a_bucket_holds_the_average_of_all_groups(address: str) -> None:
    def gradients(i: int) -> list[torch.Tensor]:
        group = Group(address, "ab"[i], 0)
        inputs = torch.full((1, 4), float(i))
        with group.manager:
            group.optimizer.zero_grad()
            group.ddp(inputs).sum().backward()
            averaged = [parameter.grad.clone() for parameter in group.model.parameters()]  # type: ignore[union-attr]
            assert group.optimizer.step()
        return averaged

    averaged = together(*(lambda i=i: gradients(i) for i in range(2)))  # type: ignore[misc]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    for i in range(2):
        model(torch.full((1, 4), float(i))).sum().backward()
    for own, parameter in zip(averaged[0], model.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad / 2)


def test_an_average_outside_of_a_backward_pass_waits(address: str) -> None:
    def average(i: int) -> float:
        with Group(address, "ab"[i], i).manager as manager:
            manager.start_quorum()
            gradient = torch.tensor([float(i)])
            future = manager.allreduce_grad(gradient)
            assert future.done()
            assert future.value() is gradient
            with pytest.raises(ConfigError, match="whole numbers"):
                manager.allreduce_grad(torch.tensor([1]))
            assert manager.should_commit()
            return gradient.item()

    assert together(*(lambda i=i: average(i) for i in range(2))) == [0.5, 0.5]  # type: ignore[misc]


def test_a_bucket_is_not_averaged_between_two_steps() -> None:
    with (
        lighthouse() as address,
        Group(address, "a", 0).manager as manager,
        pytest.raises(RequestRefused, match="there is no step under way"),
    ):
        manager.allreduce_grad(torch.zeros(1))


def test_a_pass_that_raises_does_not_spoil_the_next_one() -> None:
    with lighthouse() as address:
        group = Group(address, "a", 0, bucket_cap_mb=0.0002)
        with group.manager:
            group.train(2)  # from then on, there are several buckets
            group.optimizer.zero_grad()
            output = group.ddp(torch.ones(1, 4))
            handle = group.model[0].weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                output.sum().backward()
            handle.remove()
            assert not group.optimizer.step()
            group.ddp = DistributedDataParallel(group.manager, group.model)
            assert group.train(4) == 0


# -- FaultToleranceManager ---------------------------------------------------------------------


def lone_manager(address: str, **options: Any) -> FaultToleranceManager:
    settings = {"lighthouse_addr": address, "replica_id": "a", "in_process": True}
    return FaultToleranceManager(dict, lambda state: None, **{**settings, **options})


def test_the_step_of_the_checkpoint_is_given_to_the_first_step() -> None:
    with lighthouse() as address, lone_manager(address) as manager:
        for step in range(500, 503):
            manager.step(step)
            assert manager.current_step() == step
            assert manager.should_commit()
        assert manager.state_dict()["step"] == 503


def test_a_step_without_its_number_is_the_next_one() -> None:
    with lighthouse() as address, lone_manager(address) as manager:
        manager.step()
        assert manager.should_commit()
        manager.step(1)
        assert manager.should_commit()
        assert manager.current_step() == 2


@pytest.mark.parametrize("step", [0, 2, 500])
def test_another_step_than_that_of_the_weights_is_refused(step: int) -> None:
    with lighthouse() as address, lone_manager(address) as manager:
        manager.step(0)
        assert manager.should_commit()
        expected = re.escape(f"step({step}) was called, but the weights have 1 updates")
        with pytest.raises(RequestRefused, match=expected):
            manager.step(step)
        manager.step(1)
        assert manager.should_commit()


def test_a_discarded_step_has_its_number_again() -> None:
    with lighthouse() as address, lone_manager(address) as manager:
        manager.step(0)
        manager.report_error(ValueError("a spoiled batch"))
        assert not manager.should_commit()
        manager.step(0)
        assert manager.should_commit()


@pytest.mark.parametrize("step", [-1, 1.5, True])
def test_a_step_that_is_no_counter_is_refused(step: Any) -> None:
    with lighthouse() as address, lone_manager(address) as manager:
        with pytest.raises(ConfigError, match="step"):
            manager.step(step)
        assert manager.current_step() == 0


def test_it_has_the_papers_attributes() -> None:
    def save() -> dict[str, int]:
        return {"a": 1}

    def load(state: dict[str, int]) -> None: ...

    with lighthouse() as address:
        manager = FaultToleranceManager(
            save, load, lighthouse_addr=address, replica_id="a", in_process=True
        )
        with manager:
            assert manager.lighthouse_address == address
            assert manager.save_state_dict is save
            assert manager.load_state_dict is load
            assert isinstance(manager.client, ManagerClient)
            assert isinstance(manager.manager, ManagerServer)
            assert isinstance(manager.checkpoint_server, HTTPTransport)
            assert isinstance(manager.checkpoint_server, CheckpointTransport)
            assert isinstance(manager.pg, ProcessGroup)


@pytest.mark.processes
def test_its_manager_is_a_process_by_default_and_none_if_another_one_is_used() -> None:
    with lighthouse() as address, lone_manager(address, in_process=False) as manager:
        assert manager.manager is not None
        with lone_manager(address, in_process=False, manager_addr=manager.manager.find()) as other:
            assert other.manager is None
