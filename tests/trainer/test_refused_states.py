"""States that workers cannot begin with: whole checkpoints that torch cannot load, those of another
program, and states in memory that somebody has deleted."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.running import eventually
from support.trained import (
    BATCH_SIZE,
    NUM_SAMPLES,
    Faults,
    Sharing,
    data,
    model,
    optimizer,
    shared,
    train,
)
from torch import nn

from torchft_svc.errors import CheckpointError, ConfigError
from torchft_svc.trainer import TrainContext, Trainer
from torchft_svc.trainer.checkpoint import CheckpointStore
from torchft_svc.trainer.checkpoint_files import MANIFEST, _checksum, _digest

pytestmark = pytest.mark.processes

STEPS = NUM_SAMPLES // (2 * BATCH_SIZE)


@pytest.fixture(scope="module")
def processes() -> Iterator[Sharing]:
    with shared() as backend:
        yield backend


def creators(processes: Sharing, **options: Any) -> Trainer:
    return Trainer(
        model_creator=model,
        data_creator=data,
        optimizer_creator=options.pop("optimizer_creator", optimizer),
        loss_creator=nn.MSELoss,
        backend=processes,
        num_workers=2,
        batch_size=BATCH_SIZE,
        **options,
    )


def function(processes: Sharing, folder: Path, epochs: int = 1, **options: Any) -> Trainer:
    config = {"faults": Faults(folder), "epochs": epochs}
    program = options.pop("program", train)
    return Trainer(program, config=config, backend=processes, num_workers=2, **options)


def make_unloadable(path: str) -> None:
    """A checkpoint whose files are as its manifest says, but torch cannot read them."""
    folder = Path(path)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / ".metadata").write_bytes(b"of another release")
    size = (folder / ".metadata").stat().st_size
    entry = {"bytes": size, "xxh3_64": _digest(folder / ".metadata")}
    manifest["files"][".metadata"] = entry
    del manifest["checksum"]
    manifest["checksum"] = _checksum(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def kill_all(processes: Sharing) -> None:
    for pid in processes.pids.values():
        os.kill(pid, signal.SIGKILL)


def test_a_checkpoint_that_torch_cannot_load_is_skipped(
    processes: Sharing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    with creators(processes, checkpoint_dir=folder) as trainer:
        for _ in range(2):
            trainer.train(max_retries=0, checkpoint="auto")
        store = CheckpointStore(folder)
        eventually(lambda: len(store.checkpoints()) == 2)  # the last one may be under way
        newest, before = store.checkpoints()
        make_unloadable(newest.path)
        kill_all(processes)
        found = trainer.train(max_retries=1, checkpoint="auto")
        assert (found["epoch"], found["retries"]) == (3, 1)
        (incident,) = found["incidents"]
        assert incident.source == "checkpoint"
        assert (before.position.step, incident.lost_steps) == (0, 2 * STEPS)
        assert caplog.text.count(f"{newest.path} is skipped") == 1


def test_a_run_is_resumed_from_the_newest_checkpoint_that_can_be_loaded(
    processes: Sharing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    with creators(processes, checkpoint_dir=folder) as trainer:
        for _ in range(3):
            trainer.train(max_retries=0, checkpoint="auto")
    newest, before = CheckpointStore(folder).checkpoints()[:2]
    make_unloadable(newest.path)
    with creators(processes, checkpoint_dir=folder, resume="auto") as trainer:
        assert before.position.step == STEPS
        assert trainer.train(max_retries=0, checkpoint="auto")["step"] == 2 * STEPS
        assert "another run" not in caplog.text
        with pytest.raises(CheckpointError, match="cannot be read: UnpicklingError"):
            trainer.load(newest.path)


def other_optimizer(net: nn.Module, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [each]} for each in net.parameters()], lr=0.05)


def train_another(context: TrainContext) -> int:
    """A trainer with a model that no checkpoint is of."""
    net = nn.Linear(3, 1)
    context.prepare(net, optimizer(net, {}))
    return 0


@pytest.mark.parametrize("kind", ["creators", "function"])
def test_checkpoints_of_another_program_are_an_error_at_once(
    processes: Sharing, tmp_path: Path, kind: str
) -> None:
    """Workers alone can notice it; nothing begins at the start instead."""
    folder = tmp_path / "checkpoints"
    with creators(processes, checkpoint_dir=folder) as trainer:
        for _ in range(2):
            trainer.train(max_retries=0, checkpoint="auto")
        saved = trainer.save()
    options: dict[str, Any] = {"checkpoint_dir": folder, "resume": "auto"}
    if kind == "creators":
        other = creators(processes, optimizer_creator=other_optimizer, **options)
        reason = "SGD.*does not fit"
    else:
        other = function(processes, tmp_path, program=train_another, **options)
        reason = "it is not of this model"
    with other:
        for _ in range(2):
            with pytest.raises(ConfigError, match=reason):
                other.train(max_retries=-1, checkpoint="auto")
        assert not other.history.incidents
        other.load(saved)
        with pytest.raises(ConfigError, match=reason):
            other.train(max_retries=-1)
    assert len(CheckpointStore(folder).checkpoints()) == 3


def test_a_training_function_goes_on_from_the_newest_checkpoint_that_fits(
    processes: Sharing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    with function(processes, tmp_path, checkpoint_dir=folder) as trainer:
        trainer.train(max_retries=0, checkpoint="auto")
        own = trainer.save()
    options: dict[str, Any] = {"optimizer_creator": other_optimizer}
    with creators(processes, checkpoint_dir=folder, **options) as trainer:
        trainer.train(max_retries=0)
        other = trainer.save()
    with function(processes, tmp_path, 2, checkpoint_dir=folder, resume="auto") as trainer:
        found = trainer.train(max_retries=0, checkpoint="auto")
        assert (found["result"], found["retries"]) == (2 * STEPS, 0)
        assert f"{other} is skipped" in caplog.text
        assert f"{own} is skipped" not in caplog.text


def delete_states(processes: Sharing) -> None:
    """Delete files as a cleaner of old files does."""
    for folder in processes._scratch.folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_held_state_was_deleted(
    processes: Sharing, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_checkpoint: bool
) -> None:
    folder = tmp_path / "checkpoints"
    with creators(processes, checkpoint_dir=folder) as trainer:
        if has_checkpoint:
            trainer.train(max_retries=0, checkpoint="auto")
            eventually(lambda: bool(CheckpointStore(folder).checkpoints()))
        trainer.train(max_retries=0)
        delete_states(processes)
        assert trainer.state_dict()["position"]["epoch"] == 1 + has_checkpoint  # of a worker
        delete_states(processes)
        kill_all(processes)
        found = trainer.train(max_retries=1)
        assert found["incidents"][0].source == ("checkpoint" if has_checkpoint else "start")
        assert found["retries"] == 1
        assert "the state that the trainer holds cannot be used" in caplog.text


def test_workers_offer_their_states_where_the_folder_was_deleted(
    processes: Sharing, tmp_path: Path
) -> None:
    faults = Faults(tmp_path, (STEPS + 2, 1, "kill"))
    config = {"faults": faults, "epochs": 2}
    with Trainer(train, config=config, backend=processes, num_workers=2) as trainer:
        delete_states(processes)
        found = trainer.train(max_retries=1)
        assert found["incidents"][0].source == "peer"
        assert found["result"] == 2 * STEPS
        eventually(lambda: any(Path(each).exists() for each in processes._scratch.folders))
