"""A trainer that is killed, or that nobody shuts down, leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from support.fork_server import LOCAL_PROCESS
from support.running import TESTS, environment, eventually, is_alive
from support.warm import Warm

pytestmark = pytest.mark.processes

PROGRAM = """
import sys, tempfile
from support.trained import data, model, optimizer
from torch import nn
from torchft_svc.trainer import Trainer

tempfile.tempdir = sys.argv[1]
trainer = Trainer(
    model_creator=model, data_creator=data, optimizer_creator=optimizer, loss_creator=nn.MSELoss,
    num_workers=2, batch_size=4, fault_tolerance=sys.argv[2],
)
trainer.train()
print(*trainer._backend._scratch.folders, flush=True)
if sys.argv[3] == "wait":
    while True:
        trainer.train()
"""


def start(folder: Path, mode: str, what: str) -> Warm:
    """Start a program that has imported torch; the fork server of its workers only to be killed."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return Warm(
        [sys.executable, str(program), str(folder), mode, what],
        text=True,
        env=environment(PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent)])),
        serves=LOCAL_PROCESS if what == "wait" else "",
    )


@pytest.mark.parametrize("mode", ["restart", "per-step"])
def test_workers_end_with_a_trainer_that_is_killed(tmp_path: Path, mode: str) -> None:
    with start(tmp_path, mode, "wait") as program:
        assert program.stdout is not None
        folders = program.stdout.readline().split()
        below = psutil.Process(program.pid).children(recursive=True)
        assert len(below) >= 3  # the fork server and two workers
        program.send_signal(signal.SIGKILL)
    eventually(lambda: not any(is_alive(process.pid) for process in below))
    eventually(lambda: not any(Path(folder).exists() for folder in folders))
    assert folders


def test_a_program_that_forgets_to_shut_down_ends(tmp_path: Path) -> None:
    with start(tmp_path, "restart", "end") as program:
        assert program.stdout is not None
        folders = program.stdout.readline().split()
        assert program.wait(60) == 0
    assert not any(Path(folder).exists() for folder in folders)
