"""The exit status of trainers that an error ends, where a scheduler has asked for a verdict."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest
from support.files import complete_lines
from support.programs import Program
from support.running import ROOT, TESTS, eventually, lighthouse_process

from torchft_svc.env import PROGRESS_VARIABLE, VERDICT_VARIABLE
from torchft_svc.host.progress_file import ProgressFile

pytestmark = pytest.mark.processes
START_S = 60.0
TRAINS = """
import sys
from pathlib import Path
from support.scripts import unlike_trainer
unlike_trainer.run(sys.argv[1], Path(sys.argv[2]))
"""
CANNOT_WORK = "from torchft_svc import Manager; Manager(min_replicas=-1)"


class Start(Protocol):
    """Starts a trainer: the text of its program, its arguments, its variables."""

    def __call__(self, text: str, *words: str, variables: Mapping[str, str]) -> Program: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Trainers that have imported torch before they are started; they end with the test."""
    with ExitStack() as stack:

        def start(text: str, *words: str, variables: Mapping[str, str]) -> Program:
            file = tmp_path / "program.py"
            file.write_text(text)
            paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
            command = [sys.executable, str(file), *words]
            return stack.enter_context(Program(command, {**paths, **variables}, warm=True))

        yield start


def ended(program: Program) -> tuple[int, str]:
    """The exit status of a trainer, and what it has printed."""
    return program.wait(START_S), "\n".join(program.lines)


def test_a_model_that_differs_is_not_started_again(start: Start, tmp_path: Path) -> None:
    record, progress = tmp_path / "a.jsonl", tmp_path / "progress"
    with lighthouse_process("--min-replicas=1") as lighthouse:
        place = {"TORCHFT_LIGHTHOUSE": lighthouse.address, VERDICT_VARIABLE: "93"}
        first = start(
            TRAINS,
            "",
            str(record),
            variables={**place, "REPLICA_GROUP_ID": "a", PROGRESS_VARIABLE: str(progress)},
        )
        eventually(
            lambda: len(complete_lines(record)) > 3,
            START_S,
            "it trains",
        )
        second = start(
            TRAINS,
            "a bigger model",
            str(tmp_path / "b.jsonl"),
            variables={**place, "REPLICA_GROUP_ID": "b"},
        )
        status, output = ended(second)
        first.signal(signal.SIGKILL)
        first.wait(START_S)
        assert status == 93, output
        assert "GroupDiffers" in output
        assert "a restart cannot mend this error: exit status 93" in output
    reached = ProgressFile(progress).step
    assert reached is not None
    committed = record.read_text().count('"committed": true')
    assert abs(reached - committed) <= 1  # it was killed between two lines


def test_settings_that_cannot_work_are_not_tried_again(start: Start) -> None:
    status, output = ended(start(CANNOT_WORK, variables={VERDICT_VARIABLE: "93"}))
    unasked, _ = ended(start(CANNOT_WORK, variables={}))
    assert (status, unasked) == (93, 1), output
    assert "min_replicas=-1 cannot work" in output


def test_a_machine_that_is_not_healthy_is_left_for_another_one(start: Start) -> None:
    check = {"TORCHFT_HEALTH_CHECK": "sh -c 'echo no GPU; exit 2'", VERDICT_VARIABLE: "93"}
    program = "from torchft_svc import Manager; Manager(lighthouse_addr='127.0.0.1:1')"
    ill = start(program, variables=check)
    # One worker of each machine looks; this one waits for a store that nobody opens.
    place = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}
    other = start(
        program,
        variables={
            **check,
            **place,
            "TORCHFT_CONNECT_TIMEOUT_SEC": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        },
    )
    status, output = ended(ill)
    other_status, other_output = ended(other)
    assert status == 1, "another machine may be healthy"
    assert "HealthCheckFailed: this machine does not join: the health check" in output
    assert "ended with status 2: no GPU" in output
    assert (other_status, "health check" in other_output) == (1, False), other_output


def test_a_drained_trainer_ends_with_the_status_that_is_named(start: Start, tmp_path: Path) -> None:
    """Kubernetes takes status 0 for the end of the training."""
    record = tmp_path / "a.jsonl"
    with lighthouse_process("--min-replicas=1") as lighthouse:
        place = {"TORCHFT_LIGHTHOUSE": lighthouse.address, "TORCHFT_DRAINED_EXIT_CODE": "143"}
        drained = start(TRAINS, "", str(record), variables={**place, "REPLICA_GROUP_ID": "a"})
        eventually(record.exists, START_S, "it trains")
        drained.signal(signal.SIGTERM)
        status, output = ended(drained)
    assert status == 143, output
