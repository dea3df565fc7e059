"""Tests that a process which may open no more files says so, and ends, instead of trying on."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fork_server import TORCH
from support.running import Process, lighthouse_process, run_forked, run_fresh

from torchft_svc.coordination import LighthouseClient
from torchft_svc.errors import ConfigError
from torchft_svc.rpc.descriptors import require_descriptors, shortage
from torchft_svc.rpc.status import cause_of

pytestmark = pytest.mark.processes

RUN_S = 60.0
TRAINER = """
import os, sys, torch
from torchft_svc import Manager
manager = Manager(state_dict=dict, load_state_dict=print, replica_id="a")
kept = []
while sys.argv[1:] != ["ends"] or manager.current_step() < 2:
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    if sys.argv[1:] == ["leaks"]:
        manager.report_error(RuntimeError("a bad batch"))
        try:
            while True:
                kept.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
    manager.should_commit()
manager.shutdown()
"""
SERVICES = {
    "lighthouse_server": ["--bind=127.0.0.1:0"],
    "manager_server": [
        *("--lighthouse=127.0.0.1:1", "--replica-name=a", "--store-address=127.0.0.1:1"),
        "--bind=127.0.0.1:0",
    ],
}


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Process]:
    with lighthouse_process() as process:
        yield process


def run_with(limit: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command where at most ``limit`` files may be open."""
    shell = ["/bin/sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", sys.executable, *command]
    return run_fresh(shell, RUN_S, **variables)


def train_with(
    limit: int, folder: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The trainer where at most ``limit`` files may be open, which has imported torch before."""
    program = folder / "train.py"
    limits = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))"
    program.write_text(f"import resource; {limits}\n{TRAINER}")
    return run_forked([sys.executable, str(program), *arguments], TORCH, RUN_S, **variables)


def test_a_trainer_with_few_files_ends_at_its_start(lighthouse: Process, tmp_path: Path) -> None:
    """The import of torch needs some of these files as well."""
    (tmp_path / "train.py").write_text(TRAINER)
    variables = {"TORCHFT_LIGHTHOUSE": lighthouse.address}
    check_refusal(12, run_with(12, str(tmp_path / "train.py"), **variables))


def test_a_trainer_with_too_few_files_ends_at_its_start(
    lighthouse: Process, tmp_path: Path
) -> None:
    variables = {"TORCHFT_LIGHTHOUSE": lighthouse.address}
    check_refusal(24, train_with(24, tmp_path, **variables))


def check_refusal(limit: int, done: subprocess.CompletedProcess[str]) -> None:
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"torchft_svc.errors.ConfigError: ulimit -n={limit} cannot work: a trai")
    assert f"too many open files (EMFILE): this process may have {limit}" in last
    assert "resolve" not in done.stderr


@pytest.mark.parametrize("limit", [28, 29])
def test_a_trainer_that_can_start_but_not_connect_ends(
    lighthouse: Process, tmp_path: Path, limit: int
) -> None:
    """The trainer may train where these files are enough, but not discard one step for ever."""
    variables = {"TORCHFT_LIGHTHOUSE": lighthouse.address, "TORCHFT_JOB_ID": f"few{limit}"}
    done = train_with(limit, tmp_path, "ends", **variables)
    if done.returncode:
        assert f"ConfigError: ulimit -n={limit} cannot work: " in done.stderr
        assert "too many open files (EMFILE)" in done.stderr


@pytest.mark.parametrize("module", SERVICES)
@pytest.mark.parametrize("limit", [10, 14])
def test_a_service_with_few_files_ends_at_its_start(module: str, limit: int) -> None:
    done = run_with(limit, "-m", f"torchft_svc.{module}", *SERVICES[module])
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: ulimit -n={limit} cannot work: this service opens 16")
    assert len(done.stderr.splitlines()) == 1


def test_a_trainer_whose_files_run_out_ends_with_that(lighthouse: Process, tmp_path: Path) -> None:
    variables = {"TORCHFT_LIGHTHOUSE": lighthouse.address, "TORCHFT_JOB_ID": "leaks"}
    done = train_with(100, tmp_path, "leaks", **variables)
    assert done.returncode == 1
    assert "ConfigError: ulimit -n=100 cannot work: too many open files" in done.stderr


@contextlib.contextmanager
def no_files_left() -> Iterator[None]:
    """Open files in this process until none is left."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, before[1]))
    opened: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_client_does_not_try_again(lighthouse: Process) -> None:
    client = LighthouseClient(lighthouse.address, timedelta(seconds=RUN_S))
    with no_files_left(), pytest.raises(ConfigError, match="too many open files"):
        client._connect()


def test_the_cause_is_named_where_grpc_speaks_of_names() -> None:
    resolving = "errors resolving ipv4:127.0.0.1:1: [UNKNOWN:no]"
    with no_files_left():
        cause = cause_of(grpc.StatusCode.UNAVAILABLE, resolving)
    assert cause.startswith("too many open files")


def test_with_files_left_nothing_is_short() -> None:
    assert shortage() == ""
    require_descriptors(16, "a test")
    assert cause_of(grpc.StatusCode.UNAVAILABLE, "errors resolving x") == (
        "its host name cannot be resolved"
    )


def test_a_full_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is planted: only root could fill the kernel's table, and would stop all else."""

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENFILE, "Too many open files in system")

    monkeypatch.setattr(os, "open", refuse)
    assert "on this system (ENFILE)" in shortage()
