"""The processes of a node's workers, and how they end with their agent."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from support.running import ROOT, environment, eventually, is_alive
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from torchft_svc.elastic.launcher import HardRestartPolicyStrategy  # noqa: F401  # imports torch
from torchft_svc.elastic.workers import (
    LocalWorkers,
    TiedFunction,
    WorkerEnd,
    _WholeLines,
    tied,
)
from torchft_svc.errors import ConfigError
from torchft_svc.host.line_writer import MAX_PART

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def workers(
    entrypoint: Any, *args: Any, num: int = 2, folder: Path, tee: Std = Std.NONE, **more: Any
) -> Iterator[LocalWorkers]:
    """The workers of a node, which end with the block."""
    entrypoint, args = tied(entrypoint, args)
    spec = WorkerSpec("role", num, None, entrypoint=entrypoint, args=args, **more)  # type: ignore[arg-type]
    local = LocalWorkers(spec, DefaultLogsSpecs(str(folder), Std.ALL, tee), "fork")
    try:
        yield local
    finally:
        local.close()
        local.close()


def environments(num: int = 2, attempt: int = 0) -> dict[int, dict[str, str]]:
    run = {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    return {rank: {"RANK": str(rank), **run} for rank in range(num)}


def ends_of(local: LocalWorkers, num: int) -> dict[int, WorkerEnd]:
    """The ends of so many workers, each awaited by the descriptors alone."""
    ended: dict[int, WorkerEnd] = {}
    deadline = time.monotonic() + 30.0
    while len(ended) < num:
        assert time.monotonic() < deadline
        wait(local.descriptors, 30.0)
        ended |= {end.local_rank: end for end in local.reap()}
    return ended


def test_each_command_ends_for_itself(tmp_path: Path) -> None:
    with workers("sh", "-c", 'test $RANK = 1 || sleep 60; exit "$RANK"', folder=tmp_path) as local:
        local.start(environments())
        pids = local.pids
        first = ends_of(local, 1)
        assert first[1].exit_code == 1
        assert first[1].failure is not None
        assert local.pids == {0: pids[0]}
        assert is_alive(pids[0])
        local.send_signal(signal.SIGTERM)
        assert ends_of(local, 1)[0].exit_code == -signal.SIGTERM
        assert not local.pids


def test_one_worker_can_be_started_again(tmp_path: Path) -> None:
    with workers("sh", "-c", "sleep 60", folder=tmp_path) as local:
        local.start(environments())
        before = local.pids
        os.kill(before[1], signal.SIGKILL)
        ends_of(local, 1)
        local.start(environments(attempt=1), [1])
        assert local.pids[0] == before[0]
        assert local.pids[1] != before[1]
    assert not any(map(is_alive, before.values()))


def test_streams_go_to_files_and_to_the_console(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "echo apple $RANK; echo pear $RANK; echo oops $RANK >&2"
    more: dict[str, Any] = {"duplicate_stdout_filters": ["apple"]}
    with workers("sh", "-c", script, folder=tmp_path, tee=Std.OUT, **more) as local:
        local.start(environments())
        ends_of(local, 2)
    assert sorted(capfd.readouterr().out.splitlines()) == [
        *("[role0]:apple 0", "[role0]:pear 0", "[role1]:apple 1", "[role1]:pear 1"),
    ]
    attempt = next(tmp_path.glob("run_*/attempt_0"))
    assert (attempt / "0" / "stdout.log").read_text() == "apple 0\npear 0\n"
    assert (attempt / "1" / "stderr.log").read_text() == "oops 1\n"
    chosen = (attempt / "filtered_stdout.log").read_text().splitlines()
    assert sorted(chosen) == ["[role0]:apple 0", "[role1]:apple 1"]


def test_a_line_is_copied_when_all_of_it_is_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "printf 'an '; sleep 0.5; printf 'apple\\nthe end'"
    more: dict[str, Any] = {"duplicate_stdout_filters": ["apple"]}
    with workers("sh", "-c", script, num=1, folder=tmp_path, tee=Std.OUT, **more) as local:
        local.start(environments(1))
        ends_of(local, 1)
    assert capfd.readouterr().out == "[role0]:an apple\n[role0]:the end\n"
    (chosen,) = tmp_path.glob("run_*/attempt_0/filtered_stdout.log")
    assert chosen.read_text() == "[role0]:an apple\n"


def test_a_line_that_does_not_end_is_copied_in_parts() -> None:
    console, half = io.StringIO(), "x" * (MAX_PART // 2 + 1)
    lines = _WholeLines(console, "[role0]:")
    lines.write(half)
    assert not console.getvalue()
    lines.write(half)
    lines.write("the end\n")
    lines.write("\n")
    assert console.getvalue() == f"[role0]:{half}{half}\n[role0]:the end\n[role0]:\n"


@pytest.mark.parametrize("redirects", [Std.NONE, Std.ALL])
def test_a_temporary_directory_of_logs_stays_only_if_there_are_logs(
    redirects: Std, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = WorkerSpec("role", 1, None, entrypoint="true")  # type: ignore[arg-type]
    local = LocalWorkers(spec, DefaultLogsSpecs(redirects=redirects))
    local.start(environments(1))
    ends_of(local, 1)
    assert len(list(tmp_path.iterdir())) == 1
    local.close()
    assert len(list(tmp_path.rglob("*.log"))) == (0 if redirects is Std.NONE else 2)
    assert len(list(tmp_path.iterdir())) == (0 if redirects is Std.NONE else 1)


def test_what_a_failed_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "child"
    script = f"sleep 60 & echo $! > {path}.part; mv {path}.part {path}; exit 3"
    with workers("sh", "-c", script, num=1, folder=tmp_path) as local:
        local.start(environments(1))
        assert ends_of(local, 1)[0].exit_code == 3
        child = int(path.read_text())
        eventually(lambda: not is_alive(child), 20.0, "its child ends, too")


def test_there_must_be_such_a_program() -> None:
    with pytest.raises(ConfigError, match="there is no such program"):
        tied("nowhere/at/all", ())


def test_a_tied_function_has_its_own_name() -> None:
    function, args = tied(environments, (1,))
    assert isinstance(function, TiedFunction)
    assert (function.__name__, function.__qualname__, args) == ("environments",) * 2 + ((1,),)


AGENT = """
import subprocess, sys, threading
def start():
    sys.path.insert(0, {root!r})
    from torchft_svc.host import process_end
    command = [sys.executable, "-I", "-S", process_end.__file__, str({pid}), "sleep", "60"]
    print(subprocess.Popen(command).pid, flush=True)
    {then}
