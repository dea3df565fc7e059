"""Two lighthouses and an etcd, in processes: only the leader answers, and its death is survived."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
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

ETCD = shutil.which("etcd")
LONG = timedelta(seconds=20)
LEASE_S = 2
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(ETCD is None, reason="needs etcd (Debian: apt-get install etcd-server)"),
]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """The address of a server of one."""
    with etcd_at(steady_address(), steady_address(), tmp_path) as address:
        yield address


@contextlib.contextmanager
def etcd_at(address: str, peers: str, tmp_path: Path) -> Iterator[str]:
    """``tmp_path`` is what it remembers over a restart."""
    flags = {
        "data-dir": tmp_path,
        "listen-client-urls": f"http://{address}",
        "advertise-client-urls": f"http://{address}",
        "listen-peer-urls": f"http://{peers}",
        "initial-advertise-peer-urls": f"http://{peers}",
        "initial-cluster": f"default=http://{peers}",
        "log-level": "error",
    }
    command = [str(ETCD), *(f"--{name}={value}" for name, value in flags.items())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            eventually(lambda: answers(address), 20)
            yield address
        finally:
            server.kill()


def answers(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


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


def test_a_leader_without_etcd_stops_in_time_and_leads_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    place = steady_address(), steady_address(), tmp_path
    with contextlib.ExitStack() as stack:
        with etcd_at(*place) as etcd:
            only = stack.enter_context(lighthouse(etcd))
            eventually(lambda: leads(only))
        ended_at = time.monotonic()
        eventually(lambda: not leads(only))
        assert time.monotonic() - ended_at < LEASE_S, "before the lease can end elsewhere"
        with etcd_at(*place):
            eventually(lambda: leads(only), 2 * LEASE_S + 5.0)
