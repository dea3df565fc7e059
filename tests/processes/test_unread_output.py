"""Tests that whoever stops reading what our processes write does not stop the job."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from support.fork_server import SERVICES, TORCH
from support.running import (
    ROOT,
    Line,
    environment,
    lighthouse_process,
    line_to,
    members,
    steady_address,
)
from support.stuck import StuckPipe, stuck_pipe
from support.warm import Warm

pytestmark = pytest.mark.processes

# A program that imports torch, or some of them one after the other.
RUN_S = 60.0
# Both groups come when the test lets them.
AT_ONCE = "--startup-wait-ms=0"
TRAINER = """
import logging, os, sys, torch
from torchft_svc import Manager
manager = Manager(state_dict=dict, load_state_dict=print, replica_id="a")
for step in range(3):
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    assert manager.should_commit()
    for number in range(2000):  # of ever new kinds
        logging.getLogger("torchft_svc.noise").warning(f"{step} {number % 150}")
print("trained", flush=True)
manager.shutdown()
"""
WORKER = """
import os, sys
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(line_buffering=True)  # in whole lines, as the launcher copies lines
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for number in range(5000):
    print(f"attempt {attempt} line {number}", file=sys.stdout if number % 2 else sys.stderr)
sys.exit(attempt == 0)
"""


def run(pipe: StuckPipe, *arguments: str, loaded: str = TORCH, **variables: str) -> Warm:
    """A process that was forked from one which has imported torch, or the services."""
    return Warm(
        [sys.executable, *arguments],
        stdout=pipe.writing,
        stderr=pipe.writing,
        cwd=ROOT,
        env=environment(**variables),
        loaded=loaded,
    )


Started = TypeVar("Started", Warm, subprocess.Popen[bytes])


@contextlib.contextmanager
def ended(process: Started) -> Iterator[Started]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def both_join(line: Line, step: int) -> None:
    asked = [line.quorum(f"{name}:1", step=step) for name in "ab"]
    for each in asked:
        assert members(each.result()) == ["a:1", "b:1"]


@pytest.mark.parametrize("tick", [[], ["--quorum-tick-ms=100"]])
def test_a_lighthouse_whose_log_nobody_reads_forms_quorums(tick: list[str]) -> None:
    address = steady_address()
    flags = [f"--bind={address}", "--min-replicas=2", "--log-level=info", *tick, AT_ONCE]
    with stuck_pipe() as pipe:
        command = ["-m", "torchft_svc.lighthouse_server", *flags]
        with ended(run(pipe, *command, loaded=SERVICES)) as lighthouse:
            with line_to(address) as line:
                both_join(line, 0)
                for number in range(300):
                    line.leave(f"stranger{number}:1", "it" * number)
                both_join(line, 1)
                assert line.askers() == set()
            lighthouse.terminate()
            assert lighthouse.wait(RUN_S) == 0
        assert "lighthouse listening on" not in pipe.read_rest(), "it was never stuck"


def test_the_log_of_a_lighthouse_goes_on_when_it_is_read_again() -> None:
    address = steady_address()
    with stuck_pipe() as pipe:
        command = ["-m", "torchft_svc.lighthouse_server", f"--bind={address}", AT_ONCE]
        lighthouse = run(pipe, *command, "--min-replicas=2", loaded=SERVICES)
        with ended(lighthouse), line_to(address) as line:
            both_join(line, 0)
            text = pipe.read("quorum")
            assert "lighthouse listening on" in text + pipe.read("\n")


def test_a_trainer_and_its_manager_whose_output_nobody_reads_train(tmp_path: Path) -> None:
    """The trainer and its manager share the pipe, as with a shell's ``2>&1 | less``."""
    (tmp_path / "trainer.py").write_text(TRAINER.replace('print("trained", flush=True)', MARK))
    mark = tmp_path / "trained"
    with lighthouse_process() as lighthouse, stuck_pipe() as pipe:
        variables = {
            "TORCHFT_LIGHTHOUSE": lighthouse.address,
            "MARK": str(mark),
            "TORCHFT_LOG": "debug",
        }
        with ended(run(pipe, str(tmp_path / "trainer.py"), **variables)) as trainer:
            assert trainer.wait(RUN_S) == 0
        assert mark.exists()


MARK = 'open(os.environ["MARK"], "w").close()'


def test_a_trainer_without_standard_error_trains(tmp_path: Path) -> None:
    """What it opens first gets the number of the error output, and must not get its lines."""
    program = "import os; spoiled = open('spoiled', 'w')\nassert spoiled.fileno() == 2\n" + TRAINER
    (tmp_path / "trainer.py").write_text(program)
    with lighthouse_process() as lighthouse:
        done = subprocess.run(
            ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "trainer.py"],
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            env=environment(TORCHFT_LIGHTHOUSE=lighthouse.address, TORCHFT_LOG="debug"),
            timeout=RUN_S,
            check=False,
        )
    assert done.stdout == b"trained\n"
    assert done.returncode == 0
    assert (tmp_path / "spoiled").read_text() == ""


def test_a_trainer_whose_reader_is_gone_trains(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    with lighthouse_process() as lighthouse:
        trainer = Warm(
            [sys.executable, str(tmp_path / "trainer.py")],
            env=environment(TORCHFT_LIGHTHOUSE=lighthouse.address, TORCHFT_LOG="debug"),
        )
        with ended(trainer):
            trainer.stderr.close()
            assert trainer.stdout.read() == b"trained\n"
            assert trainer.wait(RUN_S) == 0
            trainer.stdout.close()


@pytest.mark.parametrize("policy", ["hard", "soft"])
def test_a_launcher_whose_output_nobody_reads_restarts_its_workers(
    tmp_path: Path, policy: str
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    flags = [f"--restart-policy={policy}", "--max-restarts=1", "--standalone", "--tee=3"]
    command = ["-m", "torchft_svc.elastic.run", *flags, f"--log-dir={tmp_path / 'logs'}"]
    with stuck_pipe() as pipe:
        # Started as users do: it replaces the streams of its start, which a fork has as well.
        launcher = subprocess.Popen(
            [sys.executable, *command, str(tmp_path / "worker.py")],
            stdin=subprocess.DEVNULL,
            stdout=pipe.writing,
            stderr=pipe.writing,
            cwd=ROOT,
            env=environment(),
        )
        with ended(launcher) as agent:
            assert agent.wait(RUN_S) == 0
        logs = sorted((tmp_path / "logs").rglob("stdout.log"))
        assert [len(log.read_text().splitlines()) for log in logs] == [2500, 2500]


@pytest.mark.parametrize("policy", ["hard", "soft"])
def test_a_launcher_loses_no_line_of_a_worker_while_somebody_reads(
    tmp_path: Path, policy: str
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = ["-m", "torchft_svc.elastic.run", "--standalone", "--tee=3", "--max-restarts=1"]
    command += [f"--restart-policy={policy}", str(tmp_path / "worker.py")]
    launcher = Warm(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment(),
    )
    with ended(launcher):
        output = launcher.stdout.read().decode()
        launcher.stdout.close()
        assert launcher.wait(RUN_S) == 0, output
    if policy == "hard":  # torch's copy repeats its header inside of a line that is being written
        output = re.sub(r"(?<=[^\n])\[default0\]:", "", output)
    lines = [line.partition(":")[2] for line in output.splitlines()]
    attempts = [line for line in lines if line.startswith("attempt")]
    assert sorted(attempts) == sorted(
        f"attempt {a} line {n}" for a in range(2) for n in range(5000)
    )
