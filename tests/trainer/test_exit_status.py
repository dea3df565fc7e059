"""The exit status of a program whose trainer gives up, for a scheduler that has asked for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.running import environment

from torchft_svc.env import VERDICT_VARIABLE

pytestmark = pytest.mark.processes
PROGRAM = """
import os, signal, sys
from torchft_svc.trainer import Trainer

def train(context):
    if context.config["kind"] == "raises":
        raise ValueError("a sample that cannot be read")
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    settings = {"config": {"kind": sys.argv[1]}, "first_pause_s": 0.1}
    with Trainer(train, max_restarts_without_progress=2, **settings) as trainer:
        trainer.train(max_retries=int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("kind", "max_retries", "status", "sentence"),
    [
        ("raises", 5, 93, "ValueError: a sample that cannot be read"),
        ("dies", -1, 93, "2 restarts in a row have not got beyond step 0"),
        ("raises", 0, 1, "ValueError: a sample that cannot be read"),
    ],
)
def test_a_trainer_that_gives_up_says_whether_a_restart_would_help(
    kind: str, max_retries: int, status: int, sentence: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(max_retries)],
        env=environment(OMP_NUM_THREADS="1", **{VERDICT_VARIABLE: "93"}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, sentence in done.stderr) == (status, True), done.stderr
