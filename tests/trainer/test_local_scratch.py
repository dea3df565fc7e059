"""The folders of local states: made, locked, and removed if nobody is left who would do it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchft_svc.trainer.local_process import PART
from torchft_svc.trainer.local_scratch import LocalScratch, remove_stale

# Of a process that has ended: ids are smaller.
_NO_PROCESS = (1 << 22) + 7


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalScratch]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = LocalScratch()
    found.make_folders()
    yield found
    found.close()


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def left_by(pid: int, folder: Path) -> Path:
    """What a trainer with this process id has left in ``folder``."""
    path = folder / f"torchft-trainer-{pid}-{'0123456789abcdef'}"
    path.mkdir()
    (path / "1-1").write_bytes(b"a state")
    return path


def test_folders_are_private_and_removed(scratch: LocalScratch) -> None:
    assert [os.stat(folder).st_mode & 0o777 for folder in scratch.folders] == [0o700] * len(
        scratch.folders
    )
    (Path(scratch.folders[-1]) / f"7-1{PART}").touch()
    (Path(scratch.folders[-1]) / f"71-1{PART}").touch()
    assert [each.name for each in scratch.parts(7)] == [f"7-1{PART}"]
    scratch.close()
    scratch.close()
    assert not any(map(os.path.exists, scratch.folders))


def test_a_deleted_folder_is_made_and_locked_again(scratch: LocalScratch) -> None:
    folder = scratch.folders[-1]
    for _ in range(2):
        scratch.make_folders()
        with pytest.raises(BlockingIOError), locked(folder):
            pass
        shutil.rmtree(folder)


def test_folders_of_killed_trainers_are_removed_and_others_are_not(
    scratch: LocalScratch, tmp_path: Path
) -> None:
    stale = left_by(_NO_PROCESS, tmp_path)
    living = left_by(os.getppid(), tmp_path)
    elsewhere = left_by(_NO_PROCESS + 1, tmp_path)  # in a container of its own, say
    named = tmp_path / f"torchft-trainer-{_NO_PROCESS}-mine"
    named.mkdir()
    link = tmp_path / f"torchft-trainer-{_NO_PROCESS}-{'f' * 16}"
    link.symlink_to(living)
    with locked(elsewhere):
        remove_stale()
    assert not stale.exists()
    kept = (living / "1-1", elsewhere / "1-1", named, *map(Path, scratch.folders))
    assert all(each.exists() for each in kept)
    remove_stale()
    assert not elsewhere.exists()