start()
"""


def agent(then: str, pid: str = "__import__('os').getpid()") -> subprocess.Popen[str]:
    """A process that starts a worker as an agent does, and prints its id."""
    script = AGENT.format(root=str(ROOT), then=then, pid=pid)
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())


def test_a_command_ends_with_its_agent() -> None:
    with agent("threading.Event().wait(60)") as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        eventually(lambda: _is_sleep(worker), 20.0, "it has become the command")
        process.kill()
        process.wait()
    eventually(lambda: not is_alive(worker), 20.0, "it has ended")


SLOW_TO_END = """
import ctypes, os, subprocess, sys, threading, time
from torchft_svc.host import process_end
threading.Thread(target=time.sleep, args=(20.0,)).start()
command = [sys.executable, "-I", "-S", process_end.__file__, str(os.getpid())]
script = f"sleep 600 & echo $! >{sys.argv[1]}; wait"
subprocess.Popen([*command, "sh", "-c", script], start_new_session=True)
sys.stdin.readline()
ctypes.CDLL(None).syscall(60, 0)  # ends this thread, and no other one
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls have other numbers")
def test_a_process_group_ends_with_an_agent_that_takes_long_to_end(tmp_path: Path) -> None:
    """The main thread has started the workers; others, and its memory, may be there for longer."""
    path = tmp_path / "child"
    command = [sys.executable, "-c", SLOW_TO_END, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env=environment()) as process:
        eventually(lambda: path.exists() and path.read_text().strip(), 20.0, "it has a child")
        child = int(path.read_text())
        assert process.stdin is not None
        process.stdin.close()
        eventually(lambda: not is_alive(child), 10.0, "it has ended")
        assert process.poll() is None
        process.kill()


def test_a_command_whose_agent_has_ended_does_not_begin() -> None:
    with agent("pass", pid=str(2**22)) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
    eventually(lambda: not is_alive(worker), 20.0, "it has ended")


def _is_sleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")


def sleep_long() -> None:
    time.sleep(60)


def test_a_forked_function_has_no_handlers_of_its_agent(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with workers(sleep_long, num=1, folder=tmp_path) as local:
            local.start(environments(1))
            eventually(lambda: _ends_by_sigterm(local), 30.0, "it ends")
    finally:
        signal.signal(signal.SIGTERM, before)


def tensor() -> Any:
    import torch

    return torch.arange(3)


def test_a_function_may_return_a_tensor_to_a_busy_agent(tmp_path: Path) -> None:
    with workers(tensor, num=1, folder=tmp_path) as local:
        local.start(environments(1))
        value = local.descriptors[-1]
        assert wait([value], 30.0)
        assert not wait(local.descriptors[:1], 1.0), "it has ended before its value was read"
        assert ends_of(local, 1)[0].value.tolist() == [0, 1, 2]


def _ends_by_sigterm(local: LocalWorkers) -> bool:
    """The signal may come before the function is reached."""
    local.send_signal(signal.SIGTERM)
    return any(end.exit_code == -signal.SIGTERM for end in local.reap())
