"""Tests the sentence for each mistake on the two command lines: exit status 2, no traceback."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner
from support.running import CALL_S, FreshProcess, command, line_to

import torchft_svc
from torchft_svc.env import VERDICT_VARIABLE
from torchft_svc.lighthouse_server.cli import main as lighthouse
from torchft_svc.manager_server.cli import main as manager
from torchft_svc.proto import torchft_pb2 as pb

NEEDED = ["--lighthouse=127.0.0.1:1", "--replica-name=g", "--store-address=127.0.0.1:1"]
EXPECTED = "expected host:port, :port or [ipv6]:port, such as lighthouse.example:29510"


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--nonsense"], "No such option '--nonsense'."),
        (["--min-replicas"], "Option '--min-replicas' requires an argument."),
        (["--min-replicas=x"], "Invalid value for '--min-replicas'"),
        (["--bind=nonsense"], f"address 'nonsense': has no port; {EXPECTED}"),
        (["--bind=host:99999"], "address 'host:99999': port 99999 is outside 0 to 65535"),
        (["--min-replicas=0"], "min_replicas=0 cannot work: a quorum needs at least one group"),
        (
            ["--join_timeout_ms=-1"],
            "join_timeout_s=-0.001 cannot work: a timeout is a finite number of seconds, 0 or more",
        ),
        (
            ["--heartbeat-timeout-ms=0"],
            "heartbeat_timeout_s=0 cannot work: every group would be dead at once",
        ),
        ([f"--join-timeout-ms={10**400}"], "use 2073600000 (24 days) at most"),
        (["--hang-timeout-ms=2073600001"], "use 2073600000 (24 days) at most"),
        (["--on-step-regression=maybe"], "'maybe' is not one of 'auto', 'hold', 'warn'."),
        (["--leader-election=zk://a:1/x"], "use etcd://host:2379[,host:2379][/prefix], or etcds"),
        (["--leader-election=etcd://a:1/x", "--etcd-ca=/none"], "TORCHFT_ETCD_CA='/none' cannot"),
        (["--leader-election=etcd://a/x"], "address 'a': has no port"),
        (["--leader-election=etcd://a:1/x", "--lease-ttl-s=1"], "lease_ttl_s=1 cannot work: use 2"),
        (
            ["--leader-election=etcd://a:1/x", f"--lease-ttl-s={10**20}"],
            "lease_ttl_s='1e+20 s' cannot work: use 2073600 s (24 days) at most",
        ),
        (["--leader-election=etcd://a:1/x", "--advertise=:1"], "address ':1': has no host"),
        (["--max-jobs=0"], "max_jobs=0 cannot work: a limit is at least 1"),
        (["--max-members-per-job=0"], "max_members_per_job=0 cannot work: a limit is at least 1"),
        (["--log-level=loud"], "'loud' is not one of"),
        (["extra"], "Got unexpected extra argument (extra)"),
    ],
)
def test_a_mistake_on_the_lighthouses_command_line(flags: list[str], sentence: str) -> None:
    result = CliRunner().invoke(lighthouse, flags)
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "Missing option '--lighthouse'"),
        ([*NEEDED, "--nonsense"], "No such option '--nonsense'."),
        ([*NEEDED, "--lighthouse=:1"], f"address ':1': has no host; {EXPECTED}"),
        ([*NEEDED, "--store-address=x"], f"address 'x': has no port; {EXPECTED}"),
        ([*NEEDED, f"--connect-timeout-ms={10**12}"], "use 2073600000 (24 days) at most"),
        ([*NEEDED, "--group-world-size=0"], "group_world_size=0 cannot work: use 1 to 1000000"),
        (
            [*NEEDED, "--replica-name="],
            "'--replica-name' (env var: 'REPLICA_GROUP_ID'): '' is empty: give it",
        ),
        ([*NEEDED, "--replica-name=a\nb"], "replica_name='a\\nb' cannot work"),
        ([*NEEDED, "--job-id=\x7f"], "job_id='\\x7f' cannot work: use 1 to 256 printable"),
        ([*NEEDED, "--heartbeat-interval-ms=0"], "heartbeat_interval_s=0.0 cannot work"),
        ([*NEEDED, "--connect-timeout-ms=-5"], "connect_timeout_s=-0.005 cannot work"),
        ([*NEEDED, "--quorum-retries=-1"], "quorum_retries=-1 cannot work: use 0 to 1000"),
        ([*NEEDED, "--min-replicas=-1"], "min_replicas=-1 cannot work: use 0 to 1000000 groups"),
        ([*NEEDED, "--advertise-host=a b"], "advertise_host='a b' cannot work"),
        ([*NEEDED, "--owner-pid=0"], "owner_pid=0 cannot work"),
    ],
)
def test_a_mistake_on_the_managers_command_line(flags: list[str], sentence: str) -> None:
    result = CliRunner(env={"TORCHFT_LIGHTHOUSE": "", "REPLICA_GROUP_ID": ""}).invoke(
        manager, flags
    )
    assert result.exit_code == 2, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output


def test_an_interface_that_is_not_there_is_a_usage_error() -> None:
    result = CliRunner(env={"TORCHFT_INTERFACE": "ib7"}).invoke(manager, NEEDED)
    assert result.exit_code == 2, result.output
    assert "TORCHFT_INTERFACE='ib7' cannot work: this machine has no such" in result.output


@pytest.mark.parametrize("main", [lighthouse, manager])
def test_a_scheduler_may_ask_services_for_a_verdict(main: click.Command) -> None:
    runner = CliRunner(env={VERDICT_VARIABLE: "93"})
    assert runner.invoke(main, ["--nonsense"]).exit_code == 93
    assert runner.invoke(main, ["drain", "--nonsense"]).exit_code == 2
    assert runner.invoke(main, ["--version"]).exit_code == 0
    runner = CliRunner(env={VERDICT_VARIABLE: "none"})
    assert runner.invoke(main, ["--nonsense"]).exit_code == 2


@pytest.mark.parametrize("main", [lighthouse, manager])
def test_underscores_work_and_the_help_shows_dashes(main: click.Command) -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    assert not re.search(r"--[a-z-]+_", shown)
    for parameter in main.params:
        for name in parameter.opts:
            flag = "--" + name[2:].replace("-", "_")
            output = CliRunner().invoke(main, [flag, "--nonsense", "--log-level=loud"]).output
            assert f"No such option '{flag}'" not in output, output


def test_operator_commands_take_underscores_too() -> None:
    flags = ["status", "--job_id=x", "--lighthouse=127.0.0.1:1"]
    result = CliRunner().invoke(lighthouse, flags)
    assert (result.exit_code, "cannot be reached" in result.output) == (1, True)


@pytest.mark.parametrize("main", [lighthouse, manager])
def test_the_help_shows_defaults_in_words(main: click.Command) -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    for rest in ("none ever", "x<=", "RANGE", "None"):
        assert rest not in shown


@pytest.mark.parametrize(("main", "name"), [(lighthouse, "lighthouse"), (manager, "manager")])
def test_the_version(main: click.Command, name: str) -> None:
    result = CliRunner().invoke(main, ["--version"], prog_name=name)
    assert (result.exit_code, result.output) == (0, f"{name} {torchft_svc.__version__}\n")


@pytest.mark.processes
def test_a_lighthouse_is_set_up_by_its_environment() -> None:
    variables = {"TORCHFT_LIGHTHOUSE_BIND": "127.0.0.1:0", "TORCHFT_MIN_REPLICAS": "7"}
    with (
        FreshProcess("lighthouse_server", **variables) as process,
        line_to(process.address) as line,
    ):
        line.beat("a:1")
        asked = line.call("LighthouseService/Status", pb.LighthouseStatusRequest(), CALL_S, None)
        assert [job.min_replicas for job in asked.result().jobs] == [7]


@pytest.mark.parametrize(
    ("main", "flags", "variable"),
    [
        (lighthouse, ["--max-jobs=0"], "TORCHFT_LIGHTHOUSE_BIND"),  # no service is started here
        (manager, [*NEEDED, "--owner-pid=0"], "TORCHFT_MANAGER_BIND"),
        (lighthouse, ["--max-jobs=0"], "TORCHFT_MIN_REPLICAS"),
        (lighthouse, ["--max-jobs=0"], "TORCHFT_LOG"),
        (lighthouse, ["--max-jobs=0"], "TORCHFT_LOG_FORMAT"),
        (manager, [*NEEDED, "--owner-pid=0"], "TORCHFT_LOG_FORMAT"),
    ],
)
def test_a_mistake_in_the_environment_is_named(
    main: click.Command, flags: list[str], variable: str
) -> None:
    result = CliRunner(env={variable: "nonsense"}).invoke(main, flags)
    assert result.exit_code == 2
    assert variable in result.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "flags"), [("lighthouse_server", []), ("manager_server", NEEDED)]
)
@pytest.mark.parametrize("kind", ["in use", "not ours", "unknown"])
def test_an_address_that_cannot_be_bound(
    module: str, flags: list[str], kind: str, taken: str
) -> None:
    address, reason = {
        "in use": (taken, "cannot be bound: Address already in use"),
        "not ours": ("192.0.2.1:80", "cannot be bound: Cannot assign requested address"),
        "unknown": ("nowhere.invalid:80", "cannot be resolved: "),
    }[kind]
    result = command(module, f"--bind={address}", *flags)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith(f"Error: address '{address}': {reason}")


@pytest.mark.processes
def test_a_port_in_use_is_noticed_across_address_families(taken: str) -> None:
    """``:port`` binds IPv6 and IPv4 together: half a bind would get half of the callers."""
    port = taken.rpartition(":")[2]
    result = command("lighthouse_server", f"--bind=:{port}")
    assert result.returncode == 2
    assert result.stderr == (f"Error: address ':{port}': cannot be bound: Address already in use\n")


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak gRPC: check the port"),
        (None, "its host name cannot be resolved"),
    ],
)
def test_who_is_not_a_lighthouse_is_called_that(greeting: bytes | None, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}" if greeting else "nobody.invalid:1"

        def greet() -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        peer.sendall(greeting or b"")
                        peer.recv(1 << 16)

        greeter = threading.Thread(target=greet)
        greeter.start()
        result = CliRunner().invoke(lighthouse, ["status", f"--lighthouse={address}"])
        listener.shutdown(socket.SHUT_RDWR)
        greeter.join()
    assert result.exit_code == 1
    line = result.output.splitlines()[-1]
    assert line.startswith(f"Error: lighthouse at {address} cannot be reached: "), line
    assert line.endswith(why), line
