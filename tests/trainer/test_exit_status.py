"""The exit status of a program whose trainer gives up, for a scheduler that has asked for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.fork_server import LOCAL_PROCESS
from support.programs import Program

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
    kind: str, max_retries: int, status: int, sentence: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), kind, str(max_retries)]
    with Program(command, {VERDICT_VARIABLE: "93"}, warm=True, serves=LOCAL_PROCESS) as trainer:
        assert trainer.wait() == status, trainer.lines
        assert any(sentence in line for line in trainer.lines), trainer.lines
