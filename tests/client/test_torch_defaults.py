"""Tests that torch's default device and dtype do not change what groups send, sum and load."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.meeting_place import MeetingPlace
from support.torch_defaults import DEFAULTS, torch_defaults
from support.training import lighthouse, make_manager, together
from torch import nn

from torchft_svc.client import (
    DistributedDataParallel,
    DistributedSampler,
    HTTPTransport,
    Manager,
    Optimizer,
    PGTransport,
    ProcessGroupDummy,
    ProcessGroupGloo,
)
from torchft_svc.testing.transport_contract import bits

STATE = {
    "weights": torch.arange(12.0).reshape(3, 4),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "number": torch.tensor(7),
    "empty": torch.zeros(0, 2),
    "learning rate": 0.1,
}
LIMIT = timedelta(seconds=30)
defaults = pytest.mark.parametrize("defaults", DEFAULTS)


@defaults
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sampler_draws_the_same_samples(defaults: dict[str, Any], shuffle: bool) -> None:
    def drawn() -> list[int]:
        return list(DistributedSampler(range(20), 1, 2, shuffle=shuffle, seed=5))  # type: ignore[arg-type]

    expected = drawn()
    with torch_defaults(defaults):
        assert drawn() == expected


@defaults
@pytest.mark.parametrize("kind", ["http", "pg"])
def test_a_state_arrives_as_it_was_sent(defaults: dict[str, Any], kind: str) -> None:
    if kind == "http":
        transports: list[Any] = [HTTPTransport(LIMIT, hostname="127.0.0.1") for _ in range(2)]
    else:
        groups = [ProcessGroupGloo(LIMIT) for _ in range(2)]
        MeetingPlace().configure(*groups)
        transports = [PGTransport(group, LIMIT) for group in groups]
    source, target = transports

    def send() -> None:
        with torch_defaults(defaults):
            source.send_checkpoint([1], 4, STATE, LIMIT)

    def receive() -> Any:
        with torch_defaults(defaults):
            return target.recv_checkpoint(0, source.metadata(), 4, LIMIT)

    try:
        _, received = together(send, receive)
        assert bits(received) == bits(STATE)
        assert all(
            each.device == STATE[name].device  # type: ignore[attr-defined]
            for name, each in received.items()
            if isinstance(each, torch.Tensor)
        )
    finally:
        for transport in transports:
            transport.shutdown()
        if kind == "pg":
            for group in groups:
                group.shutdown()


class Group:
    """A group whose model is on the CPU, in float32, whatever torch's defaults are."""

    def __init__(self, address: str, name: str, seed: int, **options: Any) -> None:
        places: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
        self.model = nn.Sequential(nn.Linear(4, 8, **places), nn.BatchNorm1d(8, **places))
        self.generator = torch.Generator("cpu").manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(generator=self.generator)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.manager = make_manager(
            address,
            name,
            state_dict=self.state_dict,
            load_state_dict=self.load_state_dict,
            **options,
        )
        self.optimizer = Optimizer(self.manager, self.sgd)
        self.parallel = DistributedDataParallel(self.manager, self.model)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.sgd.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.sgd.load_state_dict(state["optim"])

    def train(self, until: int) -> float:
        """Train to that step; the sum of a number that all groups reduce in each step."""
        total = 0.0
        while self.manager.current_step() < until:
            self.optimizer.zero_grad()
            inputs = torch.empty(3, 4, device="cpu", dtype=torch.float32)
            self.parallel(inputs.normal_(generator=self.generator)).square().mean().backward()
            number = torch.ones(1, device="cpu")
            self.manager.allreduce(number).wait()
            total += number.item()
            self.optimizer.step()
        return total


def weights(group: Group) -> Any:
    """The weights without the running averages, which each group has of its own data."""
    model = dict(group.model.named_parameters())
    return bits({"model": model, "optim": group.sgd.state_dict()})


@defaults
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_groups_train_and_heal(defaults: dict[str, Any], is_async: bool) -> None:
    with lighthouse(min_replicas=2) as address:

        def run(name: str, seed: int, until: int, group: Group | None = None) -> Group:
            with torch_defaults(defaults):  # a default device holds for a thread
                if group is None:
                    group = Group(address, name, seed, use_async_quorum=is_async)
                assert group.train(until) > 0
            return group

        dtype: Callable[[], torch.dtype] = torch.get_default_dtype
        before = dtype()
        a, b = together(lambda: run("a", 0, 3), lambda: run("b", 1, 3))
        assert weights(a) == weights(b)
        b.manager.shutdown()
        a, b = together(lambda: run("a", 0, 6, a), lambda: run("b", 2, 6))
        assert weights(a) == weights(b)
        assert dtype() is before
        for group in (a, b):
            group.manager.shutdown()


@pytest.mark.processes
def test_a_manager_starts_where_the_default_device_is_another() -> None:
    with (
        lighthouse() as address,
        torch_defaults({"device": "meta"}),
        Manager(
            state_dict=dict,
            load_state_dict=print,
            lighthouse_addr=address,
            replica_id="a",
            pg=ProcessGroupDummy(),
        ) as manager,
    ):
        manager.start_quorum()
        assert manager.should_commit()
