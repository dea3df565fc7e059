"""Runs replica groups of several workers as threads, as the public release tests its manager."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from torchft_svc.compat.coordination import LighthouseServer
from torchft_svc.compat.ddp import DistributedDataParallel
from torchft_svc.compat.local_sgd import DiLoCo, LocalSGD
from torchft_svc.compat.manager import Manager
from torchft_svc.compat.optim import OptimizerWrapper
from torchft_svc.compat.process_group import FakeProcessGroupWrapper, ProcessGroupGloo

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

STEPS = 5
LONG = timedelta(seconds=20)


class PlantedFailure(Exception):
    """Ends a worker, which is started again."""


@dataclass
class Faults:
    """Which workers fail at which step, each once."""

    workers: set[tuple[int, int, int]] = field(default_factory=set)  # group, rank, step
    collectives: set[tuple[int, int, int]] = field(default_factory=set)
    done: set[Any] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, group: int, rank: int, step: int, pg: FakeProcessGroupWrapper) -> None:
        place = (group, rank, step)
        with self.lock:
            if place in self.done or place not in self.workers | self.collectives:
                return
            self.done.add(place)
        if place in self.workers:
            raise PlantedFailure(f"worker {place}")
        pg.report_future_error(RuntimeError("a planted failure of a collective"))


@dataclass
class Job:
    """A job of two groups; ``loop`` is what each worker trains with."""

    lighthouse: str
    workers: int
    faults: Faults
    algorithm: str
    use_async_quorum: bool

    def run(self) -> list[list[dict[str, torch.Tensor]]]:
        """The model of each worker of each group, at the end."""
        with ThreadPoolExecutor(2) as pool:
            groups = [pool.submit(self.run_group, number) for number in range(2)]
            return [each.result(150) for each in groups]

    def run_group(self, group: int) -> list[dict[str, torch.Tensor]]:
        """Run the workers of a group, all of them again after one has failed."""
        for _ in range(3):
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            with ThreadPoolExecutor(self.workers) as pool, contextlib.suppress(PlantedFailure):
                ended = [
                    pool.submit(self.run_worker, group, rank, store.port)
                    for rank in range(self.workers)
                ]
                return [each.result(100) for each in ended]
        raise AssertionError("a group has failed three times")

    def run_worker(self, group: int, rank: int, store_port: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(group * 10 + rank)
        net = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 2))
        inner = optim.Adam(net.parameters())
        pg = FakeProcessGroupWrapper(ProcessGroupGloo(timeout=LONG))
        manager = Manager(
            pg=pg,
            min_replica_size=2,
            use_async_quorum=self.use_async_quorum,
            load_state_dict=lambda state: [
                net.load_state_dict(state["net"]),
                inner.load_state_dict(state["inner"]),
            ],
            state_dict=lambda: {"net": net.state_dict(), "inner": inner.state_dict()},
            replica_id=str(group),
            store_addr="localhost",
            store_port=store_port,
            rank=rank,
            world_size=self.workers,
            lighthouse_addr=self.lighthouse,
            timeout=LONG,
            quorum_timeout=2 * LONG,
        )
        try:
            loop = {"ddp": train_ddp, "local": train_local, "diloco": train_diloco}[self.algorithm]
            loop(manager, net, inner, lambda step: self.faults.check(group, rank, step, pg))
            return {name: value.clone() for name, value in net.state_dict().items()}
        finally:
            manager.shutdown(wait=False)


def train_ddp(manager: Manager, net: nn.Module, inner: optim.Optimizer, check: Any) -> None:
    model = DistributedDataParallel(manager, net)
    optimizer = OptimizerWrapper(manager, inner)
    while manager.current_step() < STEPS:
        check(manager.current_step())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.rand(2, 2)), torch.randint(2, (2,)))
        loss.backward()
        optimizer.step()


def train_inside(algorithm: Any, manager: Manager, net: nn.Module, inner: Any, check: Any) -> None:
    with algorithm:
        while manager.current_step() < STEPS:
            check(manager.current_step())
            inner.zero_grad()
            loss = nn.functional.cross_entropy(net(torch.rand(2, 2)), torch.randint(2, (2,)))
            loss.backward()
            inner.step()


def train_local(manager: Manager, net: nn.Module, inner: optim.Optimizer, check: Any) -> None:
    train_inside(LocalSGD(manager, net, inner, sync_every=2), manager, net, inner, check)


def train_diloco(manager: Manager, net: nn.Module, inner: optim.Optimizer, check: Any) -> None:
    outer = optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = DiLoCo(manager, [net], inner, outer, sync_every=2)
    train_inside(diloco, manager, net, inner, check)


def run(faults: Faults, workers: int = 1, algorithm: str = "ddp", is_async: bool = True) -> None:
    with LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=20_000) as server:
        found = Job(server.address(), workers, faults, algorithm, is_async).run()
    assert faults.done == faults.workers | faults.collectives
    for mine, other in zip(*found, strict=True):
        for name, value in mine.items():
            assert value.equal(other[name]), name


@pytest.mark.parametrize("is_async", [True, False])
def test_groups_recover_from_a_lost_worker(is_async: bool) -> None:
    run(Faults(workers={(0, 0, 2)}), is_async=is_async)


def test_groups_of_two_workers_recover_from_a_lost_worker() -> None:
    run(Faults(workers={(1, 0, 2), (1, 1, 2)}), workers=2)


def test_a_failed_collective_discards_one_step() -> None:
    run(Faults(collectives={(1, 0, 2)}))


@pytest.mark.parametrize("algorithm", ["local", "diloco"])
def test_groups_that_train_alone_for_a_while_recover(algorithm: str) -> None:
    run(Faults(workers={(0, 0, 2)}), algorithm=algorithm, is_async=False)
