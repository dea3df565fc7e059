"""Tests a fork server that misbehaves; its ordinary life is that of all tests with processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support.running import ROOT, SCRIPTS

from torchft_svc.errors import DeadlineExceeded
from torchft_svc.host import fork_server
from torchft_svc.host.fork_server import ForkServer

pytestmark = pytest.mark.processes


@pytest.fixture
def server() -> Iterator[ForkServer]:
    paths = os.pathsep.join((str(ROOT), str(SCRIPTS)))
    made = ForkServer("forking", "a test", environment=os.environ | {"PYTHONPATH": paths})
    yield made
    made.close()


def end(server: ForkServer, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert server.end_of(pid, 20.0) is not None


def test_a_server_that_is_frozen_is_replaced(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(server, server.fork(b""))
    assert server._process is not None
    frozen = server._process.pid
    os.kill(frozen, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "FORK_S", 0.5)
        with pytest.raises(DeadlineExceeded, match="a test"):
            server.fork(b"")
    end(server, server.fork(b""))
    assert server._process.pid != frozen
