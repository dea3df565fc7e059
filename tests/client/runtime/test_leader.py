"""Tests that group rank 0 counts as dead if and only if it is."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from support.running import eventually
from support.warm import Warm

from torchft_svc.client.runtime.leader import LeaderSign, LeaderWatch
from torchft_svc.host.address import HostPort, parse_address

FORKING = """
import os, sys, time
from torchft_svc.client.runtime.leader import LeaderSign
sign = LeaderSign()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(sign.port, child, flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_a_process_that_is_killed_is_dead_though_its_forked_child_lives(tmp_path: Path) -> None:
    script = tmp_path / "leader.py"
    script.write_text(FORKING)
    with Warm([sys.executable, str(script)], env=os.environ, text=True) as leader:
        port, child = map(int, leader.stdout.readline().split())
        try:
            watches = [LeaderWatch(HostPort("127.0.0.1", port)) for _ in range(3)]
            leader.send_signal(signal.SIGSTOP)
            assert not any(watch.is_dead() for watch in watches), "frozen is not dead"
            leader.kill()
            for watch in watches:
                eventually(watch.is_dead)
                watch.close()
            assert Path(f"/proc/{child}").exists()
        finally:
            leader.kill()
            os.kill(child, signal.SIGKILL)


def test_a_connection_that_something_else_cuts_is_no_death() -> None:
    with socket.create_server(("127.0.0.1", 0)) as leader:
        where = parse_address(f"127.0.0.1:{leader.getsockname()[1]}")
        watch = LeaderWatch(where)
        for _ in range(2):
            accepted, _ = leader.accept()
            accepted.close()
            assert not watch.is_dead()
    eventually(watch.is_dead)
    assert watch.is_dead(), "it stays dead"
    watch.close()
    watch.close()


def test_who_never_had_a_connection_knows_nothing() -> None:
    sign = LeaderSign()
    sign.close()
    sign.close()
    watch = LeaderWatch(HostPort("127.0.0.1", sign.port))
    assert not watch.is_dead()
    watch.close()
