"""Tests the checks of what a group reports, against real interfaces and real managers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator

import pytest
from support.examined import examine, levels, named, only
from support.running import line_to, refusing, start_manager

from torchft_svc.coordination import LighthouseServer
from torchft_svc.core.quorum.lighthouse.overview import GroupStatus, JobStatus
from torchft_svc.doctor import network
from torchft_svc.doctor.findings import Level
from torchft_svc.doctor.network import (
    ReportedHost,
    check_backends,
    check_peers,
    check_reported,
    check_services,
)
from torchft_svc.env import Environment
from torchft_svc.host.interfaces import Interface, list_interfaces

FAR = ("203.0.113.9:29510",)
HERE = ("127.0.0.1:29510",)


def outside() -> Interface:
    """An interface that other machines reach."""
    for interface in list_interfaces():
        if interface.addresses and interface.is_up and not interface.is_loopback:
            return interface
    pytest.skip("this machine has no interface but the loopback one")


@pytest.fixture
def bridge() -> Iterator[tuple[str, str]]:
    """The name and the address of another interface of this machine."""
    name, address = f"tftn{os.getpid() % 100_000}", "198.51.100.77"
    if os.geteuid():
        pytest.skip("a network interface takes root")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)  # noqa: S607

    with contextlib.ExitStack() as stack:
        try:
            ip("link", "add", name, "type", "bridge")
            stack.callback(ip, "link", "del", name)
            ip("addr", "add", f"{address}/32", "dev", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network interface can be made here: {error.stderr.decode()}")
        yield name, address


def test_an_interface_that_does_not_exist() -> None:
    found = examine(TORCHFT_LIGHTHOUSE="127.0.0.1:1", TORCHFT_INTERFACE="ib7")
    (settings,) = named(found, "settings")
    assert settings.level is Level.PROBLEM
    assert "TORCHFT_INTERFACE='ib7' cannot work: this machine has no such" in settings.found
    assert levels(found, "port") == [Level.PROBLEM], "the lighthouse is checked nevertheless"
    assert not named(found, "reported host")


def test_the_loopback_address_is_of_no_use_to_others() -> None:
    reported = ReportedHost(host="127.0.0.1", source="TORCHFT_INTERFACE=lo")
    (far,) = check_reported(reported, FAR)
    assert far.level is Level.PROBLEM
    assert far.found == "127.0.0.1 on lo (TORCHFT_INTERFACE=lo): no other machine reaches that"
    (here,) = check_reported(reported, HERE)
    assert here.level is Level.OK


def test_an_address_of_another_machine() -> None:
    (found,) = check_reported(ReportedHost(host="192.0.2.99", source="a test"), FAR)
    assert found.level is Level.WARNING
    assert "it is no address of this machine" in found.found


@pytest.mark.processes
def test_an_interface_that_is_down(bridge: tuple[str, str]) -> None:
    name, address = bridge
    (down,) = check_reported(ReportedHost(host=address, source="a test"), FAR)
    assert down.level is Level.PROBLEM
    assert down.found.endswith("the interface is down")
    assert down.advice == f"ip link set {name} up"


def test_a_faster_interface_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interface of a virtual machine has a speed, so the system's answer is replaced."""
    used = outside()
    slow = Interface(name="eth7", addresses=used.addresses, is_up=True, speed_bps=1e9)
    address = network.ipaddress.ip_address("198.51.100.9")
    fast = Interface(name="ib0", addresses=(address,), is_up=True, speed_bps=100e9)
    monkeypatch.setattr(network, "list_interfaces", lambda: [slow, fast])
    monkeypatch.setattr(network, "interface_of", lambda _: slow)
    host = str(used.addresses[0])
    fits, warning = check_reported(
        ReportedHost(host=host, source="the route to the lighthouse"), FAR
    )
    assert fits.level is Level.OK
    assert warning.level is Level.WARNING
    assert warning.found == "eth7 has 1 Gbit/s, ib0 has 100 Gbit/s: heals run over eth7"
    assert warning.advice == "if all groups reach 198.51.100.9, set TORCHFT_INTERFACE=ib0"


def backends(reported: ReportedHost, **variables: str) -> list[network.Diagnosis]:
    return list(check_backends(Environment(variables), reported))


def test_variables_of_gloo_and_nccl_that_contradict() -> None:
    used = outside()
    reported = ReportedHost(host=str(used.addresses[0]), source="a test")
    gloo = only(backends(reported, GLOO_SOCKET_IFNAME="lo"), "gloo")
    assert gloo.level is Level.WARNING
    assert f"but this group reports {reported.host} on {used.name}" in gloo.found
    missing = only(backends(reported, GLOO_SOCKET_IFNAME=f"{used.name},ib7"), "gloo")
    assert missing.level is Level.PROBLEM
    assert "there is no interface ib7" in missing.found
    assert only(backends(reported, GLOO_SOCKET_IFNAME=used.name), "gloo").level is Level.OK
    for value, level in (
        ("lo", Level.WARNING),
        (f"^{used.name}", Level.WARNING),
        (f"={used.name[:-1]}", Level.WARNING),
        (used.name, Level.OK),
        (used.name[:2], Level.OK),
        (f"={used.name}", Level.OK),
        ("^lo,docker", Level.OK),
    ):
        assert levels(backends(reported, NCCL_SOCKET_IFNAME=value), "nccl") == [level], value
    old = only(backends(reported, NCCL_ASYNC_ERROR_HANDLING="1"), "nccl")
    assert old.level is Level.WARNING
    assert old.advice == "set TORCH_NCCL_ASYNC_ERROR_HANDLING instead, or remove it"
    assert levels(backends(reported, TORCH_NCCL_BLOCKING_WAIT="1"), "nccl") == [Level.WARNING]
    assert not named(backends(reported, TORCH_NCCL_ASYNC_ERROR_HANDLING="1"), "nccl")


