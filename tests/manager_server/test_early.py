"""Tests managers whose processes are started before their settings are known."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.running import END_S, SCRIPTS, environment, eventually, is_alive, lives

from torchft_svc.core.quorum.types import Resumed
from torchft_svc.manager_server import supervisor as supervisor_module
from torchft_svc.manager_server.child import ManagerProcess
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.early import EARLY, SIDECAR, start_manager_early
from torchft_svc.manager_server.supervisor import ManagerSupervisor
from torchft_svc.rpc.security import PLAIN, Security

pytestmark = pytest.mark.processes

OTHER = Security(token="of-another-trainer")  # noqa: S106 - no secret
OWNER = SCRIPTS / "owner_of_an_early_manager.py"


def config(security: Security = PLAIN) -> ManagerConfig:
    return ManagerConfig(
        lighthouse_address="127.0.0.1:1",
        replica_name="mine",
        group_world_size=1,
        store_address="127.0.0.1:1",
        bind="127.0.0.1:0",
        security=security,
    )


def sidecars() -> list[int]:
    children = psutil.Process().children()
    return [child.pid for child in children if lives(child) and SIDECAR in child.cmdline()]


@pytest.fixture
def early() -> Iterator[int]:
    """The process id of a manager that was started early."""
    start_manager_early()
    (pid,) = eventually(sidecars)  # its command line is another one until it runs its program
    yield pid
    unusable = EARLY.use_process(OTHER, {})  # if it still waits, it is ended
    assert unusable is None
    assert not is_alive(pid)


def test_the_first_manager_uses_the_process_that_was_started_early(early: int) -> None:
    start_manager_early()  # there is one already
    with ManagerProcess.start(config()) as first, ManagerProcess.start(config()) as second:
        assert first.pid == early
        assert sorted(sidecars()) == sorted([first.pid, second.pid])
        assert first.address != second.address


def test_a_manager_with_another_security_does_not_use_it(early: int) -> None:
    with ManagerProcess.start(config(OTHER)) as manager:
        assert sidecars() == [manager.pid] != [early]


def test_one_that_has_died_is_replaced(early: int) -> None:
    os.kill(early, signal.SIGKILL)
    eventually(lambda: not is_alive(early))
    with ManagerProcess.start(config()) as manager:
        assert manager.pid != early


@contextlib.contextmanager
def supervised(num_workers: int, *, in_term: bool) -> Iterator[ManagerSupervisor]:
    settings = dataclasses.replace(config(), group_world_size=num_workers)
    supervisor = ManagerSupervisor(settings, END_S, print, print)
    resumed = Resumed(replica_id="mine:1", quorum_id=7, step=3, num_groups=2)
    supervisor.resume_with(lambda: resumed if in_term else None)
    with contextlib.closing(supervisor):
        supervisor.await_ready()
        yield supervisor
    assert sidecars() == []


def test_the_next_manager_of_several_workers_has_done_its_imports() -> None:
    with supervised(2, in_term=True) as supervisor:
        for _ in range(2):
            first = supervisor.pid
            eventually(lambda: len(sidecars()) == 2)
            (waiting,) = {*sidecars()} - {first}
            os.kill(first, signal.SIGKILL)
            eventually(lambda waiting=waiting: supervisor.pid == waiting)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_waits_and_is_dead_or_frozen_is_no_manager(number: int) -> None:
    with supervised(2, in_term=True) as supervisor:
        first = supervisor.pid
        eventually(lambda: len(sidecars()) == 2)
        (waiting,) = {*sidecars()} - {first}
        os.kill(waiting, number)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: supervisor.pid not in (first, waiting) and supervisor.find() != "")
        eventually(lambda: not is_alive(waiting))


def test_a_process_that_waits_and_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STARTS_WINDOW_S", 0.0)
    with supervised(2, in_term=True) as supervisor:
        eventually(lambda: len(sidecars()) == 2)
        (waiting,) = {*sidecars()} - {supervisor.pid}
        os.kill(waiting, signal.SIGKILL)
        eventually(lambda: len({*sidecars()} - {supervisor.pid, waiting}) == 1)


@pytest.mark.parametrize(("num_workers", "in_term"), [(1, True), (2, False)])
def test_where_the_others_do_not_need_it_no_process_waits(num_workers: int, in_term: bool) -> None:
    with supervised(num_workers, in_term=in_term) as supervisor:
        supervisor._prepare_next()
        assert sidecars() == [supervisor.pid]


def test_a_forked_child_does_not_use_it(early: int) -> None:
    reading, writing = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.write(writing, repr(EARLY.use_process(PLAIN, {})).encode())
        os._exit(0)
    os.waitpid(forked, 0)
    assert os.read(reading, 100) == b"None"
    assert is_alive(early)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "1"), ("TORCHFT_MANAGER_ADDR", "127.0.0.1:1")]
)
def test_a_worker_that_starts_no_manager_starts_none_early(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    start_manager_early()
    assert sidecars() == []


def test_it_ignores_signals_for_its_trainer_while_it_waits(early: int) -> None:
    def ignored() -> int:
        lines = Path(f"/proc/{early}/status").read_text().splitlines()
        (mask,) = [line.split()[1] for line in lines if line.startswith("SigIgn")]
        return int(mask, 16)

    wanted = sum(1 << (number - 1) for number in (signal.SIGTERM, signal.SIGINT))
    eventually(lambda: ignored() & wanted == wanted)
    os.kill(early, signal.SIGTERM)
    with ManagerProcess.start(config()) as manager:
        assert manager.pid == early


def test_it_ends_with_its_trainer_although_a_forked_child_holds_the_pipe() -> None:
    owner = subprocess.run(
        [sys.executable, str(OWNER)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        timeout=END_S,
        check=False,
    )
    assert owner.returncode == -signal.SIGKILL
    manager, forked = map(int, owner.stdout.split())
    try:
        eventually(lambda: not is_alive(manager))
        assert is_alive(forked)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(forked, signal.SIGKILL)
