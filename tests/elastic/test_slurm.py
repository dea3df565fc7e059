"""A replica group as a Slurm job: the runner as a process, with a fake `scontrol` on the PATH."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.files import complete_lines
from support.running import environment

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
BATCH_SCRIPT = ROOT / "deploy" / "slurm" / "group.sbatch"
BASH = shutil.which("bash") or "bash"
WAIT_S = 60.0
# What Slurm's commands do for us: record how they were called, and run a step.
SCONTROL = """#!/bin/sh
echo "$@" >>"$FAKE_SLURM/requeued"
test ! -e "$FAKE_SLURM/refuses" || { echo "Invalid job id" >&2; exit 1; }
"""
SRUN = """#!/bin/sh
echo "$@" >>"$FAKE_SLURM/steps"
env >"$FAKE_SLURM/environment"
exit 93
"""
PROGRESSES = (
    "import os, sys; from torchft_svc.host.progress_file import ProgressFile; "
    "ProgressFile(os.environ['TORCHFT_PROGRESS_FILE']).record_step(int(sys.argv[1])); sys.exit(1)"
)
DRAINS = """
import os, signal, sys, time
def end(*_):
    print("drained with", os.environ["TORCHFT_GRACE_SEC"], flush=True)
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, end)
print("trains", flush=True)
time.sleep(600)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with Slurm's commands in ``bin``, and what they were called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    return tmp_path


def variables(cluster: Path, **more: str) -> dict[str, str]:
    return environment(
        PATH=f"{cluster / 'bin'}:{os.environ['PATH']}",
        PYTHONPATH=str(ROOT),
        FAKE_SLURM=str(cluster),
        HOME=str(cluster),
        **{"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "torchft", **more},
    )


Start = Callable[..., "subprocess.Popen[str]"]


def start(cluster: Path, *options: str, command: list[str], **more: str) -> subprocess.Popen[str]:
    runner = ["-m", "torchft_svc.elastic.slurm", f"--state-dir={cluster / 'state'}", *options]
    return subprocess.Popen(
        [sys.executable, *runner, "--", *command],
        env=variables(cluster, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    with process:
        _, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, errors


def requeued(cluster: Path) -> list[str]:
    return complete_lines(cluster / "requeued")


@pytest.mark.parametrize(
    ("command", "status", "is_requeued"),
    [
        ("exit 0", 0, False),
        ("exit 93", 93, False),
        ("exit 1", 1, True),
        ("kill -9 $$", 137, True),
    ],
)
def test_the_status_of_the_group_decides(
    command: str, status: int, is_requeued: bool, cluster: Path
) -> None:
    code, errors = ended(start(cluster, command=["sh", "-c", command]))
    assert code == status, errors
    assert requeued(cluster) == (["requeue 17"] if is_requeued else [])


def test_another_status_may_mean_it(cluster: Path) -> None:
    more = {"TORCHFT_DO_NOT_REQUEUE_EXIT_CODE": "44"}
    assert ended(start(cluster, command=["sh", "-c", "exit 44"], **more))[0] == 44
    assert not requeued(cluster)
    ended(start(cluster, command=["sh", "-c", "exit 93"], **more))
    assert requeued(cluster) == ["requeue 17"]


@pytest.mark.parametrize("status", [0, 1])
def test_a_preempted_group_is_drained_and_requeued(status: int, cluster: Path) -> None:
    more = {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "3"}
    command = [sys.executable, "-c", DRAINS, str(status)]
    process = start(cluster, "--grace=45", command=command, **more)
    assert process.stdout is not None
    assert process.stdout.readline() == "trains\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "drained with 45\n"
    code, errors = ended(process)
    assert code == status, errors
    assert requeued(cluster) == ["requeue 16_3"], "an element of an array has its own name"


def test_restarts_that_get_nowhere_are_counted_over_requeues(cluster: Path) -> None:
    def fails_at(step: int) -> int:
        command = [sys.executable, "-c", PROGRESSES, str(step)]
        return ended(start(cluster, "--max-restarts-without-progress=2", command=command))[0]

    assert [fails_at(step) for step in (5, 5, 6, 6)] == [1] * 4
    assert len(requeued(cluster)) == 4
    assert fails_at(6) == 93
    assert len(requeued(cluster)) == 4


def test_requeues_may_be_limited(cluster: Path) -> None:
    options = "--max-requeues=2"
    command = ["sh", "-c", "exit 1"]
    assert ended(start(cluster, options, command=command, SLURM_RESTART_COUNT="1"))[0] == 1
    assert len(requeued(cluster)) == 1
    code, errors = ended(start(cluster, options, command=command, SLURM_RESTART_COUNT="2"))
    assert code == 1
    assert "it was requeued 2 times, which is the limit" in errors
    assert len(requeued(cluster)) == 1


def test_a_controller_that_refuses_is_named(cluster: Path) -> None:
    (cluster / "refuses").touch()
    code, errors = ended(start(cluster, command=["sh", "-c", "exit 5"]))
    assert code == 5
    assert "job 17 is not requeued: scontrol: Invalid job id" in errors


@pytest.mark.parametrize(
    ("options", "more", "sentence"),
    [
        ([], {"SLURM_JOB_ID": ""}, "start this in a batch script"),
        (["--max-restarts-without-progress=0"], {}, "use 1 or more"),
        (["--state-dir=/dev/null/x"], {}, "--state-dir='/dev/null/x' cannot work"),
    ],
)
def test_what_cannot_work_is_not_requeued(
    options: list[str], more: dict[str, str], sentence: str, cluster: Path
) -> None:
    code, errors = ended(start(cluster, *options, command=["true"], **more))
    assert (code, sentence in errors) == (93, True), errors
    assert not requeued(cluster)


def test_the_batch_script_names_groups_and_ends_with_the_verdict(cluster: Path) -> None:
    done = subprocess.run(
        [BASH, str(BATCH_SCRIPT), "train.py", "--lr", "0.1"],
        env=variables(
            cluster,
            TORCHFT_LIGHTHOUSE="lighthouse:29510",
            SLURM_ARRAY_JOB_ID="16",
            SLURM_ARRAY_TASK_ID="2",
            SLURM_NNODES="2",
        ),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 93, done.stderr
    (step,) = (cluster / "steps").read_text().splitlines()
    assert step.startswith("--kill-on-bad-exit=1 torchft-run --nnodes 2 ")
    assert "--rdzv-id torchft-16-2 train.py --lr 0.1" in step
    environment_of_step = (cluster / "environment").read_text().splitlines()
    for line in (
        "REPLICA_GROUP_ID=2",
        "TORCHFT_JOB_ID=torchft-16",
        "TORCHFT_GRACE_SEC=60",
        "TORCHFT_DO_NOT_REQUEUE_EXIT_CODE=93",
        f"TORCHFT_PROGRESS_FILE={cluster}/.torchft-slurm/16_2",
    ):
        assert line in environment_of_step
    assert not requeued(cluster)


def test_the_batch_script_needs_a_lighthouse(cluster: Path) -> None:
    done = subprocess.run(
        [BASH, str(BATCH_SCRIPT), "train.py"],
        env=variables(cluster, TORCHFT_LIGHTHOUSE=""),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 1
    assert "the address of the lighthouse" in done.stderr
