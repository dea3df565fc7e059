"""A host that vanishes closes nothing, its packets are lost: both sides notice by themselves."""

from __future__ import annotations

import time

import psutil
import pytest
from support.bounds import check
from support.running import Process, eventually, line_to
from support.wire import wire

from torchft_svc.rpc.channel import IMPATIENT_KEEPALIVE_MS, KEEPALIVE_MS, MAX_CONNECTING_MS

pytestmark = pytest.mark.processes

HEARTBEAT_S = 1.0
# One ping goes out after that silence, and is waited for as long.
NOTICED_S = 2 * KEEPALIVE_MS / 1000
MOVED_S = (2 * IMPATIENT_KEEPALIVE_MS + MAX_CONNECTING_MS) / 1000
# For a machine that stalls.
SPARE_S = 15.0


def start_lighthouse(host: str, namespace: str | None = None) -> Process:
    return Process(
        "lighthouse_server",
        f"--bind={host}:0",
        f"--heartbeat-timeout-ms={HEARTBEAT_S * 1000:.0f}",
        namespace=namespace,
    )


def start_manager(lighthouses: str, host: str, namespace: str | None = None) -> Process:
    return Process(
        "manager_server",
        f"--lighthouse={lighthouses}",
        "--replica-name=group",
        "--store-address=127.0.0.1:1",
        f"--bind={host}:0",
        namespace=namespace,
    )


def peers(process: Process) -> set[str]:
    """The far ends of its connections, as ``host:port``; gRPC's sockets are IPv6 ones."""
    held = psutil.Process(process.pid).net_connections("tcp")
    ends = (each.raddr for each in held if each.status == psutil.CONN_ESTABLISHED)
    return {f"{end.ip.removeprefix('::ffff:')}:{end.port}" for end in ends}


def has_peer(process: Process, host: str) -> bool:
    return any(peer.startswith(f"{host}:") for peer in peers(process))


def test_a_lighthouse_notices_that_a_managers_host_has_vanished() -> None:
    with (
        wire() as cable,
        start_lighthouse(cable.near) as lighthouse,
        start_manager(lighthouse.address, cable.far, cable.namespace) as manager,
        line_to(manager.address) as line,
    ):
        assert line.ask_manager(rank=0, step=0, worker_id="w").result().quorum_id
        eventually(lambda: has_peer(lighthouse, cable.far))  # or so again, after a stall
        cable.cut()
        cut_at = time.monotonic()
        lost = f"no sign of life for {HEARTBEAT_S:g} s"
        eventually(lambda: lost in lighthouse.errors(), HEARTBEAT_S + SPARE_S)
        left_s = NOTICED_S + SPARE_S - (time.monotonic() - cut_at)
        eventually(lambda: not has_peer(lighthouse, cable.far), left_s)


def test_a_manager_notices_that_its_lighthouses_host_has_vanished() -> None:
    with (
        wire() as cable,
        start_lighthouse(cable.far, cable.namespace) as first,
        start_lighthouse(cable.near) as second,
        start_manager(f"{first.address},{second.address}", cable.near) as manager,
        line_to(manager.address) as line,
    ):
        assert line.ask_manager(rank=0, step=0, worker_id="w").result().quorum_id
        eventually(lambda: has_peer(manager, cable.far))
        cable.cut()
        cut_at = time.monotonic()
        asked = line.ask_manager(rank=0, step=1, worker_id="w", timeout_s=MOVED_S + SPARE_S)
        assert asked.result().quorum_id
        took_s = time.monotonic() - cut_at
        check("the other lighthouse is asked", took_s, MOVED_S)
        assert "quorum changed" in second.errors()
        eventually(lambda: f"{first.address}" not in peers(manager), SPARE_S)
