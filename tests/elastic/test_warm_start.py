"""Workers that are forked from a process which has imported their modules are like cold ones."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.launched import LAUNCH_S, agent, are_gone
from support.programs import Program
from support.running import ROOT, SCRIPTS, eventually

from torchft_svc.elastic.launcher import LaunchConfig
from torchft_svc.elastic.warm_start import check_command, preload_list
from torchft_svc.errors import ConfigError

SCRIPT = str(SCRIPTS / "describing_worker.py")
MODULE = "tests.support.scripts.describing_worker"
WARM = "is a warm start"


def launched(
    folder: Path, *options: str, program: tuple[str, ...], modules: Path | None = None
) -> Program:
    """One worker, which is started cold first, and warm when it is killed."""
    line = [
        *("--standalone", "--restart-policy=soft-replace"),
        *("--warm-start", "--tee=3"),
        *(f"--log-dir={folder / 'logs'}", *options, *program),
    ]
    environment = {"TORCHFT_LIGHTHOUSE": ""}
    if modules is not None:
        environment["PYTHONPATH"] = f"{modules}:{ROOT}"
    return agent(*line, environment=environment)


def attempt(folder: Path, number: int, of: Program) -> Any:
    path = folder / f"{number}.json"
    eventually(path.exists, LAUNCH_S, "\n".join(of.read_so_far()))
    return json.loads(path.read_text())


def cold_and_warm(folder: Path, launcher: Program) -> tuple[Any, Any, int]:
    """The reports of the last cold attempt and of the first warm one; and the number of that."""
    launcher.wait_for("nowhere cannot be preloaded", LAUNCH_S)
    warm = attempt(folder, 0, launcher)
    for number in itertools.count(1):
        cold = warm
        time.sleep(0.2)  # the fork server is ready now, on a machine with time
        os.kill(cold["own"]["pid"], signal.SIGKILL)
        warm = attempt(folder, number, launcher)
        if warm["own"]["parent"] != launcher.pid:
            return cold, warm, number
    raise AssertionError


ENDS = {
    "script": ((SCRIPT,), "0", 0, 0),
    "module": (("-m", MODULE), "7", 1, 7),
    "exception": ((SCRIPT,), "raise", 1, 1),
    "interrupt": ((SCRIPT,), "interrupt", 1, -2),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", ENDS)
def test_a_warm_worker_finds_and_does_what_a_cold_one_does(name: str, tmp_path: Path) -> None:
    program, end, status, exit_code = ENDS[name]
    line = (*program, str(tmp_path), end)
    options = ("--max-restarts=3", "--warm-start-preload=numpy,nowhere")
    with launched(tmp_path, *options, program=line) as launcher:
        cold, warm, number = cold_and_warm(tmp_path, launcher)
        assert launcher.wait() == status, launcher.lines
    assert any(WARM in line for line in launcher.lines), launcher.lines
    assert cold["own"]["parent"] == launcher.pid
    for each in (cold, warm):
        for variable in ("MASTER_PORT", "TORCHFT_WORKER_CHANNEL", "TORCHELASTIC_ERROR_FILE"):
            each["same"]["environment"].pop(variable)
        for variable in ("TORCHELASTIC_RESTART_COUNT", "TORCHFT_WORLD_ROUND"):
            each["same"]["environment"].pop(variable)
    assert warm["same"] == cold["same"]
    assert any(line.endswith(f"]:out {number}") for line in launcher.lines)
    (log,) = tmp_path.glob(f"logs/*/attempt_{number}/0/stderr.log")
    assert log.read_text().startswith(f"err {number}\n")
    expected = f"has ended with exit code {exit_code}"
    assert any(expected in line for line in launcher.lines), launcher.lines
    if end == "raise":
        (error,) = tmp_path.glob(f"logs/*/attempt_{number}/0/error.json")
        assert "a bad batch" in json.loads(error.read_text())["message"]["message"]
        assert not any("warm_start.py" in line for line in log.read_text().splitlines())
        known = "ended by ValueError('a bad batch')"
        assert any(line.endswith(known) for line in launcher.lines), "known at exit"


@pytest.mark.processes
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_a_warm_worker_ends_with_its_agent(death: signal.Signals, tmp_path: Path) -> None:
    options = ("--max-restarts=5", "--warm-start-preload=torch,numpy,nowhere")
    with launched(tmp_path, *options, program=(SCRIPT, str(tmp_path), "wait")) as launcher:
        _, warm, number = cold_and_warm(tmp_path, launcher)
        before = warm["own"]
        os.kill(before["pid"], signal.SIGKILL)
        own = attempt(tmp_path, number + 1, launcher)["own"]
        assert own["parent"] == before["parent"]
        assert len({*own["drawn"], *before["drawn"]}) == 6
        launcher.signal(death)
        launcher.wait()
        eventually(lambda: are_gone([own["pid"], own["parent"]]), 20.0, "all have ended")


@pytest.mark.processes
def test_where_forks_would_hang_the_log_says_why_once_and_workers_start_cold(
    tmp_path: Path,
) -> None:
    """A worker would wait for the threads of the pool in its first larger sum."""
    (tmp_path / "computing.py").write_text(
        "import torch; torch.set_num_threads(2); torch.ones(1 << 20).add_(1)"
    )
    options = ("--max-restarts=40", "--warm-start-preload=computing")
    program = (SCRIPT, str(tmp_path), "wait")
    with launched(tmp_path, *options, program=program, modules=tmp_path) as launcher:

        def reasons() -> list[str]:
            return [line for line in launcher.read_so_far() if "warm start is off" in line]

        left = 2  # workers that are started after that
        for number in itertools.count():
            own = attempt(tmp_path, number, launcher)["own"]
            assert own["parent"] == launcher.pid
            left -= bool(reasons())
            if not left:
                break
            time.sleep(0.5)  # the fork server imports meanwhile, on a machine with time
            os.kill(own["pid"], signal.SIGKILL)
        (reason,) = reasons()
        assert "workers are started cold: preloaded modules have started" in reason
        assert "of native code" in reason


def test_only_python_programs_start_warm() -> None:
    check_command(sys.executable, ["-u", "-m", "module"])
    check_command(sys.executable, ["-u", SCRIPT, "--more"])
    for command in (["-u", str(ROOT)], ["-c", "1"], []):
        with pytest.raises(ConfigError, match="Python scripts and modules only"):
            check_command(sys.executable, command)
    with pytest.raises(ConfigError, match="Python scripts and modules only"):
        check_command("sh", ["-c", "true"])


def test_what_cannot_work_is_refused() -> None:
    assert preload_list(" torch, my.module,") == ("torch", "my.module")
    with pytest.raises(ConfigError, match="names of modules"):
        preload_list("torch,a b")
    with pytest.raises(ConfigError, match="it needs a soft restart policy"):
        LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, warm_start=True)
