"""Tests that gloo uses the interface under whose address a worker is reached."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil
import pytest

from torchft_svc.trainer.interface import interface_of, use_interface_of


def addresses() -> list[tuple[str, str]]:
    """Each interface with its first IPv4 address."""
    found = []
    for name, entries in psutil.net_if_addrs().items():
        mine = [each.address for each in entries if each.family == socket.AF_INET]
        found += [(name, address) for address in mine[:1]]
    return found


def test_interfaces_are_found_by_their_address() -> None:
    for name, address in addresses():
        assert interface_of(ipaddress.IPv4Address(address)) == name
    assert interface_of(ipaddress.IPv4Address("192.0.2.123")) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "a-name", "192.0.2.123"])
def test_nothing_is_chosen_where_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    use_interface_of(host)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = [(name, host) for name, host in addresses() if not host.startswith("127.")]
    if not outside:
        pytest.skip("this machine has no address but its own")
    name, host = outside[0]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    use_interface_of(host)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_interface_of(host)
    assert os.environ["GLOO_SOCKET_IFNAME"] == name
