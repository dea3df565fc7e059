"""Stores checkpoints: whole ones only, checked when they are read, the last few of them.

A checkpoint is a folder, written by torch.distributed.checkpoint, with a manifest of its files'
sizes and checksums. It is put together under another name, and renamed when it is on the disk.
Where the file system cannot rename a folder at once, the manifest is written last; a folder without
one is no checkpoint. Folders are numbered in the order in which they were written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from torchft_svc.errors import CheckpointError, ConfigError
from torchft_svc.host.process_end import lives
from torchft_svc.trainer.checkpoint_files import (
    MANIFEST,
    parse_manifest,
    position_in,
    read_files,
    sync_folder,
    verify_files,
    write_files,
)
from torchft_svc.trainer.messages import Position
from torchft_svc.trainer.state import TrainingState, copy_to_host

log = logging.getLogger(__name__)

_NAME = re.compile(r"(\d{6,})-step-(\d+)(?:-[0-9a-f]{8})?")
# Folders of writers and of deletions that were interrupted: host, process id, number.
_UNFINISHED = re.compile(r"\.unfinished-(.+)-(\d+)-[0-9a-f]{8}")
# After this time, what a writer of another host has left is deleted.
_FORGOTTEN_S = 24 * 3600.0
# Names that other writers may take at the same time, before this is an error.
_MAX_NAMES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that was written; ``path`` is a folder, or a URL of fsspec."""

    path: str
    position: Position


