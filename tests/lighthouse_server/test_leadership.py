"""Two lighthouses and an etcd, in processes: only the leader answers, and its death is survived."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from etcd_server import etcd_server, needs_etcd
from grpc_health.v1 import health_pb2, health_pb2_grpc
from running import (
    Process,
    eventually,
    failure,
    lighthouse_process,
    line_to,
    manager_process,
    steady_address,
)

from torchft_svc.coordination import ManagerClient
from torchft_svc.errors import TorchFTError
from torchft_svc.lighthouse_server.etcd import Etcd
from torchft_svc.lighthouse_server.etcd_access import EtcdAccess
from torchft_svc.lighthouse_server.leadership import Leadership
from torchft_svc.testing.proxy import Proxy

LONG = timedelta(seconds=20)
LEASE_S = 2
pytestmark = [pytest.mark.processes, needs_etcd]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """The address of a server of one."""
    with etcd_server(tmp_path) as server:
        yield server.address


def lighthouse(etcd: str) -> Process:
    flags = (f"--leader-election=etcd://{etcd}/torchft", f"--lease-ttl-s={LEASE_S}")
    return lighthouse_process(*flags, "--join-timeout-ms=1000")


def leads(process: Process) -> bool:
    with line_to(process.address) as line:
        stub = health_pb2_grpc.HealthStub(line.channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
def pair(etcd: str) -> Iterator[tuple[Process, Process]]:
    """The leader and another one."""
    with lighthouse(etcd) as first:
        eventually(lambda: leads(first))
        with lighthouse(etcd) as second:
            yield first, second


def test_only_the_leader_answers_and_the_other_names_it(pair: tuple[Process, Process]) -> None:
    first, second = pair
    with line_to(second.address) as line, line_to(first.address) as right:
        sentence = f"this lighthouse does not lead, {first.address} does"
        told = (grpc.StatusCode.UNAVAILABLE, sentence)
        eventually(lambda: failure(line.quorum("a:1", timeout_s=1)) == told)
        assert right.quorum("a:1").result().quorum.quorum_id
    assert not leads(second)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leader_that_dies_or_freezes_is_replaced(
    pair: tuple[Process, Process], number: signal.Signals
) -> None:
    first, second = pair
    with (
        manager_process(f"{second.address},{first.address}") as manager,
        ManagerClient(manager.address, LONG) as client,
        line_to(first.address) as line,
    ):
        before = client._quorum(0, 0, "", False, LONG)
        line.beat("idle:1", job="other")  # is waited for until the join timeout
        waiting = line.quorum("late:1", job="other")
        line.beat("idle:1", job="other")  # the request before it has arrived
        first.send(number)
        began_at = time.monotonic()
        after = client._quorum(0, 1, "", False, LONG)
        took_s = time.monotonic() - began_at
        assert after.quorum_id > before.quorum_id
        assert took_s < LEASE_S + 5.0, took_s
        assert leads(second)
        if number is signal.SIGSTOP:
            first.send(signal.SIGCONT)
            code, _ = failure(waiting)
            assert code is grpc.StatusCode.UNAVAILABLE, "nothing is published after the lease"
            assert not leads(first)


def test_a_dead_etcd_in_the_list_is_passed_over(etcd: str) -> None:
    with lighthouse(f"127.0.0.1:1,{etcd}") as only:
        eventually(lambda: leads(only), 2 * LEASE_S + 5.0)


def test_a_leader_goes_on_to_another_etcd_in_time(etcd: str) -> None:
    terms_ended: list[TorchFTError] = []

    async def story(proxy: Proxy) -> None:
        through = proxy.url.removeprefix("tcp://")
        access = EtcdAccess(url=f"etcd://{through},{etcd}")
        leadership = Leadership(Etcd(access), lease_ttl_s=6)
        async with leadership.stands_for_election("here:1", terms_ended.append):
            await asyncio.to_thread(eventually, lambda: leadership._leads)
            await asyncio.to_thread(proxy.__exit__, None, None, None)
            before = leadership._until
            await asyncio.to_thread(eventually, lambda: leadership._until != before)
            assert not terms_ended, "it led all the time"
            leadership.check()

    with Proxy(f"tcp://{etcd}", lambda place, data: data) as proxy:
        asyncio.run(story(proxy))


def test_a_leader_without_etcd_stops_in_time_and_leads_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    address, peers = steady_address(), steady_address()
    with contextlib.ExitStack() as stack:
        with etcd_server(tmp_path, address=address, peers=peers):
            only = stack.enter_context(lighthouse(address))
            eventually(lambda: leads(only))
        ended_at = time.monotonic()
        eventually(lambda: not leads(only))
        assert time.monotonic() - ended_at < LEASE_S, "before the lease can end elsewhere"
        with etcd_server(tmp_path, address=address, peers=peers):
            eventually(lambda: leads(only), 2 * LEASE_S + 5.0)
