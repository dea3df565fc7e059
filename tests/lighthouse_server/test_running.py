"""Tests the lighthouse as a service: its process, its health, restarts, bounded memory."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.bounds import check
from support.running import FreshProcess, failure, lighthouse_process, line_to, steady_address

from torchft_svc.coordination import LighthouseServer
from torchft_svc.core.quorum.lighthouse.lighthouse import ID_STRIDE, first_quorum_id
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.core.quorum.types import Member, QuorumConfig
from torchft_svc.lighthouse_server.driver import LighthouseDriver


def test_health_is_reported_for_the_server_and_the_service() -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as server,
        line_to(server.address()) as line,
    ):
        stub = health_pb2_grpc.HealthStub(line.channel)
        for name in ("", "torchft.LighthouseService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="torchft.Nonsense"), timeout=20)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_service_and_describes_it() -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as server,
        line_to(server.address()) as line,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(line.channel)
        questions = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(
                file_containing_symbol="torchft.LighthouseService"
            ),
        ]
        listed, described = stub.ServerReflectionInfo(iter(questions), timeout=20)
    names = {service.name for service in listed.list_services_response.service}
    assert {"torchft.LighthouseService", "grpc.health.v1.Health"} <= names
    assert b"LighthouseQuorumRequest" in described.file_descriptor_response.file_descriptor_proto[0]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_in_good_order(number: signal.Signals) -> None:
    command = FreshProcess("lighthouse_server", "--bind=127.0.0.1:0", "--min-replicas=2")
    with command as process, line_to(process.address) as line:
        waiting = line.quorum("a:1", timeout_s=30)
        line.await_askers("a:1")
        status, took_s = process.end(number)
        assert (status, "Traceback" in process.errors()) == (0, False), process.errors()
        check("a lighthouse ends", took_s, 1.0)
        assert failure(waiting) == (grpc.StatusCode.UNAVAILABLE, "the service is stopping")


@pytest.mark.processes
def test_one_thread_of_grpc_reads_all_connections_unless_the_user_wants_otherwise() -> None:
    num_beats = 100
    assert waits_of_event_engine(num_beats) < num_beats / 2
    assert waits_of_event_engine(num_beats, GRPC_EXPERIMENTS="event_engine_listener") > num_beats


def waits_of_event_engine(num_beats: int, **variables: str) -> int:
    """How often threads of gRPC's event engine wait while a lighthouse gets so many beats: each
    wakes up one of them, or several."""
    with (
        FreshProcess(
            "lighthouse_server", "--bind=127.0.0.1:0", "--min-replicas=2", **variables
        ) as process,
        line_to(process.address) as line,
    ):
        before = num_waits(process.pid, "event_engine")
        for _ in range(num_beats):
            line.beat("a:1")
        assert "experiment" not in process.errors(), "gRPC does not know what it is asked for"
        return num_waits(process.pid, "event_engine") - before


def num_waits(pid: int, thread_name: str) -> int:
    """How often the threads with this name have waited for something."""
    statuses = [task.joinpath("status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    assert len(statuses) > 1
    return sum(
        int(re.findall(r"^voluntary_ctxt_switches:\t(\d+)$", status, re.MULTILINE)[0])
        for status in statuses
        if status.startswith(f"Name:\t{thread_name}\n")
    )


@pytest.mark.processes
def test_the_flags_are_accepted_in_both_spellings() -> None:
    flags = (
        "--min_replicas=2",
        "--join_timeout_ms=100",
        "--startup-timeout-ms=50",
        "--startup_wait_ms=0",
        "--heartbeat_timeout_ms=400",
        "--quorum_tick_ms=100",
        "--on_step_regression=warn",
        "--log_level=warning",
    )
    with (
        FreshProcess("lighthouse_server", "--bind=127.0.0.1:0", *flags) as process,
        line_to(process.address) as line,
    ):
        assert process.address.startswith("127.0.0.1:")
        assert failure(line.quorum("a:1")) == (
            grpc.StatusCode.ABORTED,
            "'a:1' is out: no sign of life for 0.4 s",
        )
        assert process.errors().splitlines()[0] == (
            "note: --quorum-tick-ms is ignored: quorums form without polling"
        )


@pytest.mark.processes
def test_ids_of_a_restarted_lighthouse_are_above_those_before() -> None:
    def one_quorum(address: str) -> int:
        with line_to(address) as line:
            return line.quorum("a:1").result().quorum.quorum_id  # type: ignore[no-any-return]

    with lighthouse_process(bind=steady_address()) as process:
        before = one_quorum(process.address)
        process.kill()
        with lighthouse_process(bind=process.address) as again:
            assert again.address == process.address
            assert one_quorum(again.address) > before


def test_ids_go_above_the_highest_that_a_group_has_seen() -> None:
    far_ahead = first_quorum_id(time.time() + 10 * 3600, 0)
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as server,
        line_to(server.address()) as line,
    ):
        answer = line.quorum("a:1", seen_quorum_id=far_ahead).result()
        assert far_ahead < answer.quorum.quorum_id <= far_ahead + ID_STRIDE


def test_a_first_id_never_goes_below_zero() -> None:
    assert first_quorum_id(0.0, 0) == 0
    assert first_quorum_id(1_735_689_601.5, 7) == 1500 * ID_STRIDE + 7


def test_groups_are_asked_to_beat_less_often_the_more_they_are() -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as server,
        line_to(server.address()) as line,
    ):
        assert [line.beat(f"g{i}:1").min_interval_ms for i in range(3)] == [2, 5, 7]


def test_groups_beat_at_least_twice_per_heartbeat_timeout() -> None:
    async def many() -> list[float]:
        driver = LighthouseDriver(QuorumConfig(heartbeat_timeout_s=2))
        intervals = [driver.heartbeat("job", f"g{i}:1") for i in range(600)]
        driver.close()
        return intervals

    intervals = asyncio.run(many())
    assert (intervals[99], intervals[299], intervals[599]) == (0.25, 0.75, 1.0)


def test_the_map_of_heartbeats_does_not_grow() -> None:
    """One job after another leaves one number where it has ended, and that for max_jobs only."""

    async def thousands_come_and_go() -> None:
        loop = asyncio.get_running_loop()
        driver = LighthouseDriver(QuorumConfig(heartbeat_timeout_s=0.1, max_jobs=100))
        for i in range(3000):
            driver.heartbeat(f"job {i % 50}", f"group {i}:1")
        deadline = loop.time() + 10
        while driver._core.jobs._jobs:
            assert loop.time() < deadline, "the silent are not forgotten"
            await asyncio.sleep(0.01)
        for i in range(1000):
            job, name = f"run {i}", "group:1"
            await driver.quorum(job, Member(replica_id=name, step=1), timeout_s=5)
            driver.leave(job, name, Leave("done"))
        core = driver._core
        parts = (driver, driver._reports, core, core._sessions, core.jobs)
        held = {name: value for part in parts for name, value in vars(part).items()}
        sizes = {name: len(value) for name, value in held.items() if isinstance(value, dict)}
        assert {name: size for name, size in sizes.items() if size} == {
            "_ended": 100,
            "_quorum_ids": 100,
        }
        driver.close()

    asyncio.run(thousands_come_and_go())


def test_a_waiter_that_sends_no_sign_of_life_is_informed() -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=2, heartbeat_timeout_ms=200) as server,
        line_to(server.address()) as line,
    ):
        code, reason = failure(line.quorum("a:1"))
    assert code is grpc.StatusCode.ABORTED
    assert reason == "'a:1' is out: no sign of life for 0.2 s"