class CheckpointStore:
    """The checkpoints of a run.

    Args:
        directory: a folder, or a URL that fsspec understands. All workers and the trainer must be
            able to reach it.
        keep_last: older checkpoints are deleted when a new one has been written.
    """

    def __init__(self, directory: str | os.PathLike[str], keep_last: int = 3) -> None:
        if keep_last < 1:
            raise ConfigError("keep_last", keep_last, "keep at least one checkpoint")
        self._keep_last = keep_last
        self._place = _Place.of(directory, "checkpoint_dir")
        # Also for processes that have another working directory.
        self.directory = f"{self._place.prefix}{self._place.root}"
        self._rejected: set[str] = set()

    @property
    def is_in_memory(self) -> bool:
        """Whether other processes cannot see it."""
        return isinstance(self._place.files, MemoryFileSystem)

    def check_writable(self) -> None:
        """Create the directory, write a file there, and delete it.

        Raises:
            ConfigError: that is not possible.
        """
        place = self._place
        probe = f"{place.root}/.probe-{secrets.token_hex(4)}"
        try:
            place.files.makedirs(place.root, exist_ok=True)
            place.files.pipe_file(probe, b"?")
            place.files.rm_file(probe)
        except Exception as error:  # each file system of fsspec has errors of its own
            raise ConfigError("checkpoint_dir", self.directory, _words(error)) from error

    def write(self, state: TrainingState) -> Checkpoint:
        """Write ``state``, and delete what is older than the last few.

        Raises:
            CheckpointError: it could not be written; nothing of it is left.
            ConfigError: a value that cannot be stored.
        """
        place = self._place
        step = state.position.step
        for _ in range(_MAX_NAMES):
            number = max((number for number, _ in self._names()), default=0) + 1
            name = f"{number:06d}-step-{step}"
            if not place.is_local:  # two writers could take one name
                name += f"-{secrets.token_hex(4)}"
            with contextlib.suppress(_NameTaken):
                place.write(name, state)
                break
        else:
            raise CheckpointError(self.directory, "other writers take all names")
        self.prune()
        return Checkpoint(path=place.shown(name), position=state.position)

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that have a manifest, the newest first; only manifests are read."""
        found = []
        for _, name in sorted(self._names(), reverse=True):
            with contextlib.suppress(CheckpointError):
                position = position_in(self._place.manifest(name))
                found.append(Checkpoint(path=self._place.shown(name), position=position))
        return found

    def newest_good(self, without: Collection[str] = ()) -> Checkpoint | None:
        """The newest one whose files are all as they were written; None: there is none.

        A damaged one is skipped with a warning, and never looked at again. Those at the paths
        ``without`` are left out.
        """
        for _, name in sorted(self._names(), reverse=True):
            path = self._place.shown(name)
            if path in self._rejected or path in without:
                continue
            try:
                position = self._place.verify(name)
            except CheckpointError as error:
                self.reject(path, error.reason)
                continue
            return Checkpoint(path=path, position=position)
        return None

    def newest_fitting(self, check: Callable[[TrainingState], None]) -> Checkpoint | None:
        """The newest good one that torch can load, and to which ``check`` does not object.

        The others are skipped with a warning, and never looked at again.

        Raises:
            ConfigError: what ``check`` raised for the newest one, if no other one fits; none of
                them is skipped the next time.
        """
        unfit: dict[str, ConfigError] = {}
        while (found := self.newest_good(unfit)) is not None:
            try:
                check(load_checkpoint(found.path))
                break
            except CheckpointError as error:
                self.reject(found.path, error.reason)
            except ConfigError as error:
                unfit[found.path] = error
        if found is None and unfit:
            raise next(iter(unfit.values()))
        for path, why in unfit.items():
            self.reject(path, str(why))
        return found

    def reject(self, path: str, reason: str) -> None:
        """Do not use the checkpoint at ``path`` any more: it could not be read."""
        if path not in self._rejected:
            self._rejected.add(path)
            log.warning("checkpoint %s is skipped: %s", path, reason)

    def prune(self) -> None:
        """Delete all but the last few whole checkpoints, and what lost writers have left."""
        num_kept = 0
        for _, name in sorted(self._names(), reverse=True):
            if num_kept >= self._keep_last:
                with contextlib.suppress(OSError):
                    self._place.delete(name)
            elif self._is_usable(name):
                num_kept += 1
        self._place.delete_unfinished()

    def _is_usable(self, name: str) -> bool:
        return self._place.shown(name) not in self._rejected and self._place.has_all(name)

    def _names(self) -> list[tuple[int, str]]:
        return [
            (int(found[1]), name)
            for name in self._place.names()
            if (found := _NAME.fullmatch(name)) is not None
        ]


def save_checkpoint(path: str | os.PathLike[str], state: TrainingState) -> Checkpoint:
    """Write one checkpoint at ``path``; a checkpoint that is there is replaced.

    Raises:
        ConfigError: there is something else, or nothing can be written there.
        CheckpointError: it could not be written; the old one is as it was.
    """
    place, name = _parent(path)
    if place.exists(name) and not place.is_checkpoint(name):
        raise ConfigError("path", os.fspath(path), "there is something else than a checkpoint")
    place.write(name, state, replace=True)
    return Checkpoint(path=place.shown(name), position=state.position)


def load_checkpoint(path: str | os.PathLike[str]) -> TrainingState:
    """Read a checkpoint, and check all of it; its tensors are on the host.

    Raises:
        CheckpointError: it is missing, incomplete or damaged.
    """
    place, name = _parent(path)
    with place.fetched(name) as folder:
        verify_files(folder, os.fspath(path))
        return read_files(folder, os.fspath(path))


def accept(state: TrainingState) -> None:
    """A check of `find_checkpoint` that objects to nothing."""


def find_checkpoint(
    path: str | os.PathLike[str], check: Callable[[TrainingState], None] = accept
) -> Checkpoint:
    """The checkpoint at ``path``, or the newest one in the directory ``path`` that can be used.

    Raises:
        CheckpointError: there is none, or the one at ``path`` cannot be loaded.
        ConfigError: ``check`` objects to its state.
    """
    place, name = _parent(path)
    if place.is_checkpoint(name):
        state = load_checkpoint(path)
        check(state)
        return Checkpoint(path=place.shown(name), position=state.position)
    found = CheckpointStore(path).newest_fitting(check) if place.exists(name) else None
    if found is None:
        raise CheckpointError(os.fspath(path), "there is no checkpoint")
    return found


class CheckpointWriter:
    """Writes checkpoints on a thread of its own, one after the other.

    Args:
        store: where to.
        on_written: called by that thread with each one that was written.
    """

    def __init__(self, store: CheckpointStore, on_written: Callable[[Checkpoint], None]) -> None:
        self._store, self._on_written = store, on_written
        self._thread: threading.Thread | None = None
        self._over = threading.Event()  # nothing is being written; that may not be reported yet

    def begin_write(self, state: TrainingState) -> None:
        """Copy ``state`` to the host and start to write it; waits for the one before.

        Training may change the tensors when this has returned. A checkpoint that cannot be written
        is logged as a warning, and training continues.
        """
        self.wait()
        copy = copy_to_host(state)
        self._over.clear()
        self._thread = threading.Thread(
            target=self._write, args=(copy,), name="torchft-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written; return whether that is so in time."""
        if self._thread is None:
            return True
        if not self._over.wait(timeout_s):
            return False
        self._thread.join(timeout_s)
        return True

    def _write(self, state: TrainingState) -> None:
        try:
            written = self._store.write(state)
            self._over.set()
            self._on_written(written)
        except Exception as error:
            step = state.position.step
            is_known = isinstance(error, CheckpointError)  # all that there is to know
            log.warning("no checkpoint of step %d: %s", step, error, exc_info=not is_known)
        finally:
            self._over.set()


class _NameTaken(Exception):
    """Another writer has used this name."""


