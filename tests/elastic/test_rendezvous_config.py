"""Tests under which host a node is reached by the others of its run."""

from __future__ import annotations

import pytest

from torchft_svc.elastic.rendezvous.config import RendezvousConfig, rendezvous_config
from torchft_svc.errors import ConfigError
from torchft_svc.host.interfaces import list_interfaces


def configured(**changes: str) -> RendezvousConfig:
    return rendezvous_config(
        endpoint="127.0.0.1:29510", run_id="run", min_nodes=1, max_nodes=2, **changes
    )


def test_a_node_reports_the_address_of_the_chosen_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outside = [each for each in list_interfaces() if each.addresses and not each.is_loopback]
    if not outside:
        pytest.skip("this machine has no interface but the loopback one")
    assert configured().node.host == "127.0.0.1", "where the route to the lighthouse leaves from"
    monkeypatch.setenv("TORCHFT_INTERFACE", outside[0].name)
    assert configured().node.host == str(outside[0].addresses[0])
    assert configured(local_addr="node1").node.host == "node1", "an argument goes first"
    monkeypatch.setenv("TORCHFT_INTERFACE", "ib7")
    with pytest.raises(ConfigError, match="no such network interface"):
        configured()
