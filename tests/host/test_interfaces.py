"""Tests what is found of this machine's network interfaces, and of those that a test makes."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError
from torchft_svc.host.interfaces import address_of, chosen_host, interface_of, list_interfaces


def test_they_are_those_of_another_library() -> None:
    ours = {each.name: each for each in list_interfaces()}
    stats, found = psutil.net_if_stats(), psutil.net_if_addrs()
    assert ours.keys() == stats.keys()
    for name, interface in ours.items():
        v4 = [each.address for each in found.get(name, ()) if each.family == socket.AF_INET]
        v6 = [each.address for each in found.get(name, ()) if each.family == socket.AF_INET6]
        shown = [*v4[:1], *(each for each in v6 if not each.startswith("fe80:"))]
        assert [str(each) for each in interface.addresses] == shown
        speed = stats[name].speed
        assert interface.speed_bps == (speed * 1e6 if speed else None)


def test_an_interface_is_found_by_its_address() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert loopback.name == "lo"
    assert loopback.is_loopback
    assert loopback.is_up
    assert interface_of("::1") == loopback
    assert interface_of("192.0.2.123") is None
    assert interface_of("a-name") is None


def test_the_chosen_one_gives_its_address() -> None:
    assert chosen_host(Environment({})) is None
    assert chosen_host(Environment({"TORCHFT_INTERFACE": ""})) is None
    assert chosen_host(Environment({"TORCHFT_INTERFACE": "lo"})) == "127.0.0.1"


def test_one_that_is_not_there_is_refused_and_the_others_are_named() -> None:
    with pytest.raises(ConfigError) as refused:
        chosen_host(Environment({"TORCHFT_INTERFACE": "ib7"}))
    assert "TORCHFT_INTERFACE='ib7'" in str(refused.value)
    assert "this machine has no such network interface; those with an address: lo" in str(
        refused.value
    )


@pytest.fixture
def bridge() -> Iterator[str]:
    """An interface without an address."""
    name = f"tftd{os.getpid() % 100_000}"
    if os.geteuid():
        pytest.skip("a network interface takes root")
    made = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True)  # noqa: S607
    if made.returncode:
        pytest.skip(f"no network interface can be made here: {made.stderr.decode()}")
    yield name
    subprocess.run(["ip", "link", "del", name], check=True)  # noqa: S607


@pytest.mark.processes
def test_one_without_an_address_is_refused(bridge: str) -> None:
    assert not next(each for each in list_interfaces() if each.name == bridge).is_up
    with pytest.raises(ConfigError, match="this network interface has no address; those with one"):
        address_of(bridge)
    subprocess.run(["ip", "addr", "add", "fd99::7/64", "dev", bridge], check=True)  # noqa: S607
    assert address_of(bridge) == "fd99::7"
    subprocess.run(["ip", "addr", "add", "198.51.100.7/32", "dev", bridge], check=True)  # noqa: S607
    assert address_of(bridge) == "198.51.100.7", "IPv4 comes first"
    assert interface_of("fd99::7").name == bridge  # type: ignore[union-attr]
    assert ipaddress.IPv4Address("198.51.100.7") in interface_of("198.51.100.7").addresses  # type: ignore[union-attr]
