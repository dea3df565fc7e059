"""Two lighthouses and an etcd, in processes: only the leader answers, and its death is survived."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.agents import Agent
from support.bounds import Late, check
from support.etcd_server import EtcdServer, etcd_server, needs_etcd
from support.running import (
    Process,
    eventually,
    failure,
    lighthouse_process,
    line_to,
    manager_process,
    steady_address,
)

from torchft_svc.coordination import LighthouseClient, ManagerClient
from torchft_svc.core.launch.world import AgentStatus, World
from torchft_svc.errors import NotLeader, TorchFTError
from torchft_svc.lighthouse_server.etcd import Etcd
from torchft_svc.lighthouse_server.etcd_access import EtcdAccess
from torchft_svc.lighthouse_server.leadership import MARGIN, Leadership
from torchft_svc.testing.proxy import Proxy

LONG = timedelta(seconds=20)
LEASE_S = 2
LONG_LEASE_S = 60  # where nothing waits for its end
pytestmark = [pytest.mark.processes, needs_etcd]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """The address of a server of one."""
    with etcd_server(tmp_path) as server:
        yield server.address


def lighthouse(etcd: str, lease_s: int = LEASE_S) -> Process:
    flags = (f"--leader-election=etcd://{etcd}/torchft", f"--lease-ttl-s={lease_s}")
    return lighthouse_process(*flags, "--join-timeout-ms=1000")


NAME = "torchft.LighthouseService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(process: Process, name: str) -> int:
    with line_to(process.address) as line:
        stub = health_pb2_grpc.HealthStub(line.channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20).status)


def leads(process: Process) -> bool:
    return health(process, NAME) == SERVING


@contextlib.contextmanager
def watching(process: Process, name: str = NAME) -> Iterator[Iterator[int]]:
    """What a load balancer sees: the status now, and each one that follows."""
    with line_to(process.address) as line:
        stub = health_pb2_grpc.HealthStub(line.channel)
        request = health_pb2.HealthCheckRequest(service=name)
        answers = stub.Watch(request, timeout=60)
        yield (int(answer.status) for answer in answers)
        answers.cancel()


@contextlib.contextmanager
def while_it_leads() -> Iterator[None]:
    """A leader that has stood still for most of its lease refuses what it is sent."""
    try:
        yield
    except grpc.RpcError as error:
        raise Late(f"it does not lead any more: {error}") from error


@contextlib.contextmanager
def pair(etcd: str, lease_s: int) -> Iterator[tuple[Process, Process]]:
    """The leader and another one."""
    with lighthouse(etcd, lease_s) as first:
        eventually(lambda: leads(first))
        with lighthouse(etcd, lease_s) as second:
            yield first, second


def test_only_the_leader_answers_and_the_other_names_it(etcd: str) -> None:
    with (
        pair(etcd, LONG_LEASE_S) as (first, second),
        line_to(second.address) as line,
        line_to(first.address) as right,
    ):
        sentence = f"this lighthouse does not lead; the leader is {first.address}"
        refusal = (grpc.StatusCode.UNAVAILABLE, sentence)
        eventually(lambda: failure(line.quorum("a:1", timeout_s=1)) == refusal)
        assert right.quorum("a:1").result().quorum.quorum_id
        with LighthouseClient(second.address, LONG, job_id="other") as client:
            assert client.quorum("a:1", LONG).quorum_id, "it goes to the one that was named"
        assert health(second, "") == SERVING, "the process lives, nobody has to restart it"
        with watching(second, "") as lives, watching(second) as leading:
            assert (next(lives), next(leading)) == (SERVING, NOT_SERVING)
            first.end()
            assert next(leading) == SERVING
            assert second.end()[0] == 0
            assert (list(lives), list(leading)) == ([NOT_SERVING], [NOT_SERVING])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leader_that_dies_or_freezes_is_replaced(etcd: str, number: signal.Signals) -> None:
    with (
        pair(etcd, LEASE_S) as (first, second),
        manager_process(f"{second.address},{first.address}") as manager,
        ManagerClient(manager.address, LONG) as client,
        line_to(first.address) as line,
    ):
        before = client._quorum(0, 0, "", False, LONG)
        with while_it_leads():
            line.beat("idle:1", job="other")  # is waited for until the join timeout
            waiting = line.quorum("late:1", timeout_s=60.0, job="other")
            line.await_askers("late:1", job="other")
        first.send(number)
        began_at = time.monotonic()
        after = client._quorum(0, 1, "", False, LONG)
        check("a new leader's quorum", time.monotonic() - began_at, LEASE_S + 2.0)
        assert after.quorum_id > before.quorum_id
        eventually(lambda: leads(second))
        if number is signal.SIGSTOP:
            first.send(signal.SIGCONT)
            if waiting.exception(timeout=30) is None:
                raise Late("published: before it was frozen, or after the lease")
            assert waiting.code() is grpc.StatusCode.UNAVAILABLE
            if leads(first):
                raise Late("both lead, or the second one has stood still")


def test_a_launched_run_goes_on_in_its_world_at_the_next_leader(etcd: str) -> None:
    with pair(etcd, LEASE_S) as (first, second):
        both = f"{second.address},{first.address}"
        with Agent(both, "a") as a, Agent(both, "b") as b, Agent(both, "c") as c:
            a.report(AgentStatus.JOINING)
            b.report(AgentStatus.JOINING)
            world = a.work()
            assert b.work() == world
            first.kill()
            c.report(AgentStatus.JOINING)
            joined = c.work()
            assert joined.node_ids == (*world.node_ids, "c")
            a.work(world.round)
            assert [each for each in a.received if isinstance(each, World)] == [world, joined]


def test_a_dead_etcd_in_the_list_is_passed_over_and_a_frozen_one_holds_up_no_end(
    tmp_path: Path,
) -> None:
    with (
        etcd_server(tmp_path) as server,
        lighthouse(f"127.0.0.1:1,{server.address}", LONG_LEASE_S) as only,
    ):
        eventually(lambda: leads(only))
        server.freeze()
        assert only.end()[0] == 0


def test_a_leader_goes_on_to_another_etcd_in_time_and_stops_when_that_has_forgotten_it(
    tmp_path: Path,
) -> None:
    terms_ended: list[TorchFTError] = []

    async def story(proxy: Proxy, other: EtcdServer) -> None:
        through = proxy.address
        access = EtcdAccess(url=f"etcd://{through},{other.address}")
        leadership = Leadership(Etcd(access), lease_ttl_s=6)
        async with leadership.stands_for_election("here:1", terms_ended.append):
            await asyncio.to_thread(eventually, lambda: leadership._leads)
            await asyncio.to_thread(proxy.__exit__, None, None, None)
            before = leadership._until
            await asyncio.to_thread(eventually, lambda: leadership._until != before)
            if terms_ended:
                raise Late("it did not lead all the time")
            leadership.check()
            before, leadership._until = leadership._until, 0.0  # as if it had been frozen since
            with pytest.raises(NotLeader):
                leadership.check()
            leadership._until = before
            await asyncio.to_thread(other.forget, access.prefix)
            await asyncio.to_thread(eventually, lambda: terms_ended)

    with (
        etcd_server(tmp_path) as server,
        Proxy(server.address) as proxy,
    ):
        asyncio.run(story(proxy, server))


def test_a_leader_without_etcd_stops_in_time_and_leads_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    address, peers = steady_address(), steady_address()
    folder = Path(tempfile.mkdtemp(dir=tmp_path))  # another attempt has other addresses
    with contextlib.ExitStack() as stack:
        with etcd_server(folder, address=address, peers=peers):
            only = stack.enter_context(lighthouse(address))
            eventually(lambda: leads(only))
            seen = stack.enter_context(watching(only))
            with watching(only) as other:  # who leaves must not take the others' news along
                if (next(seen), next(other)) != (SERVING, SERVING):
                    raise Late("its lease has ended")
        ended_at = time.monotonic()
        assert next(seen) == NOT_SERVING
        # The lease counts from its last renewal, before the end of etcd.
        check("the end of a term", time.monotonic() - ended_at, LEASE_S * (1 - MARGIN))
        if leads(only):
            raise Late("it leads without etcd, or what was seen is an earlier term's end")
        with line_to(only.address) as line:
            sentence = failure(line.quorum("a:1"))[1]
        assert sentence == "this lighthouse does not lead; the leader is not known yet"
        with etcd_server(folder, address=address, peers=peers):
            assert next(seen) == SERVING
