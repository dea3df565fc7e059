"""Tests that checkpoints are whole or not there, and that damaged ones are skipped."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import StackSummary

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checkpoints import large_state, same, trained_state, write_without_end
from support.fork_server import Call, Forked
from support.running import eventually
from torch.distributed.checkpoint.api import CheckpointException

from torchft_svc.errors import CheckpointError, ConfigError
from torchft_svc.trainer import checkpoint as module
from torchft_svc.trainer import checkpoint_tensors
from torchft_svc.trainer.checkpoint import (
    Checkpoint,
    CheckpointStore,
    CheckpointWriter,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from torchft_svc.trainer.checkpoint_files import MANIFEST
from torchft_svc.trainer.messages import Position
from torchft_svc.trainer.state import TrainingState

# Of a process that has ended: ids are smaller.
_NO_PROCESS = (1 << 22) + 7


@pytest.fixture(params=["local", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store where the file system renames folders, and one where it does not."""
    if request.param == "local":
        yield str(tmp_path / "checkpoints")
        return
    root = f"/{uuid.uuid4().hex}"
    yield f"memory:/{root}/checkpoints"
    files = fsspec.filesystem("memory")
    if files.exists(root):
        files.rm(root, recursive=True)


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.position.step for checkpoint in store.checkpoints()]


def test_a_checkpoint_comes_back_to_the_last_bit(directory: str) -> None:
    store, state = CheckpointStore(directory), trained_state(step=12)
    written = store.write(state)
    assert written.position == state.position
    assert store.newest_good() == written
    assert same(load_checkpoint(written.path), state)


def test_torch_reads_the_model_of_a_checkpoint(tmp_path: Path) -> None:
    state = trained_state(step=2)
    path = CheckpointStore(tmp_path).write(state).path
    model = trained_state(step=3).parts["model"]
    dcp.load({"model": model}, checkpoint_id=path)
    assert same(model, state.parts["model"])


def test_a_state_without_tensors_is_stored(tmp_path: Path) -> None:
    state = TrainingState(position=Position(step=4), parts={"mine": {"lines": 7}})
    assert load_checkpoint(CheckpointStore(tmp_path).write(state).path) == state


def test_tensors_of_every_shape_are_stored(tmp_path: Path) -> None:
    weight = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "turned": weight.permute(2, 0, 1),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "half": weight.bfloat16(),
        "flags": weight > 3,
        "complex": torch.randn(2, dtype=torch.complex64).conj(),
        "part": weight[:, 1],
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
    }
    state = TrainingState(position=Position(), parts={"mine": tensors})
    found = load_checkpoint(CheckpointStore(tmp_path).write(state).path).parts["mine"]
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor.resolve_conj()), name
    assert found["a"]["b"].item() == 0


def test_an_empty_directory_has_no_checkpoint(directory: str) -> None:
    store = CheckpointStore(directory)
    assert store.checkpoints() == []
    assert store.newest_good() is None
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        find_checkpoint(directory)


def test_the_last_few_are_kept_in_the_order_of_writing(directory: str) -> None:
    """A run that returns to an older state writes smaller steps after larger ones."""
    store = CheckpointStore(directory, keep_last=2)
    for step in (10, 20, 5, 8):
        store.write(trained_state(step))
    assert steps(store) == [8, 5]
    newest = store.newest_good()
    assert newest is not None
    assert newest.position.step == 8


def _flip(folder: Path) -> None:
    """One bit of the largest file."""
    path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(folder: Path) -> None:
    path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size - 1)


def _lose_a_file(folder: Path) -> None:
    max(folder.iterdir(), key=lambda path: path.stat().st_size).unlink()


