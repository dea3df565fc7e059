"""Tests that an interrupted run ends with the same parameters as one that was not, to the last bit:
its trainer is killed, a worker is killed while it writes a checkpoint, all workers are killed."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.checkpoints import same, trained_state
from support.fork_server import LOCAL_PROCESS, Call, Forked
from support.running import eventually, lives
from support.trained import Sharing, shared
from support.trainer_runs import (
    NUM_PASSES,
    NUM_WORKERS,
    STEPS_PER_PASS,
    small_trainer,
    train_to_the_end,
)

from torchft_svc.errors import ConfigError
from torchft_svc.trainer.checkpoint import CheckpointStore

pytestmark = pytest.mark.processes
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def processes() -> Iterator[Sharing]:
    with shared() as backend:
        yield backend


@pytest.fixture(scope="module")
def undisturbed(processes: Sharing, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The state after each pass of a run that nothing happened to."""
    states = {}
    with small_trainer(tmp_path_factory.mktemp("undisturbed"), backend=processes) as trainer:
        for _ in range(NUM_PASSES):
            trainer.train(max_retries=0)
            states[trainer.position.epoch] = trainer.state_dict()
    return states


def trained(state: dict[str, Any]) -> dict[str, Any]:
    """The state without the statistics of BatchNorm.

    Each worker has those of its own part of the data, so those of a lost worker are lost.
    """
    model = {
        name: tensor
        for name, tensor in state["parts"]["model"].items()
        if not name.endswith(("running_mean", "running_var"))
    }
    return {**state, "parts": {**state["parts"], "model": model}}


def newest_step(folder: Path) -> int:
    listed = CheckpointStore(folder).checkpoints()
    return listed[0].position.step if listed else -1


def end_of(process: Forked, number: int) -> list[psutil.Process]:
    """Kill a trainer's process; those that it had started."""
    started = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    process.wait(DEADLINE_S)
    return started


def test_a_trainer_that_was_killed_goes_on_from_its_last_checkpoint(
    tmp_path: Path, processes: Sharing, undisturbed: dict[int, Any]
) -> None:
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    process = Forked(Call(train_to_the_end, (str(folder), 0.1), {}, log, serves=LOCAL_PROCESS))
    try:
        what = "a checkpoint inside of a pass"
        eventually(lambda: newest_step(folder) >= 5, DEADLINE_S, what)
    finally:
        started = end_of(process, signal.SIGKILL)
    assert len(started) >= NUM_WORKERS
    eventually(lambda: not any(map(lives, started)), DEADLINE_S, "its workers end with it")
    with small_trainer(folder, resume="auto", backend=processes) as trainer:
        at = trainer.position
        assert (at.epoch, at.step >= 5, at.step < NUM_PASSES * STEPS_PER_PASS) == (0, True, True)
        result = trainer.train(max_retries=0, checkpoint="auto")
        assert (result["epoch"], result["step"]) == (1, STEPS_PER_PASS)
        assert same(trainer.state_dict(), undisturbed[1])


class _KillerOfWriters(threading.Thread):
    """Kills a worker of ``folder``'s run in the middle of writing a checkpoint, once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="killer of writers", daemon=True)
        self._folder = folder
        self.killed = 0

    def run(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.killed and time.monotonic() < deadline:
            for path in self._folder.glob(".unfinished-*"):
                found = re.search(r"-(\d+)-[0-9a-f]+$", path.name)
                if found and 3 <= newest_step(self._folder) <= STEPS_PER_PASS:
                    os.kill(int(found[1]), signal.SIGKILL)
                    self.killed = int(found[1])
                    return
            time.sleep(0.001)


@pytest.fixture
def killer(tmp_path: Path) -> Iterator[_KillerOfWriters]:
    thread = _KillerOfWriters(tmp_path / "checkpoints")
    yield thread
    thread.join(DEADLINE_S)


def test_losses_and_damage_do_not_change_the_result(
    tmp_path: Path,
    processes: Sharing,
    undisturbed: dict[int, Any],
    killer: _KillerOfWriters,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "checkpoints"
    CheckpointStore(folder).write(trained_state(999))  # of another run
    with small_trainer(folder, backend=processes) as trainer:
        killer.start()
        first = trainer.train(max_retries=3, checkpoint="auto", info={"step_s": 0.05})
        killer.join(DEADLINE_S)
        assert killer.killed, "nobody was killed while it wrote"
        assert (first["epoch"], first["step"]) == (1, STEPS_PER_PASS)
        assert [each.lost_steps for each in trainer.history.incidents] == [0]
        assert not list(folder.glob(f".unfinished-*-{killer.killed}-*"))

        # All are lost, and the newest checkpoint is damaged.
        damaged = Path(CheckpointStore(folder).checkpoints()[0].path)
        part = max(damaged.iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(part, part.stat().st_size - 1)
        for pid in trainer.worker_pids.values():
            os.kill(pid, signal.SIGKILL)
        trainer.train(max_retries=3, checkpoint="auto")
        assert same(trained(trainer.state_dict()), trained(undisturbed[2]))
        assert caplog.text.count(f"{damaged} is skipped") == 1
        assert caplog.text.count("has checkpoints of another run") == 1
        costs = trainer.history.as_dict()
        assert costs["lost_steps"] >= 1
        assert costs["rungs"].keys() == {"restart"}


def test_a_checkpoint_of_another_model_is_refused_before_a_worker_starts(
    tmp_path: Path, processes: Sharing
) -> None:
    with small_trainer(tmp_path / "run", backend=processes) as trainer:
        trainer.train(num_steps=1, checkpoint="auto")
        before = trainer.state_dict()
        saved = trainer.save(tmp_path / "saved")
        with pytest.raises(ConfigError, match="it is not of this model"):
            trainer.load_state_dict({**before, "parts": {"model": {"weight": torch.zeros(1)}}})
        assert same(trainer.state_dict(), before)
    options = {
        "backend": processes,
        "model_creator": lambda config: torch.nn.Linear(8, 1),
        "scheduler_creator": None,
    }
    with small_trainer(tmp_path / "run", resume="auto", **options) as other:
        for begin in (lambda: other.position, lambda: other.train(), lambda: other.load(saved)):
            with pytest.raises(ConfigError, match="it is not of this model"):
                begin()
        assert other.worker_pids == {}
