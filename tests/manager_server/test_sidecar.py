"""Tests a manager as a process: as a trainer's child, and as a command of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import grpc
import pytest
from support.bounds import Late, check
from support.running import (
    END_S,
    SCRIPTS,
    FreshProcess,
    Process,
    command,
    environment,
    eventually,
    failure,
    is_alive,
    lighthouse_process,
    line_to,
    manager_process,
    members,
)

from tools.chaos.bounds import NEWS_S
from torchft_svc.coordination import ManagerClient
from torchft_svc.errors import ConfigError, DeadlineExceeded, Unreachable
from torchft_svc.host.address import parse_address
from torchft_svc.host.interfaces import list_interfaces
from torchft_svc.manager_server.child import ManagerProcess
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.supervisor import ManagerSupervisor

pytestmark = pytest.mark.processes

LONG = timedelta(seconds=10)
OWNER = SCRIPTS / "owner_of_a_manager.py"


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Process]:
    with lighthouse_process("--heartbeat-timeout-ms=20000") as process:
        yield process


@dataclass
class Owner:
    process: subprocess.Popen[str]
    manager_pid: int
    manager_address: str
    forked_pid: int


@contextlib.contextmanager
def owner(lighthouse: str, *words: str) -> Iterator[Owner]:
    """A process that has started a manager."""
    process = subprocess.Popen(
        [sys.executable, OWNER, lighthouse, *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    manager_pid, address, forked = process.stdout.readline().split()
    try:
        yield Owner(process, int(manager_pid), address, int(forked))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if int(forked):
            os.kill(int(forked), signal.SIGKILL)


@pytest.mark.parametrize("words", [(), ("forks",)])
def test_a_manager_dies_with_its_parent_even_if_a_forked_child_lives_on(
    lighthouse: Process, words: tuple[str, ...]
) -> None:
    """The lighthouse knows at once: another group's quorum does not wait for it."""
    with owner(lighthouse.address, *words) as owned, line_to(lighthouse.address) as line:
        with line_to(owned.manager_address) as worker:
            line.beat("zzz:1")
            asked = worker.ask_manager(worker_id="w")
            eventually(lambda: len(members(line.quorum("zzz:1").result())) == 2)
            asked.result()
        began_at = time.monotonic()
        owned.process.kill()
        assert members(line.quorum("zzz:1").result()) == ["zzz:1"]
        took_s = time.monotonic() - began_at
        eventually(lambda: not is_alive(owned.manager_pid))
        assert is_alive(owned.forked_pid) == bool(words)
        line.leave("zzz:1")
    check("a trainer is killed", took_s, NEWS_S)


def test_kill_ends_the_manager_and_its_owner(lighthouse: Process) -> None:
    with owner(lighthouse.address) as owned:
        with ManagerClient(owned.manager_address, LONG) as client:
            client.kill("this node is drained")
        assert owned.process.wait(END_S) == 40, "the owner got SIGTERM"
        eventually(lambda: not is_alive(owned.manager_pid))


def test_kill_ends_a_manager_of_its_own_with_status_1(lighthouse: Process) -> None:
    with manager_process(lighthouse.address) as manager:
        with ManagerClient(manager.address, LONG) as client:
            client.kill("line one\nline two" + "x" * 5000)
        assert manager.wait() == 1
        (logged,) = [line for line in manager.errors().splitlines() if "killed by request" in line]
        assert "line one?line two" in logged
        assert len(logged) < 1200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_manager_in_good_order(lighthouse: Process, number: signal.Signals) -> None:
    with (
        manager_process(lighthouse.address, "--group-world-size=2") as manager,
        line_to(manager.address) as line,
    ):
        waiting = line.ask_manager(rank=0, worker_id="w")
        line.flush()
        status, took_s = manager.end(number)
        assert (status, "Traceback" in manager.errors()) == (0, False), manager.errors()
        check("a manager ends", took_s, 1.0)
        code, reason = failure(waiting)
        assert code is grpc.StatusCode.UNAVAILABLE
        if reason != "the service is stopping":
            raise Late(f"the answer was lost with the connection: {reason}")


def test_a_child_ignores_the_terminals_interrupt(lighthouse: Process) -> None:
    """Ctrl-C goes to the whole process group; the trainer decides when its manager stops."""
    with owner(lighthouse.address) as owned:
        os.kill(owned.manager_pid, signal.SIGINT)
        with ManagerClient(owned.manager_address, LONG) as client:
            assert client._quorum(0, 0, "", False, LONG).replica_world_size == 1


def config(lighthouse: str, **changes: object) -> ManagerConfig:
    fields: dict[str, object] = {
        "lighthouse_address": lighthouse,
        "replica_name": "mine",
        "group_world_size": 1,
        "store_address": "127.0.0.1:1",
        "bind": "127.0.0.1:0",
        **changes,
    }
    return ManagerConfig(**fields)  # type: ignore[arg-type]