def _change_the_manifest(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["position"]["step"] += 1
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _cut_the_manifest(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 20)


def _lose_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize(
    "damage",
    [_flip, _cut, _lose_a_file, _change_the_manifest, _cut_the_manifest, _lose_the_manifest],
)
def test_a_damaged_checkpoint_is_skipped_with_one_warning(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    older, newer = (store.write(trained_state(step)) for step in (1, 2))
    damage(Path(newer.path))
    with pytest.raises(CheckpointError, match=newer.path):
        load_checkpoint(newer.path)
    for _ in range(3):
        assert store.newest_good() == older
    lines = [record.getMessage() for record in caplog.records]
    assert [newer.path in line for line in lines if "is skipped" in line] == [True]
    assert find_checkpoint(tmp_path) == older


def test_a_damaged_checkpoint_on_a_remote_file_system_is_skipped() -> None:
    root = f"/{uuid.uuid4().hex}"
    store = CheckpointStore(f"memory:/{root}")
    older, newer = (store.write(trained_state(step)) for step in (1, 2))
    files = fsspec.filesystem("memory")
    path = next(path for path in files.find(newer.path) if path.endswith(".distcp"))
    files.pipe_file(path, files.cat_file(path)[:-1] + b"?")
    assert store.newest_good() == older
    files.rm(root, recursive=True)


def test_a_checkpoint_that_could_not_be_read_is_not_tried_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    older, newer = (store.write(trained_state(step)) for step in (1, 2))
    store.reject(newer.path, "a worker could not load it")
    assert store.newest_good() == older


def test_checkpoints_of_another_run_can_be_left_out(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    older, newer = (store.write(trained_state(step)) for step in (1, 2))
    assert store.newest_good({newer.path}) == older
    assert store.newest_good({older.path, newer.path}) is None


def test_paths_hold_for_processes_with_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("mine")
    written, saved = store.write(trained_state(1)), save_checkpoint("best", trained_state(2))
    assert store.directory == str(tmp_path / "mine")
    assert Path(written.path).parent == tmp_path / "mine"
    assert (
        find_checkpoint("best")
        == saved
        == Checkpoint(path=str(tmp_path / "best"), position=saved.position)
    )


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    _, second = (store.write(trained_state(step)) for step in (1, 2))
    _cut(Path(second.path))
    store.write(trained_state(3))
    assert [found.position.step for found in store.checkpoints()] == [3, 2, 1]
    store.write(trained_state(4))
    assert steps(store) == [4, 3]


def test_a_remote_checkpoint_without_its_manifest_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The manifest is written last, also where folders cannot be renamed."""
    root = f"/{uuid.uuid4().hex}"
    store, files = CheckpointStore(f"memory:/{root}"), fsspec.filesystem("memory")
    older = store.write(trained_state(1))
    put_file = type(files).put_file

    def interrupted(self: object, source: str, target: str) -> None:
        if target.endswith(MANIFEST):
            raise OSError("the connection is lost")
        put_file(self, source, target)

    monkeypatch.setattr(type(files), "put_file", interrupted)
    with pytest.raises(CheckpointError, match="the connection is lost"):
        store.write(trained_state(2))
    assert store.checkpoints() == [older]
    assert store.newest_good() == older
    files.rm(root, recursive=True)


def test_what_a_lost_writer_left_is_deleted_but_not_what_a_living_one_writes(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    lost = tmp_path / f".unfinished-{module._host()}-{_NO_PROCESS}-00000000"
    alive = tmp_path / f".unfinished-{module._host()}-{os.getppid()}-00000000"
    elsewhere = tmp_path / f".unfinished-elsewhere-{_NO_PROCESS}-00000000"
    old = tmp_path / f".unfinished-elsewhere-{_NO_PROCESS}-00000001"
    for folder in (lost, alive, elsewhere, old):
        folder.mkdir()
        (folder / "part").write_bytes(b"?")
    last_week = time.time() - 7 * 24 * 3600
    os.utime(old, (last_week, last_week))
    store.write(trained_state(1))
    assert not lost.exists()
    assert not old.exists()
    assert alive.exists()
    assert elsewhere.exists()
    assert len(store.checkpoints()) == 1


def test_a_directory_that_cannot_be_written_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        CheckpointStore(tmp_path / "file" / "checkpoints").check_writable()
    store = CheckpointStore(tmp_path / "new" / "checkpoints")
    store.check_writable()
    assert list((tmp_path / "new" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("url", ["nosuchprotocol://bucket/run", ""])
def test_a_url_that_fsspec_does_not_know_is_an_error(url: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        CheckpointStore(url)


def test_keeping_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        CheckpointStore(tmp_path, keep_last=0)


def test_a_checkpoint_is_saved_under_a_name_and_replaced(directory: str) -> None:
    path = f"{directory}/best"
    for step in (1, 2):
        saved = save_checkpoint(path, trained_state(step))
        assert saved.position == trained_state(step).position
        assert find_checkpoint(path) == saved
        assert same(load_checkpoint(path), trained_state(step))
    files, root = fsspec.core.url_to_fs(directory)
    assert [name.rpartition("/")[2] for name in files.ls(root, detail=False)] == ["best"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("words")
    with pytest.raises(ConfigError, match="something else"):
        save_checkpoint(tmp_path / "mine", trained_state(1))
    assert (tmp_path / "mine" / "thesis").read_text() == "words"


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_and_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "best"
    save_checkpoint(path, trained_state(1))

    def no_space(*_: object, **__: object) -> None:
        try:
            raise OSError("no space left on device")
        except OSError:
            error = RuntimeError("what followed from it")
            error.__context__ = sys.exc_info()[1]
        raise CheckpointException("write", {0: (error, StackSummary())})

    monkeypatch.setattr(checkpoint_tensors.state_dict_saver, "save", no_space)
    with pytest.raises(CheckpointError, match=r"OSError: no space left on device$"):
        save_checkpoint(path, trained_state(2))
    assert [each.name for each in tmp_path.iterdir()] == ["best"]
    assert same(load_checkpoint(path), trained_state(1))


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    written: list[Checkpoint] = []
    writer = CheckpointWriter(CheckpointStore(tmp_path), written.append)
    weight = torch.zeros(3)
    for step in (1, 2):
        writer.begin_write(
            TrainingState(position=Position(step=step), parts={"model": {"weight": weight}})
        )
        weight.add_(1)
    assert writer.wait(timeout_s=30.0)
    assert [each.position.step for each in written] == [1, 2]
    for each in written:
        found = load_checkpoint(each.path).parts["model"]["weight"]
        assert found.tolist() == [each.position.step - 1] * 3


def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_next_one_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[Checkpoint] = []
    writer = CheckpointWriter(CheckpointStore(tmp_path), written.append)
    bad = TrainingState(position=Position(step=1), parts={"mine": {"rule": lambda: 1}})
    with caplog.at_level(logging.WARNING):
        writer.begin_write(bad)
        writer.begin_write(trained_state(2))
        assert writer.wait(timeout_s=30.0)
    assert "no checkpoint of step 1" in caplog.text
    assert [each.position.step for each in written] == [2]


def _wait_for_checkpoints_after(step: int, store: CheckpointStore) -> None:
    eventually(lambda: max(steps(store), default=-1) > step + 1, 30.0, "no checkpoint is written")


@pytest.mark.processes
def test_a_process_that_is_killed_while_it_writes_leaves_whole_checkpoints(tmp_path: Path) -> None:
    dice = random.Random(0)
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, keep_last=2)
    last, num_unfinished = -1, 0
    for attempt in range(4):
        process = Forked(Call(write_without_end, (str(folder),), {}, tmp_path / f"log{attempt}"))
        try:
            _wait_for_checkpoints_after(last, store)
            eventually(lambda: list(folder.glob(".unfinished-*")), 30.0, "nothing is written")
            time.sleep(dice.uniform(0.0, 0.03))
        finally:
            process.kill()
            assert process.wait(10.0) == -signal.SIGKILL
        num_unfinished += len(list(folder.glob(".unfinished-*")))
        newest = store.newest_good()
        assert newest is not None
        assert newest.position.step > last
        last = newest.position.step
        assert len(steps(store)) <= 3
    assert num_unfinished, "no process was killed while it wrote"
    assert same(load_checkpoint(store.checkpoints()[0].path), large_state(last))
    store.prune()
    assert not list(folder.glob(".unfinished-*"))
