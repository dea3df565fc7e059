"""Tests sessions of a parameter server whose other end is killed or frozen, in real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest
from support.bounds import check
from support.programs import Program
from support.running import SCRIPTS, freeze
from support.scripts.parameter_server import Doubling, ask

from torchft_svc.client.parameter_server.lifeline import SILENCE_S
from torchft_svc.errors import SessionEnded

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
AT_ONCE_S = 0.25
SCRIPT = str(SCRIPTS / "parameter_server.py")


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[Program]:
    with Program([sys.executable, SCRIPT, *arguments], warm=True) as running:
        try:
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # its child, which outlives it


@pytest.fixture
def server() -> Iterator[Program]:
    with program("serve", "--fork") as server:
        server.wait_for("http://")
        yield server


def address(server: Program) -> str:
    return server.wait_for("http://")


@pytest.mark.parametrize("end", ["killed", "frozen"])
def test_a_client_is_lost(server: Program, end: str) -> None:
    """The session of that client ends; another one does not notice."""
    group = Doubling.new_session(address(server))
    with program("ask", address(server), "--fork") as client:
        client.wait_for("answer 6.0")
        if end == "killed":
            client.signal(signal.SIGKILL)
        else:
            freeze(client.pid)
        since = time.monotonic()
        server.wait_for("ended: the client of this session is gone")
        limit_s = AT_ONCE_S + (SILENCE_S if end == "frozen" else 0.0)
        check(f"a client is {end}", time.monotonic() - since, limit_s)
        assert ask(group, 2.0) == 4.0
    group.shutdown()


@pytest.mark.parametrize("end", ["killed", "frozen"])
def test_the_server_is_lost(server: Program, end: str) -> None:
    """A client that waits for its answer notices it, and the next one, too."""
    group = Doubling.new_session(address(server))
    assert ask(group, 2.0) == 4.0
    if end == "killed":
        os.kill(server.pid, signal.SIGKILL)
    else:
        freeze(server.pid)
    since = time.monotonic()
    with pytest.raises(SessionEnded, match="the server of this session is gone"):
        ask(group, 2.0)
    limit_s = AT_ONCE_S + (SILENCE_S if end == "frozen" else 0.0)
    check(f"the server is {end}", time.monotonic() - since, limit_s)
    since = time.monotonic()
    with pytest.raises(SessionEnded):
        ask(group, 2.0)
    check("the next attempt", time.monotonic() - since, AT_ONCE_S)
    group.shutdown()
