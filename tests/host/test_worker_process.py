"""Tests whom the signals of a worker's process reach, and how its end is known."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running import ROOT, SCRIPTS, eventually, is_alive

from torchft_svc.host.fork_server import ForkServer
from torchft_svc.host.worker_process import ForkedProcess, SpawnedProcess, WorkerProcess

pytestmark = pytest.mark.processes

WAIT_S = 20.0


@contextlib.contextmanager
def parent(folder: Path, *, is_python: bool) -> Iterator[tuple[WorkerProcess, int]]:
    """A process with a child that it waits for, and the id of that child."""
    path = folder / "child"
    script = f"sleep 60 & echo $! > {path}.part; mv {path}.part {path}; wait"
    process = SpawnedProcess(["sh", "-c", script], os.environ, is_python=is_python)
    try:
        eventually(path.exists)
        yield process, int(path.read_text())
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.end.wait(WAIT_S)
        assert process.poll() is not None
        process.close(kill_rest=True)


@pytest.mark.parametrize("is_python", [True, False])
def test_a_signal_reaches_the_children_of_a_command_that_is_no_python_program(
    tmp_path: Path, is_python: bool
) -> None:
    with parent(tmp_path, is_python=is_python) as (process, child):
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.end.wait(WAIT_S)
        assert process.poll() == -signal.SIGTERM
        if not is_python:
            eventually(lambda: not is_alive(child))
        else:
            assert is_alive(child)
    eventually(lambda: not is_alive(child))


def test_a_kill_reaches_all_that_a_process_has_started(tmp_path: Path) -> None:
    with parent(tmp_path, is_python=True) as (process, child):
        process.send_signal(signal.SIGKILL)
        eventually(lambda: not is_alive(child))


def test_a_fork_can_be_killed_before_it_leads_its_session() -> None:
    paths = os.pathsep.join((str(ROOT), str(SCRIPTS)))
    server = ForkServer("forking", "a test", environment=os.environ | {"PYTHONPATH": paths})
    try:
        process = ForkedProcess(server.fork(b""), server)  # it never begins a session
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.end.wait(WAIT_S)
        assert process.poll() == -signal.SIGKILL
        assert process.poll() == -signal.SIGKILL
        process.send_signal(signal.SIGTERM)  # nobody is there
        process.close(kill_rest=False)
    finally:
        server.close()


def test_a_fork_whose_server_is_lost_counts_as_killed() -> None:
    paths = os.pathsep.join((str(ROOT), str(SCRIPTS)))
    server = ForkServer("forking", "a test", environment=os.environ | {"PYTHONPATH": paths})
    process = ForkedProcess(server.fork(b""), server)
    server.close()
    os.kill(process.pid, signal.SIGTERM)  # which the fork ignores, as its server did
    os.kill(process.pid, signal.SIGKILL)
    assert process.end.wait(WAIT_S)
    assert process.poll() == -signal.SIGKILL
    process.close(kill_rest=False)
