"""Tests that gloo uses the interface under whose address a worker is reached."""

from __future__ import annotations

import os

import pytest

from torchft_svc.host.interfaces import list_interfaces
from torchft_svc.trainer.interface import use_interface_of


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "a-name", "192.0.2.123"])
def test_nothing_is_chosen_where_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    use_interface_of(host)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = [each for each in list_interfaces() if each.addresses and not each.is_loopback]
    if not outside:
        pytest.skip("this machine has no address but its own")
    name, host = outside[0].name, str(outside[0].addresses[0])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    use_interface_of(host)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_interface_of(host)
    assert os.environ["GLOO_SOCKET_IFNAME"] == name
