"""Tests that workers leave a broken process group, and form that of the next world, in process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.elastic_workers import (
    broadcast_for_ever,
    reduce_for_ever,
    stop_before_connecting,
    train_large_with_ddp,
    train_with_ddp,
)
from support.fake_agents import FakeAgents, FakeWorker
from support.running import eventually, freeze
from support.stores import store_process
from torch.distributed import distributed_c10d

from torchft_svc.elastic import WorldChangeEvent, world_group

pytestmark = pytest.mark.processes
UP, DOWN = WorldChangeEvent.SCALE_UP, WorldChangeEvent.SCALE_DOWN


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[FakeAgents]:
    with FakeAgents(tmp_path) as running:
        yield running


def is_in(round_: int, *workers: FakeWorker) -> None:
    """These workers, and nobody else, work together in a world."""
    for rank, worker in enumerate(workers):
        worker.says(f"in {round_} size {len(workers)} rank {rank}")


@pytest.mark.parametrize("style", ["plain", "init_world", "own"])
def test_survivors_of_a_killed_worker_go_on_and_take_another_one_in(
    agents: FakeAgents, style: str
) -> None:
    one, two, three = (agents.start(reduce_for_ever, style) for _ in range(3))
    is_in(agents.world(one, two, three), one, two, three)
    assert one.reached(1)
    two.kill()
    one.says("lost")  # before its agent reports it
    three.says("lost")
    eventually(lambda: one.left(1) and three.left(1))
    agents.pause(one, three, change=DOWN)
    is_in(agents.world(one, three, change=DOWN), one, three)
    four = agents.start(reduce_for_ever, style)
    is_in(agents.world(one, three, four, change=UP), one, three, four)
    assert one.process.poll() is None
    assert three.process.poll() is None


@pytest.mark.parametrize(("style", "how"), [("plain", "kill"), ("init_world", "freeze")])
def test_an_operation_that_gloo_does_not_end_holds_nobody(
    agents: FakeAgents, style: str, how: str
) -> None:
    one, two, three = (agents.start(broadcast_for_ever, style) for _ in range(3))
    is_in(agents.world(one, two, three), one, two, three)
    three.says("sends in 1")
    getattr(three, how)()  # while it receives
    agents.pause(one, two, change=DOWN)
    one.says("lost")
    two.says("lost")
    is_in(agents.world(one, two, change=DOWN), one, two)


def test_a_frozen_worker_holds_nobody_in_a_collective(agents: FakeAgents) -> None:
    one, two, three = (agents.start(reduce_for_ever) for _ in range(3))
    is_in(agents.world(one, two, three), one, two, three)
    two.freeze()
    agents.pause(one, three, change=DOWN)
    one.says("lost")
    three.says("lost")
    is_in(agents.world(one, three, change=DOWN), one, three)


@pytest.mark.parametrize("style", ["plain", "init_world"])
def test_a_world_that_is_replaced_while_it_is_formed_ends_at_once(
    agents: FakeAgents, style: str
) -> None:
    one, two, missing = (agents.start(reduce_for_ever, style) for _ in range(3))
    missing.freeze()
    agents.world(one, two, missing)
    eventually(lambda: one.reached(1) and two.reached(1))
    is_in(agents.world(one, two, change=DOWN), one, two)


@pytest.mark.parametrize("frozen_rank", [0, 2])
def test_one_that_freezes_when_gloo_connects_holds_nobody(
    agents: FakeAgents, frozen_rank: int
) -> None:
    workers = [agents.start(reduce_for_ever, "init_world") for _ in range(2)]
    frozen = agents.start(stop_before_connecting)
    everybody = list(workers)
    everybody.insert(frozen_rank, frozen)
    agents.world(*everybody)
    frozen.says("freezing in 1")
    agents.pause(*workers, change=DOWN)
    is_in(agents.world(*workers, change=DOWN), *workers)


@pytest.mark.parametrize("how", ["kill", "freeze", "lose"])
@pytest.mark.parametrize("what", ["gradients", "buffer", "hook", "unawaited"])
def test_ddp_leaves_an_operation_that_gloo_does_not_end(
    agents: FakeAgents, what: str, how: str
) -> None:
    """``lose``: the agent is frozen, and its worker goes on."""
    one, two, three = (agents.start(train_large_with_ddp, what) for _ in range(3))
    is_in(agents.world(one, two, three), one, two, three)
    three.says("trains in 1")
    if how != "lose":
        getattr(three, how)()
    agents.pause(one, two, change=DOWN)
    one.says("lost")
    two.says("lost")
    is_in(agents.world(one, two, change=DOWN), one, two)
    two.says("trains in 2")


def test_ddp_is_built_again_in_each_world(agents: FakeAgents) -> None:
    one, two, three = (agents.start(train_with_ddp) for _ in range(3))
    agents.world(one, two, three)
    three.says("in 1 size 3 step 5")
    three.kill()
    agents.world(one, two, change=DOWN)
    two.says("in 2 size 2")
    four = agents.start(train_with_ddp)
    agents.world(one, two, four, change=UP)
    last = four.says("in 3 size 3 step").split()
    for worker in (one, two):
        assert worker.says(*last) == " ".join(last), "the same step has the same bits"


def test_a_frozen_store_holds_nobody(agents: FakeAgents) -> None:
    one, two = (agents.start(reduce_for_ever) for _ in range(2))
    with store_process() as (store, port):
        freeze(store.pid)
        agents.world(one, two, port=port)
        eventually(lambda: one.reached(1) and two.reached(1))
        is_in(agents.world(one, two, change=DOWN), one, two)


def test_three_worlds_in_quick_succession(agents: FakeAgents) -> None:
    one, two, three = (agents.start(reduce_for_ever) for _ in range(3))
    is_in(agents.world(one, two), one, two)
    agents.world(one, change=DOWN)
    agents.world(one, two, change=UP)
    is_in(agents.world(one, two, three, change=UP), one, two, three)
    for worker in (one, two, three):
        assert worker.pid == worker.process.pid
        os.kill(worker.pid, 0)


def test_an_attempt_that_failed_does_not_count_after_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed_c10d._world, "group_count", 1)  # which is in the store's keys
    world_group.leave()
    assert distributed_c10d._world.group_count == 0