# -- places --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """A directory of a file system; ``prefix`` is what a URL begins with."""

    files: fsspec.AbstractFileSystem
    root: str
    prefix: str

    @classmethod
    def of(cls, given: str | os.PathLike[str], field: str) -> _Place:
        directory = os.fspath(given) if isinstance(given, str | os.PathLike) else None
        if not isinstance(directory, str):
            raise ConfigError(field, given, "use a path, or a URL")
        if not directory:
            raise ConfigError(field, directory, "it is empty")
        try:
            files, root = fsspec.core.url_to_fs(directory)
        except (ImportError, ValueError, OSError) as error:  # a protocol that is not installed
            raise ConfigError(field, directory, _words(error)) from error
        protocol, separator, _ = directory.partition("://")
        return cls(files, root.rstrip("/") or "/", protocol + separator if separator else "")

    @property
    def is_local(self) -> bool:
        return isinstance(self.files, LocalFileSystem)

    def at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def shown(self, name: str) -> str:
        return f"{self.prefix}{self.at(name)}"

    def names(self) -> list[str]:
        self.files.invalidate_cache()
        try:
            found = self.files.ls(self.root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def exists(self, name: str) -> bool:
        self.files.invalidate_cache()
        return bool(self.files.exists(self.at(name)))

    def is_checkpoint(self, name: str) -> bool:
        return self.exists(f"{name}/{MANIFEST}")

    def manifest(self, name: str) -> dict[str, Any]:
        source = self.shown(name)
        try:
            data = self.files.cat_file(f"{self.at(name)}/{MANIFEST}")
        except OSError as error:
            raise CheckpointError(source, f"its manifest cannot be read: {error}") from error
        return parse_manifest(data, source)

    def has_all(self, name: str) -> bool:
        """Whether each file is there in its size; none of them is read."""
        try:
            entries = self.manifest(name)["files"].items()
            return all(
                self.files.size(f"{self.at(name)}/{file}") == entry["bytes"]
                for file, entry in entries
            )
        except (OSError, CheckpointError):
            return False

    def verify(self, name: str) -> Position:
        """Read all of a checkpoint. Raises `CheckpointError`."""
        with self.fetched(name) as folder:
            return position_in(verify_files(folder, self.shown(name)))

    @contextlib.contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """A local folder with the files of a checkpoint."""
        if self.is_local:
            yield Path(self.at(name))
            return
        manifest = self.manifest(name)
        with tempfile.TemporaryDirectory(prefix="torchft-checkpoint-") as folder:
            for file in [MANIFEST, *manifest["files"]]:
                with contextlib.suppress(FileNotFoundError):  # `verify_files` reports it
                    self.files.get_file(f"{self.at(name)}/{file}", f"{folder}/{file}")
            yield Path(folder)

    def write(self, name: str, state: TrainingState, replace: bool = False) -> None:
        """Raises `_NameTaken` if ``name`` is there, and is not to be replaced."""
        try:
            if self.is_local:
                self._write_local(name, state, replace)
            else:
                self._write_remote(name, state, replace)
        except (_NameTaken, ConfigError):
            raise
        except Exception as error:  # torch and each file system of fsspec have errors of their own
            raise CheckpointError(self.shown(name), f"not written: {_words(error)}") from error

    def _write_local(self, name: str, state: TrainingState, replace: bool) -> None:
        root, target = Path(self.root), Path(self.at(name))
        root.mkdir(parents=True, exist_ok=True)
        unfinished = root / _unfinished_name()
        try:
            write_files(unfinished, state)
            if target.exists():
                if not replace:
                    raise _NameTaken
                self._exchange(unfinished, target)
            else:
                try:
                    unfinished.rename(target)
                except OSError as error:  # of a folder with files: another writer was faster
                    raise _NameTaken if target.exists() else error from error
            sync_folder(root)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _exchange(self, unfinished: Path, target: Path) -> None:
        old = Path(self.root) / _unfinished_name()
        target.rename(old)
        try:
            unfinished.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _write_remote(self, name: str, state: TrainingState, replace: bool) -> None:
        if self.exists(name) and not replace:
            raise _NameTaken
        with tempfile.TemporaryDirectory(prefix="torchft-checkpoint-") as folder:
            source = Path(folder) / "checkpoint"
            write_files(source, state)
            if replace:
                self.delete(name)
            self.files.makedirs(self.at(name), exist_ok=True)
            files = sorted(path.name for path in source.iterdir())
            for file in sorted(files, key=lambda file: file == MANIFEST):  # the manifest last
                self.files.put_file(str(source / file), f"{self.at(name)}/{file}")
        self.files.invalidate_cache()

    def delete(self, name: str) -> None:
        """Delete a checkpoint; at no time is there one of which a part is missing."""
        if self.is_local:
            doomed = Path(self.root) / _unfinished_name()
            with contextlib.suppress(FileNotFoundError):
                Path(self.at(name)).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
            return
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(f"{self.at(name)}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(self.at(name), recursive=True)

    def delete_unfinished(self) -> None:
        """Delete what processes that have ended were writing, or deleting."""
        if not self.is_local:
            return
        for name in self.names():
            found = _UNFINISHED.fullmatch(name)
            if found is None:
                continue
            path = Path(self.at(name))
            with contextlib.suppress(OSError):
                is_here = found[1] == _host()
                is_old = time.time() - path.stat().st_mtime > _FORGOTTEN_S
                if is_old or (is_here and not lives(int(found[2]))):
                    shutil.rmtree(path, ignore_errors=True)


def _parent(path: str | os.PathLike[str]) -> tuple[_Place, str]:
    """The place in which ``path`` is, and its name there."""
    place = _Place.of(path, "path")
    root, _, name = place.root.rpartition("/")
    if not name:
        raise ConfigError("path", os.fspath(path), "it has no name")
    return _Place(place.files, root, place.prefix), name


def _unfinished_name() -> str:
    return f".unfinished-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def _host() -> str:
    return socket.gethostname().replace("/", "_")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
