"""Trains with the manager of `torchft_svc.compat`: arguments, errors, logs, wrappers, heals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.reconfigurable import add_to_torch, make_groups
from support.training import together
from torch import nn
from torch.nn import parallel

from torchft_svc import compat
from torchft_svc.compat.coordination import LighthouseServer
from torchft_svc.compat.ddp import PureDistributedDataParallel
from torchft_svc.compat.local_sgd import DiLoCo
from torchft_svc.compat.manager import Manager
from torchft_svc.compat.process_group import ManagedProcessGroup, ProcessGroupGloo

pytestmark = pytest.mark.processes  # the manager of each group is a process

LONG = timedelta(seconds=30)


@pytest.fixture
def address() -> Iterator[str]:
    with LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=20_000) as server:
        yield server.address()


def make_manager(address: str, name: str, state: dict[str, Any], **options: Any) -> Manager:
    defaults: dict[str, Any] = {
        "pg": ProcessGroupGloo(timeout=LONG),
        "min_replica_size": 1,
        "load_state_dict": state.update,
        "state_dict": lambda: dict(state),
        "timeout": LONG,
        "rank": 0,
        "world_size": 1,
        "lighthouse_addr": address,
        "replica_id": name,
    }
    return Manager(**{**defaults, **options})


class Trainer:
    """A group of one worker that trains a small model with a wrapper of ``wrap``."""

    def __init__(
        self, address: str, name: str, seed: int, wrap: Callable[[Manager, nn.Module], nn.Module]
    ) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.inner = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.manager = make_manager(
            address, name, {}, load_state_dict=self.load, state_dict=self.save
        )
        self.optimizer = compat.Optimizer(self.manager, self.inner)
        self.model = wrap(self.manager, self.net)
        self.data = torch.Generator().manual_seed(seed)

    def save(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "inner": self.inner.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.inner.load_state_dict(state["inner"])

    def step(self) -> int:
        """Make one step; returns how many groups it had."""
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 4, generator=self.data)).square().mean().backward()
        self.optimizer.step()
        return self.manager.num_participants()

    def train_until(self, step: int) -> list[float]:
        while self.manager.current_step() < step:
            self.step()
        return [
            value for each in self.net.parameters() for value in each.detach().flatten().tolist()
        ]


@pytest.mark.parametrize("wrap", [compat.DistributedDataParallel, PureDistributedDataParallel])
def test_groups_train_equal_models_and_a_later_one_heals(address: str, wrap: Any) -> None:
    first = [Trainer(address, name, seed, wrap) for seed, name in enumerate(("a", "b"))]
    assert first[0].model.module is first[0].net
    if wrap is compat.DistributedDataParallel:
        assert isinstance(first[0].model, parallel.DistributedDataParallel)
    try:
        two = together(*[lambda t=t: t.train_until(4) for t in first])  # type: ignore[misc]
        assert two[0] == two[1]
        first[1].manager.shutdown()
        late = Trainer(address, "late", 7, wrap)
        first.append(late)
        found = together(lambda: first[0].train_until(12), lambda: late.train_until(12))
        assert found[0] == found[1]
        assert late.manager.batches_committed() == first[0].manager.batches_committed()
    finally:
        for each in first:
            each.manager.shutdown()


def test_torch_s_own_group_stays_the_manager_s(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_to_torch(monkeypatch)
    shared = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (group,) = make_groups(shared, 1)
    manager = make_manager(address, "a", {}, pg=group)
    try:
        manager.start_quorum()
        assert manager.should_commit()
        assert manager._pg is group
        assert (len(group.uuids), group.size()) == (1, 1)
    finally:
        manager.shutdown()


def test_the_environment_goes_before_arguments(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "70")
    monkeypatch.setenv("TORCHFT_CONNECT_TIMEOUT_SEC", "80")
    monkeypatch.setenv("TORCHFT_WATCHDOG_TIMEOUT_SEC", "1")
    monkeypatch.setenv("TORCHFT_QUORUM_RETRIES", "0")
    refused = {"quorum_retries": -1}  # as an argument
    manager = make_manager(address, "a", {}, timeout=LONG, connect_timeout=LONG, **refused)
    timeouts = manager._rules.timeouts
    manager.shutdown()
    assert (timeouts.collective_s, timeouts.connect_s, timeouts.quorum_s) == (70, 80, 80)
    assert timeouts.watchdog_s is None


def test_a_running_store_of_the_launcher_is_joined(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    manager = make_manager(address, "a", {})
    manager.start_quorum()
    assert manager.should_commit()
    manager.shutdown()


def test_errors_of_a_step(address: str) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(f"torchft_{name}") for name in ("quorums", "commits", "errors")]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    manager = make_manager(address, "a", {"x": 1}, max_retries=1)
    try:
        manager.start_quorum()
        tensor = torch.ones(2)
        assert manager.allreduce(tensor).wait()
        failure = ValueError("planted")
        manager.report_error(failure)
        error = manager.errored()
        assert error is not None
        assert error.original_exception is failure
        assert not manager.allreduce(tensor).wait()
        assert not manager.should_commit()
        manager.start_quorum()
        manager.report_error(failure)
        with pytest.raises(RuntimeError, match="2 steps in a row"):
            manager.should_commit()
    finally:
        manager.shutdown()
        for logger in loggers:
            logger.setLevel(logging.NOTSET)
            logger.removeHandler(handler)
    found = {record.name: vars(record) for record in records}
    assert found.keys() == {logger.name for logger in loggers}
    for fields in found.values():
        assert fields["job_id"] == "unknown"
        assert {"replica_id", "rank", "quorum_id"} <= fields.keys()
    assert found["torchft_commits"]["commit_result"] is False
    assert found["torchft_errors"]["error"] == "planted"


def test_a_synchronization_that_fails_raises_an_error_of_the_public_release(address: str) -> None:
    net = nn.Linear(2, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = torch.optim.SGD(net.parameters(), lr=0.7)
    manager = make_manager(address, "a", {}, use_async_quorum=False, max_retries=0)
    algorithm = DiLoCo(manager, [net], inner, outer, sync_every=1)

    def fail() -> None:
        manager.report_error(ValueError("planted"))

    algorithm._fragments[0].wait = fail  # type: ignore[method-assign]
    try:
        with algorithm, pytest.raises(RuntimeError, match="steps in a row were discarded"):
            inner.step()
    finally:
        manager.shutdown()


def test_private_names_that_programs_read(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_ID", "mine")
    pg = ProcessGroupGloo(timeout=LONG)
    manager = make_manager(address, "a", {"x": 1}, pg=pg, use_async_quorum=False)
    manager.set_state_dict_fns(lambda state: None, lambda: {"y": 2})
    try:
        assert manager._pg is pg
        assert manager._use_async_quorum is False
        saved = manager._manager_state_dict()
        assert saved["user"] == {"default": {"x": 1}, "set_state_dict_fns": {"y": 2}}
        assert saved["torchft"]["step"] == 0
        manager._logger.warn("a line of the program")
    finally:
        manager.shutdown()


class CountingManager(Manager):
    """A program's own manager, which overrides public methods."""

    num_votes = 0

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        self.num_votes += 1
        return super().should_commit(timeout)


