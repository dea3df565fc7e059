"""Tests that kills and drains reach every worker of a group, and only that group."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from datetime import timedelta

import pytest
from running import eventually, line_to, members

from torchft_svc.coordination import (
    LighthouseClient,
    LighthouseServer,
    Listeners,
    ManagerClient,
    ManagerServer,
)
from torchft_svc.errors import RequestRefused

LONG = timedelta(seconds=10)


class Worker:
    """A worker that only listens."""

    def __init__(self, manager: ManagerServer, group_rank: int) -> None:
        self.heard: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.client = ManagerClient(manager.address(), LONG)
        self.client.attach(
            group_rank,
            Listeners(
                on_loss=lambda *_: None,
                on_kill=lambda reason: self.heard.put(("kill", reason)),
                on_drain=lambda reason: self.heard.put(("drain", reason)),
                on_waiting=lambda _: None,
            ),
        )
        eventually(self._is_told)

    def _is_told(self) -> bool:
        """Whether the line is there: orders before that are lost."""
        self.client.drain("ready")
        with contextlib.suppress(queue.Empty):
            return bool(self.heard.get(timeout=0.2))
        return False

    def next_order(self) -> tuple[str, str]:
        while (order := self.heard.get(timeout=5)) == ("drain", "ready"):
            pass
        return order


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
    with start(lighthouse, "group") as server:
        yield server


def start(lighthouse: LighthouseServer, name: str) -> ManagerServer:
    return ManagerServer(
        replica_id=name,
        lighthouse_addr=lighthouse.address(),
        hostname="127.0.0.1",
        bind="127.0.0.1:0",
        store_addr="127.0.0.1:1",
        world_size=2,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=LONG,
        quorum_retries=0,
    )


@pytest.fixture
def workers(manager: ManagerServer) -> Iterator[list[Worker]]:
    made = [Worker(manager, group_rank) for group_rank in range(2)]
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


def test_other_groups_do_not_hear_an_order(
    lighthouse: LighthouseServer, operator: LighthouseClient, workers: list[Worker]
) -> None:
    with start(lighthouse, "other") as manager:
        stranger = Worker(manager, 0)
        operator.drain("other", "by name")
        assert stranger.next_order() == ("drain", "by name")
        stranger.client.close()
    operator.drain("group", "theirs")
    assert [worker.next_order() for worker in workers] == [("drain", "theirs")] * 2


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
        line.beat("b:1")  # the request before it has arrived
        assert operator.accept_loss() == 7
        assert members(waiting.result()) == ["b:1"]
        with pytest.raises(RequestRefused, match="no loss to accept: no group asks"):
            operator.accept_loss()
