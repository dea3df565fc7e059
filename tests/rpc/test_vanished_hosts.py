"""A host that vanishes closes nothing, its packets are lost: both sides notice by themselves."""

from __future__ import annotations

import time

import psutil
import pytest
from support.bounds import check
from support.hosts import Host, network
from support.running import Process, eventually, line_to

from torchft_svc.rpc.channel import (
    BEATING_KEEPALIVE_MS,
    IMPATIENT_KEEPALIVE_MS,
    KEEPALIVE_MS,
    MAX_CONNECTING_MS,
)

pytestmark = pytest.mark.processes

HEARTBEAT_S = 1.0
# One ping goes out after that silence, and is waited for.
NOTICED_S = (BEATING_KEEPALIVE_MS + KEEPALIVE_MS) / 1000
MOVED_S = (2 * IMPATIENT_KEEPALIVE_MS + MAX_CONNECTING_MS) / 1000
# For a machine that stalls.
SPARE_S = 15.0


def start_lighthouse(host: Host) -> Process:
    return Process(
        "lighthouse_server",
        f"--bind={host.address}:0",
        f"--heartbeat-timeout-ms={HEARTBEAT_S * 1000:.0f}",
        namespace=host.namespace,
    )


def start_manager(lighthouses: str, host: Host) -> Process:
    return Process(
        "manager_server",
        f"--lighthouse={lighthouses}",
        "--replica-name=group",
        "--store-address=127.0.0.1:1",
        f"--bind={host.address}:0",
        namespace=host.namespace,
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
        network(1) as hosts,
        start_lighthouse(hosts.here) as lighthouse,
        start_manager(lighthouse.address, hosts.others[0]) as manager,
        line_to(manager.address) as line,
    ):
        far = hosts.others[0]
        assert line.ask_manager(rank=0, step=0, worker_id="w").result().quorum_id
        eventually(lambda: has_peer(lighthouse, far.address))  # or so again, after a stall
        hosts.cut_off(far)
        cut_at = time.monotonic()
        lost = f"no sign of life for {HEARTBEAT_S:g} s"
        eventually(lambda: lost in lighthouse.errors(), HEARTBEAT_S + SPARE_S)
        left_s = NOTICED_S + SPARE_S - (time.monotonic() - cut_at)
        eventually(lambda: not has_peer(lighthouse, far.address), left_s)


def test_a_manager_notices_that_its_lighthouses_host_has_vanished() -> None:
    with (
        network(1) as hosts,
        start_lighthouse(hosts.others[0]) as first,
        start_lighthouse(hosts.here) as second,
        start_manager(f"{first.address},{second.address}", hosts.here) as manager,
        line_to(manager.address) as line,
    ):
        far = hosts.others[0]
        assert line.ask_manager(rank=0, step=0, worker_id="w").result().quorum_id
        eventually(lambda: has_peer(manager, far.address))
        hosts.cut_off(far)
        cut_at = time.monotonic()
        asked = line.ask_manager(rank=0, step=1, worker_id="w", timeout_s=MOVED_S + SPARE_S)
        assert asked.result().quorum_id
        took_s = time.monotonic() - cut_at
        check("the other lighthouse is asked", took_s, MOVED_S)
        eventually(lambda: "quorum changed" in second.errors())
        eventually(lambda: f"{first.address}" not in peers(manager), SPARE_S)