def test_a_child_is_closed_twice_and_leaves_no_process(lighthouse: Process) -> None:
    manager = ManagerProcess.start(config(lighthouse.address))
    assert manager.poll() is None
    manager.close()
    assert manager.poll() == 0
    manager.close()
    assert not is_alive(manager.pid)


def test_a_child_that_cannot_start_writes_the_reason(
    lighthouse: Process, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Unreachable) as caught:
        ManagerProcess.start(config(lighthouse.address, bind=lighthouse.address))
    assert str(caught.value) == (
        f"manager at {lighthouse.address} cannot be reached: its process failed: "
        f"torchft_svc.errors.AddressError: address '{lighthouse.address}': cannot be bound: "
        "Address already in use"
    )
    written = capfd.readouterr().err
    assert written == (
        f"Error: address '{lighthouse.address}': cannot be bound: Address already in use\n"
    )


def test_a_child_that_takes_too_long_is_killed(lighthouse: Process) -> None:
    with pytest.raises(DeadlineExceeded, match="starting the manager timed out"):
        ManagerProcess.start(config(lighthouse.address), timeout_s=0.01)


def test_a_supervisor_that_is_closed_before_its_manager_serves_leaves_no_process() -> None:
    supervisor = ManagerSupervisor(config("127.0.0.1:1"), LONG.total_seconds(), print, print)
    assert (supervisor.find(), is_alive(supervisor.pid)) == ("", True)
    supervisor.close()
    supervisor.close()
    assert not is_alive(supervisor.pid)


def test_the_command_runs_as_a_sidecar_with_both_spellings_and_the_environment(
    lighthouse: Process,
) -> None:
    with FreshProcess(
        "manager_server",
        "--store_address=127.0.0.1:1",
        "--group_world_size=1",
        "--bind=:0",
        "--advertise_host=trainer.example",
        "--heartbeat_interval_ms=50",
        "--connect_timeout_ms=20000",
        "--quorum_retries=1",
        "--log_level=warning",
        TORCHFT_LIGHTHOUSE=f"http://{lighthouse.address}",
        REPLICA_GROUP_ID="from the environment",
        TORCHFT_JOB_ID="sidecar-job",
    ) as manager:
        assert manager.address == f"trainer.example:{manager.port}"
        with ManagerClient(f"127.0.0.1:{manager.port}", LONG) as client:
            result = client._quorum(0, 0, "", False, LONG)
        assert result.replica_ids[0].startswith("from the environment:")
        assert " INFO " not in manager.errors()
        with line_to(lighthouse.address) as line:
            default = line.quorum("a:1", timeout_s=20).result()
            assert members(default) == ["a:1"], "the manager's group is in a job of its own"
            line.leave("a:1")


def test_the_command_reports_the_address_of_the_chosen_interface(lighthouse: Process) -> None:
    outside = [each for each in list_interfaces() if each.addresses and not each.is_loopback]
    if not outside:
        pytest.skip("this machine has no interface but the loopback one")
    chosen = {"TORCHFT_INTERFACE": outside[0].name}
    with manager_process(lighthouse.address, "--bind=:0", **chosen) as manager:
        assert parse_address(manager.address).host == str(outside[0].addresses[0])
    flags = ("--bind=:0", "--advertise-host=trainer.example")
    with manager_process(lighthouse.address, *flags, **chosen) as manager:
        assert manager.address == f"trainer.example:{manager.port}"


@pytest.mark.parametrize("address", [{}, {"TORCHFT_LIGHTHOUSE": ""}], ids=["alone", "beside"])
def test_the_command_reads_the_papers_variable(
    lighthouse: Process, address: dict[str, str]
) -> None:
    with (
        FreshProcess(
            "manager_server",
            *("--replica-name=a", "--store-address=127.0.0.1:1", "--bind=:0"),
            **address,
            TORCH_LIGHTHOUSE=lighthouse.address,
            TORCHFT_JOB_ID="papers-job",
        ) as manager,
        ManagerClient(f"127.0.0.1:{manager.port}", LONG) as client,
    ):
        assert client._quorum(0, 0, "", False, LONG).replica_ids[0].startswith("a:")


def test_the_help_of_the_command_names_every_flag() -> None:
    shown = command("manager_server", "--help").stdout
    for flag in ("--lighthouse", "--replica-name", "--group-world-size", "--store-address"):
        assert flag in shown


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replica_name", ""),
        ("replica_name", "two\nlines"),
        ("replica_name", "x" * 1_000_000),
        ("job_id", "\x00"),
        ("group_world_size", 0),
        ("group_world_size", 10**9),
        ("quorum_retries", -1),
        ("heartbeat_interval_s", 0.0),
        ("connect_timeout_s", float("nan")),
        ("connect_timeout_s", float("inf")),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config("127.0.0.1:1", **{field: value})
    assert str(caught.value).startswith(f"{field}=")
    assert len(str(caught.value)) < 300
