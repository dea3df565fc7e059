"""Tests that who is refused again and again takes few lines and little memory."""

from __future__ import annotations

import pytest

from torchft_svc.rpc.guard import MAX_LOGGED, Refusals


def test_a_peer_is_named_once_for_each_method(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for port in range(100):
        refusals.log_refusal(f"ipv4:10.0.0.1:{port}", "/s/Quorum", "no name")
    refusals.log_refusal("ipv4:10.0.0.1:7", "/s/Kill", "no such group")
    refusals.log_refusal("ipv4:10.0.0.2:7", "/s/Quorum", "no name")
    assert [record.getMessage() for record in caplog.records] == [
        "refused '/s/Quorum' from ipv4:10.0.0.1:0: no name (logged at most every 60 s)",
        "refused '/s/Kill' from ipv4:10.0.0.1:7: no such group (logged at most every 60 s)",
        "refused '/s/Quorum' from ipv4:10.0.0.2:7: no name (logged at most every 60 s)",
    ]


def test_i7_peers_without_end_do_not_fill_the_memory() -> None:
    refusals = Refusals()
    for number in range(3 * MAX_LOGGED):
        refusals.log_refusal(f"ipv4:{number}:1", "/s/Quorum", "no name")
    assert len(refusals._logged_at) == MAX_LOGGED