def test_the_optimizer_uses_what_a_program_has_overridden(address: str) -> None:
    weight = nn.Parameter(torch.ones(1))
    manager = CountingManager(
        ProcessGroupGloo(timeout=LONG),
        lambda state: None,
        lambda: {"weight": weight.detach()},
        min_replica_size=1,
        lighthouse_addr=address,
        replica_id="a",
    )
    sgd = torch.optim.SGD([weight], lr=1.0)
    optimizer = compat.Optimizer(manager, sgd)
    try:
        for number in range(1, 4):
            optimizer.zero_grad()
            weight.grad = torch.ones(1)
            assert optimizer.step()
            assert (manager.num_votes, manager.current_step()) == (number, number)
        handle = sgd.register_step_pre_hook(lambda *_: 1 / 0)
        optimizer.zero_grad()
        weight.grad = torch.ones(1)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        handle.remove()
        assert weight.item() == -2.0
    finally:
        manager.shutdown()


class Unreadable:
    """What a GradScaler has found, and cannot show."""

    def item(self) -> float:
        raise ZeroDivisionError


def test_an_update_that_has_not_begun_spoils_nothing(address: str) -> None:
    weight = nn.Parameter(torch.ones(1))
    manager = make_manager(address, "a", {}, use_async_quorum=False)
    optimizer = compat.Optimizer(manager, torch.optim.SGD([weight], lr=1.0))
    try:
        optimizer.zero_grad()
        weight.grad = torch.ones(1)
        optimizer.found_inf = Unreadable()  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert manager.current_step() == 0
        optimizer.zero_grad()  # a spoiled group, the only one, would not be let in
        weight.grad = torch.ones(1)
        assert optimizer.step()
        assert (manager.current_step(), weight.item()) == (1, 0.0)
    finally:
        manager.shutdown()


class Container(torch.optim.Optimizer):
    """An optimizer that hands itself to the wrapper, which calls it back, as torchtitan's does."""

    def __init__(self, parameters: list[nn.Parameter], manager: Manager) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=0.1)
        super().__init__(parameters, {})
        self.voting = compat.Optimizer(manager, self)
        self.is_called_back = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.is_called_back:
            self.inner.zero_grad(set_to_none=set_to_none)
            return
        self.is_called_back = True
        self.voting.zero_grad(set_to_none=set_to_none)
        self.is_called_back = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.is_called_back:
            self.inner.step()
            return
        self.is_called_back = True
        self.voting.step()
        self.is_called_back = False


def test_a_container_of_optimizers_may_be_called_back(address: str) -> None:
    weight = nn.Parameter(torch.ones(1))
    manager = make_manager(address, "a", {})
    optimizer = Container([weight], manager)
    try:
        for number in range(1, 4):
            optimizer.zero_grad()
            assert weight.grad is None
            weight.grad = torch.ones(1)
            before = weight.item()
            optimizer.step()
            assert weight.item() != before
            assert manager.current_step() == number
    finally:
        manager.shutdown()


def test_a_managed_group_reduces_in_and_after_a_step(address: str) -> None:
    managers = [make_manager(address, name, {}) for name in ("a", "b")]

    def use(number: int) -> list[float]:
        manager = managers[number]
        group = ManagedProcessGroup(manager)
        while True:
            manager.start_quorum()
            value = torch.tensor([float(number)])
            group.allreduce([value], dist.ReduceOp.AVG).wait()
            committed = manager.should_commit()
            count = torch.tensor([5 + number])
            group.allreduce([count], dist.ReduceOp.SUM).wait()
            largest = torch.tensor([5 + number])
            group.allreduce([largest], dist.ReduceOp.MAX).wait()
            if committed and group.size() == 2:
                assert group.errored() is None
                return [value.item(), count.item(), largest.item()]

    try:
        assert together(lambda: use(0), lambda: use(1)) == [[0.5, 11, 6]] * 2
    finally:
        for manager in managers:
            manager.shutdown()
