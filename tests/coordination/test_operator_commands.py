"""Tests that kills and drains reach every worker of a group, and only that group."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.running import attach, eventually, line_to, manager_process, members, start_manager

from torchft_svc.coordination import (
    LighthouseClient,
    LighthouseServer,
    ManagerClient,
    ManagerServer,
)
from torchft_svc.core.quorum.session_messages import Drain
from torchft_svc.errors import ConfigError, RequestRefused

LONG = timedelta(seconds=20)


class Worker:
    """A worker that only listens."""

    def __init__(self, address: str, group_rank: int) -> None:
        self.received: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.listens = threading.Event()
        self.listens.set()
        self.within_s: float | None = None
        self.client = ManagerClient(address, LONG)
        attach(
            self.client,
            group_rank,
            on_kill=lambda reason: self.received.put(("kill", reason)),
            on_drain=self._receive_drain,
        )

    def _receive_drain(self, command: Drain) -> None:
        self.received.put(("drain", command.reason))
        self.within_s = command.within_s
        assert self.listens.wait(30)

    def next_order(self) -> tuple[str, str]:
        return self.received.get(timeout=LONG.total_seconds())


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1) as server:
        yield server


@pytest.fixture
def operator(lighthouse: LighthouseServer) -> Iterator[LighthouseClient]:
    with LighthouseClient(lighthouse.address(), LONG) as client:
        yield client


@pytest.fixture
def manager(lighthouse: LighthouseServer) -> Iterator[ManagerServer]:
    with start_manager(lighthouse.address(), world_size=2) as server:
        yield server


@pytest.fixture
def workers(manager: ManagerServer) -> Iterator[list[Worker]]:
    made = [Worker(manager.address(), group_rank) for group_rank in range(2)]
    yield made
    for worker in made:
        worker.client.close()


@pytest.mark.parametrize("kind", ["kill", "drain"])
def test_an_order_to_the_lighthouse_reaches_every_worker(
    operator: LighthouseClient, workers: list[Worker], kind: str
) -> None:
    getattr(operator, kind)("group", "maintenance")
    assert [worker.next_order() for worker in workers] == [(kind, "maintenance")] * 2


@pytest.mark.parametrize("kind", ["kill", "drain"])
def test_an_order_to_the_manager_reaches_every_worker(workers: list[Worker], kind: str) -> None:
    getattr(workers[1].client, kind)("maintenance")
    assert [worker.next_order() for worker in workers] == [(kind, "maintenance")] * 2


def test_every_worker_learns_how_long_a_drain_may_take(
    operator: LighthouseClient, workers: list[Worker]
) -> None:
    operator.drain("group", within=timedelta(seconds=0.25))
    for worker in workers:
        assert worker.next_order() == ("drain", "drained by an operator")
        assert worker.within_s == 0.25
    workers[0].client.drain("again")
    for worker in workers:
        assert worker.next_order() == ("drain", "again")
        assert worker.within_s is None
    for ask in (operator.drain, workers[0].client.drain):
        with pytest.raises(ConfigError, match="within"):
            ask("group", within=timedelta(0))


def test_other_groups_do_not_receive_an_order(
    lighthouse: LighthouseServer, operator: LighthouseClient, workers: list[Worker]
) -> None:
    with start_manager(lighthouse.address(), replica_id="other", world_size=2) as manager:
        stranger = Worker(manager.address(), 0)
        operator.drain("other", "by name")
        assert stranger.next_order() == ("drain", "by name")
        stranger.client.close()
    operator.drain("group", "theirs")
    assert [worker.next_order() for worker in workers] == [("drain", "theirs")] * 2


def test_a_worker_that_attaches_late_receives_the_order(manager: ManagerServer) -> None:
    with ManagerClient(manager.address(), LONG) as operator:
        operator.drain("maintenance")
        for kind in ("drain", "kill"):
            getattr(operator, kind)("maintenance")
            worker = Worker(manager.address(), 1)
            assert worker.next_order() == (kind, "maintenance")
            worker.client.close()


@pytest.mark.processes
def test_who_comes_before_the_worker_in_whose_place_it_is_was_missed_gets_its_line(
    manager: ManagerServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine is lost: its connections end only when they have been silent."""
    before = Worker(manager.address(), 1)
    with ThreadPoolExecutor(1) as thread:
        comes = thread.submit(Worker, manager.address(), 1)
        eventually(lambda: "group rank 1 is taken" in caplog.text)
        before.client.close()
        after = comes.result()
    with after.client:
        after.client.drain("so that it arrives")
        assert after.next_order() == ("drain", "so that it arrives")


@pytest.mark.processes
def test_a_worker_that_reads_late_still_learns_that_it_is_killed(
    lighthouse: LighthouseServer,
) -> None:
    """A worker is busy with its last command until its manager has ended."""
    with manager_process(lighthouse.address(), "--group-world-size=2") as manager:
        worker = Worker(manager.address, 0)
        worker.listens.clear()
        worker.client.drain("first")
        assert worker.next_order() == ("drain", "first")
        worker.client.kill("then")
        assert manager.wait() == 1
        worker.listens.set()
        assert worker.next_order() == ("kill", "then")
        worker.client.close()


def test_an_order_that_cannot_be_delivered_is_refused(operator: LighthouseClient) -> None:
    operator.heartbeat("a:1")
    for order in (operator.kill, operator.drain):
        with pytest.raises(RequestRefused, match="job 'default' has no living group 'nobody'"):
            order("nobody")
        with pytest.raises(RequestRefused, match=r"'a:1' has no session .* only sends heartbeats"):
            order("a")
    operator.heartbeat("b:1")
    operator.heartbeat("b:2")
    with pytest.raises(RequestRefused, match="several groups 'b', say which: b:1, b:2"):
        operator.kill("b")


def test_a_loss_is_accepted_once(lighthouse: LighthouseServer, operator: LighthouseClient) -> None:
    with line_to(lighthouse.address()) as line:
        for replica_id in ("a:1", "b:1"):
            line.beat(replica_id)
        asked = [line.quorum("b:1", step=5), line.quorum("a:1", step=7)]
        assert members(asked[0].result()) == ["a:1", "b:1"]
        with pytest.raises(RequestRefused, match="job 'default' has no loss to accept"):
            operator.accept_loss()
        line.leave("a:1")
        waiting = line.quorum("b:1", step=5)
        line.await_askers("b:1")
        assert operator.accept_loss() == 7
        assert members(waiting.result()) == ["b:1"]
        with pytest.raises(RequestRefused, match="no loss to accept: no group asks"):
            operator.accept_loss()