@pytest.mark.parametrize(
    ("own", "level", "sentence"),
    [
        ("127.0.1.1", Level.PROBLEM, "groups on other machines cannot connect"),
        ("192.0.2.98", Level.WARNING, "gloo uses 192.0.2.98"),
        (None, Level.WARNING, "cannot be resolved"),
    ],
)
def test_the_name_of_the_machine_that_gloo_looks_up(
    own: str | None, level: Level, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(_: str) -> str:
        if own is None:
            raise socket.gaierror(-2, "Name or service not known")
        return own

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    reported = ReportedHost(host=str(outside().addresses[0]), source="a test")
    gloo = only(backends(reported), "gloo")
    assert gloo.level is level
    assert sentence in gloo.found


def test_the_managers_of_the_other_groups() -> None:
    with (
        LighthouseServer("127.0.0.1:0", 1) as server,
        LighthouseServer("127.0.0.1:0", 1) as of_manager,  # where it does not take the name `b`
        line_to(server.address()) as line,
    ):
        address = server.address().removeprefix("http://")
        where = {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": "a"}
        assert only(examine(**where), "other groups").level is Level.UNCHECKED
        with start_manager(of_manager.address(), replica_id="b") as manager:
            line.quorum("b:1", address=manager.address().removeprefix("http://")).result()
            reached = only(examine(**where), "other groups")
            assert reached.level is Level.OK
            assert reached.found == "1 reached, from 127.0.0.1"
            elsewhere = ReportedHost(host=str(outside().addresses[0]), source="a test")
            job = server_job(line)
            (wrong_card,) = check_peers(job, "a", elsewhere)
            assert wrong_card.level is Level.OK, "loopback addresses show nothing"
            with refusing() as closed:
                line.quorum("b:1", address=closed).result()
                (gone,) = check_peers(server_job(line), "a", elsewhere)
        assert gone.level is Level.PROBLEM
        assert f"1 of 1 cannot be reached: {closed}: Connection refused" in gone.found


def test_groups_whose_addresses_cannot_be_read_are_not_reached() -> None:
    unreadable = {"b:1": "nowhere", "c:1": "host:0x"}
    groups = tuple(GroupStatus(replica_id=key, address=at) for key, at in unreadable.items())
    reported = ReportedHost(host=str(outside().addresses[0]), source="a test")
    (found,) = check_peers(JobStatus(job="job", groups=groups), "a", reported)
    assert found.level is Level.PROBLEM
    assert found.found.startswith("2 of 2 cannot be reached: ")
    assert "nowhere" in found.found


def server_job(line: object) -> object:
    from torchft_svc.proto import torchft_pb2 as pb
    from torchft_svc.rpc.codec_status import status_from_wire

    call = line.call("LighthouseService/Status", pb.LighthouseStatusRequest(), 10.0, None)  # type: ignore[attr-defined]
    (job,) = status_from_wire(call.result())
    return job


@pytest.mark.processes
def test_the_others_are_reached_from_another_card_than_the_one_that_is_reported(
    bridge: tuple[str, str],
) -> None:
    """Put their managers on an interface that this group does not report."""
    name, address = bridge
    subprocess.run(["ip", "link", "set", name, "up"], check=True)  # noqa: S607
    with (
        socket.create_server((address, 0)) as listener,
        LighthouseServer("127.0.0.1:0", 1) as server,
        line_to(server.address()) as line,
    ):
        line.quorum("b:1", address=f"{address}:{listener.getsockname()[1]}").result()
        reported = ReportedHost(host=str(outside().addresses[0]), source="a test")
        (found,) = check_peers(server_job(line), "a", reported)  # type: ignore[arg-type]
    assert found.level is Level.WARNING
    assert found.found == (f"this machine reaches them from {address}, but reports {reported.host}")


def services(reported_host: str, **variables: str) -> list[network.Diagnosis]:
    reported = ReportedHost(host=reported_host, source="a test")
    return list(check_services(Environment(variables), reported))


def test_the_group_s_own_store_and_manager() -> None:
    here = str(outside().addresses[0])
    with refusing() as taken:
        port = taken.rpartition(":")[2]
        cases: list[tuple[dict[str, str], str, Level, str]] = [
            ({"MASTER_ADDR": "localhost"}, "store", Level.PROBLEM, "MASTER_PORT is not set"),
            (
                {"MASTER_ADDR": "a.invalid", "MASTER_PORT": port},
                "store",
                Level.PROBLEM,
                "resolved",
            ),
            ({"TORCHFT_CHECKPOINT_HOST": "127.0.0.1"}, "store", Level.PROBLEM, "cannot connect"),
            ({"TORCHFT_MANAGER_PORT": port}, "ports", Level.PROBLEM, "Address already in use"),
            ({"TORCHFT_MANAGER_ADDR": taken}, "manager", Level.PROBLEM, "Connection refused"),
            ({"TORCHFT_MANAGER_ADDR": "here"}, "manager", Level.PROBLEM, "has no port"),
        ]
        for variables, check, level, sentence in cases:
            found = only(services(here, **variables), check)
            assert found.level is level, variables
            assert sentence in found.found, variables
        agent = {"MASTER_ADDR": here, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "1"}
        not_yet = only(services(here, **agent), "store")
        assert not_yet.level is Level.WARNING
        assert "Connection refused" in not_yet.found
    assert services(here) == []
    assert only(
        services("127.0.0.1", MASTER_ADDR="localhost", MASTER_PORT=port), "ports"
    ).level is (Level.OK)
