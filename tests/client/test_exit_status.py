"""The exit status of trainers that an error ends, where a scheduler has asked for a verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.running import environment, eventually, lighthouse_process

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


def trainer(*words: str, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *words],
        env=environment(
            OMP_NUM_THREADS="1",
            PYTHONPATH=f"{Path(__file__).parent.parent}:{os.environ.get('PYTHONPATH', '')}",
            **variables,
        ),
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_model_that_differs_is_not_started_again(tmp_path: Path) -> None:
    record, progress = tmp_path / "a.jsonl", tmp_path / "progress"
    with lighthouse_process("--min-replicas=1") as lighthouse:
        place = {"TORCHFT_LIGHTHOUSE": lighthouse.address, VERDICT_VARIABLE: "93"}
        first = trainer(
            TRAINS,
            "",
            str(record),
            variables={**place, "REPLICA_GROUP_ID": "a", PROGRESS_VARIABLE: str(progress)},
        )
        with first:
            eventually(
                lambda: record.exists() and len(record.read_text().splitlines()) > 3,
                START_S,
                "it trains",
            )
            second = trainer(
                TRAINS,
                "a bigger model",
                str(tmp_path / "b.jsonl"),
                variables={**place, "REPLICA_GROUP_ID": "b"},
            )
            _, errors = second.communicate(timeout=START_S)
            first.kill()
        assert second.returncode == 93, errors
        assert "GroupDiffers" in errors
        assert "a restart cannot mend this error: exit status 93" in errors
    reached = ProgressFile(progress).step
    assert reached is not None
    committed = record.read_text().count('"committed": true')
    assert abs(reached - committed) <= 1  # it was killed between two lines


def test_settings_that_cannot_work_are_not_tried_again() -> None:
    done = trainer(CANNOT_WORK, variables={VERDICT_VARIABLE: "93"})
    unasked = trainer(CANNOT_WORK, variables={})
    _, errors = done.communicate(timeout=START_S)
    unasked.communicate(timeout=START_S)
    assert (done.returncode, unasked.returncode) == (93, 1), errors
    assert "min_replicas=-1 cannot work" in errors


def test_a_machine_that_is_not_healthy_is_left_for_another_one() -> None:
    check = {"TORCHFT_HEALTH_CHECK": "sh -c 'echo no GPU; exit 2'", VERDICT_VARIABLE: "93"}
    program = "from torchft_svc import Manager; Manager(lighthouse_addr='127.0.0.1:1')"
    ill = trainer(program, variables=check)
    # One worker of each machine looks; this one waits for a store that nobody opens.
    place = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}
    other = trainer(
        program,
        variables={
            **check,
            **place,
            "TORCHFT_CONNECT_TIMEOUT_SEC": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        },
    )
    _, errors = ill.communicate(timeout=START_S)
    _, others = other.communicate(timeout=START_S)
    assert ill.returncode == 1, "another machine may be healthy"
    assert "HealthCheckFailed: this machine does not join: the health check" in errors
    assert "ended with status 2: no GPU" in errors
    assert (other.returncode, "health check" in others) == (1, False), others


def test_a_drained_trainer_ends_with_the_status_that_is_named(tmp_path: Path) -> None:
    """Kubernetes takes status 0 for the end of the training."""
    record = tmp_path / "a.jsonl"
    with lighthouse_process("--min-replicas=1") as lighthouse:
        place = {"TORCHFT_LIGHTHOUSE": lighthouse.address, "TORCHFT_DRAINED_EXIT_CODE": "143"}
        drained = trainer(TRAINS, "", str(record), variables={**place, "REPLICA_GROUP_ID": "a"})
        with drained:
            eventually(record.exists, START_S, "it trains")
            drained.terminate()
            _, errors = drained.communicate(timeout=START_S)
    assert drained.returncode == 143, errors
