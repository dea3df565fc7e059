"""Tests that no forward pass of a sharded model runs while its state is being exported."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from support.torch_world import alone_in_torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchft_svc import compat
from torchft_svc.compat.coordination import LighthouseServer
from torchft_svc.compat.forward_gate import ForwardGate, sharded_kinds
from torchft_svc.compat.manager import Manager
from torchft_svc.compat.process_group import ProcessGroupGloo

pytestmark = pytest.mark.timeout(120)

LONG = timedelta(seconds=30)
# How long an export waits for a forward pass that should not come, and a step for an export.
OVERLAP_S, EXPORT_S = 1.0, 2.0


@pytest.fixture
def address() -> Iterator[str]:
    with LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=20_000) as server:
        yield server.address()


@pytest.fixture
def _world() -> Iterator[None]:
    with alone_in_torch():
        yield


def test_a_program_that_shards_nothing_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        """Stand in for `FSDPModule`, of which no module was made."""

    class Abstract(Base):
        """Stand in for the subclass that torch has itself, which is no module."""

    searches: list[int] = []
    monkeypatch.setattr(fsdp, "FSDPModule", Base)
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(1) or [])
    gate = ForwardGate(cast(Any, None))
    gate.close_for_step()
    assert (sharded_kinds(Base), searches) == ([], [])

    class Made(Abstract, nn.Linear):
        pass

    for _ in range(3):
        gate.close_for_step()
    assert (sharded_kinds(Base), searches) == ([Made], [1, 1])


class Sharded:
    """A group whose state function calls ``state_dict()`` of a sharded model."""

    def __init__(self, address: str, name: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for layer in (self.model[0], self.model[2]):
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (1,)))
        self.export_began, self.export_ended = threading.Event(), threading.Event()
        self.pass_began = threading.Event()
        self.saw_pass = False
        self.model.register_forward_pre_hook(lambda *_: self.pass_began.set())
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=LONG),
            load_state_dict=self.model.load_state_dict,
            state_dict=self.save,
            min_replica_size=1,
            timeout=LONG,
            rank=0,
            world_size=1,
            lighthouse_addr=address,
            replica_id=name,
        )
        self.optimizer = compat.Optimizer(
            self.manager, torch.optim.SGD(self.model.parameters(), lr=0.1)
        )

    def save(self) -> dict[str, Any]:
        """Save slowly, so that a forward pass which does not wait is seen."""
        if threading.current_thread() is threading.main_thread():
            return self.model.state_dict()
        self.pass_began.clear()
        self.export_began.set()
        state = self.model.state_dict()
        self.saw_pass |= self.pass_began.wait(OVERLAP_S)
        self.export_ended.set()
        return state

    def step(self, wait_s: float = 0.0) -> None:
        """Make one step, whose forward pass comes ``wait_s`` after its begin, or in an export."""
        self.optimizer.zero_grad()
        self.export_began.wait(wait_s)
        self.model(torch.ones(2, 4)).square().mean().backward()
        for parameter in self.model.parameters():
            gradient: Any = parameter.grad
            self.manager.allreduce(gradient.to_local()).wait()
        self.optimizer.step()


@pytest.mark.processes
@pytest.mark.usefixtures("_world")
def test_a_forward_pass_waits_for_the_end_of_an_export(address: str) -> None:
    group = Sharded(address, "a")
    for _ in range(2):
        group.step()
    late = Sharded(address, "b")
    ended = threading.Event()

    def join() -> None:
        with contextlib.suppress(RuntimeError, TimeoutError):  # its manager is shut down
            while not ended.is_set():
                late.step()

    thread = threading.Thread(target=join)
    try:
        group.export_began.clear()
        group.export_ended.clear()
        thread.start()
        for _ in range(20):
            group.step(EXPORT_S)
            if group.export_ended.is_set():
                break
        assert group.export_ended.is_set(), "no group has healed from this one"
        assert not group.saw_pass
        assert group.pass_began.is_set(), "the pass came after the export"
    finally:
        ended.set()
        for each in (group, late):
            each.manager.shutdown()
        if thread.ident is not None:
            thread.join(LONG.total_seconds())
