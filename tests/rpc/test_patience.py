"""What a server bears with before it hangs up: silence before, between and within calls."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from support.bounds import Late
from support.hostile import PREFACE, frame
from support.running import eventually, manager_process

from torchft_svc.core.quorum.types import QuorumConfig
from torchft_svc.host.address import HostPort
from torchft_svc.host.loop import Background
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.servicer import lighthouse_service
from torchft_svc.rpc.serving import Patience, serve

pytestmark = pytest.mark.processes

LIMIT_MS = 1_000
# Far longer: what is not under test must not end a connection here.
NEVER_MS = 600_000
# gRPC looks at an idle connection once in its limit, and a frozen one is asked once; the rest is
# for a machine that stalls.
GONE_S = 2 * LIMIT_MS / 1000 + 15.0
SETTINGS = frame(4, 0, 0)


@contextlib.contextmanager
def lighthouse(
    *, handshake_ms: int = NEVER_MS, idle_ms: int = NEVER_MS, keepalive_ms: int = NEVER_MS
) -> Iterator[int]:
    """One in this process, with this much patience; gives its port."""
    driver = LighthouseDriver(QuorumConfig(heartbeat_timeout_s=NEVER_MS / 1000))
    patience = Patience(handshake_ms=handshake_ms, idle_ms=idle_ms, keepalive_ms=keepalive_ms)
    bind = HostPort("127.0.0.1", 0)
    serving = Background(serve(lambda _: lighthouse_service(driver), bind, patience=patience))
    try:
        yield serving.value.port
    finally:
        serving.close()


def hung_up_after_s(port: int, said: bytes) -> float:
    """How long a connection lasts that says no more than ``said``."""
    began_at = time.monotonic()  # the server may take it long before this thread goes on
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        raw.sendall(said)
        raw.settimeout(GONE_S)
        while raw.recv(4096):
            pass  # its settings, and what it says at the end
        return time.monotonic() - began_at


def test_who_does_not_shake_hands_is_hung_up_on() -> None:
    with lighthouse(handshake_ms=LIMIT_MS) as port:
        took_s = hung_up_after_s(port, PREFACE[:12])
    assert took_s >= 0.9 * LIMIT_MS / 1000


def test_a_connection_without_a_call_is_hung_up_on() -> None:
    with lighthouse(idle_ms=LIMIT_MS) as port:
        took_s = hung_up_after_s(port, PREFACE + SETTINGS + frame(4, 1, 0))
    assert took_s >= 0.9 * LIMIT_MS / 1000


def test_a_peer_that_answers_no_ping_is_hung_up_on() -> None:
    """A frozen process is as silent as a host that is gone: nothing is closed."""
    with (
        lighthouse(keepalive_ms=LIMIT_MS) as port,
        manager_process(f"127.0.0.1:{port}") as manager,
    ):
        eventually(lambda: connected(port))
        manager.send(signal.SIGSTOP)
        eventually(lambda: not connected(port), GONE_S)


def test_a_session_that_says_little_is_not_hung_up_on() -> None:
    """A stream is a call, and its host answers the pings."""
    with (
        lighthouse(handshake_ms=LIMIT_MS, idle_ms=LIMIT_MS, keepalive_ms=LIMIT_MS) as port,
        manager_process(f"127.0.0.1:{port}", f"--heartbeat-interval-ms={NEVER_MS}") as manager,
    ):
        before = eventually(lambda: connected(port))
        # Another one's whole patience passes.
        hung_up_after_s(port, PREFACE + SETTINGS + frame(4, 1, 0))
        if connected(port) != before:
            raise Late("a ping was not answered in time")
        assert manager.is_running()


def connected(port: int) -> set[int]:
    """The far ports of the connections that this process, as a server, has on ``port``."""
    held = psutil.Process().net_connections("tcp")
    return {each.raddr.port for each in held if each.raddr and each.laddr.port == port}
