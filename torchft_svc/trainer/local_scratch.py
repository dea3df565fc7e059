"""The folders of one local backend in which its workers leave their states for each other.

Each folder is locked as long as its trainer lives. So a cleaner of old files (systemd-tmpfiles)
leaves it alone, and the next trainer recognizes a folder that was left by a trainer which was
killed together with its fork server.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchft_svc.host.process_end import lives
from torchft_svc.trainer.local_process import PART

# States are in memory, where a system has such a directory and this much of it is free.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_MIN_FREE_BYTES = 1 << 30
# Folders, and the process id of their trainer.
_NAME = re.compile(r"torchft-trainer-(\d+)-[0-9a-f]{16}")


class LocalScratch:
    """Names the folders of this process' trainer, the first choice first; see `make_folders`."""

    def __init__(self) -> None:
        name = f"torchft-trainer-{os.getpid()}-{secrets.token_hex(8)}"
        self.folders = tuple(str(place / name) for place in _places())
        self._locks: dict[str, int] = {}

    def make_folders(self) -> None:
        """Make what is missing; states go to the first folder that there is.

        The fork server removes them if this process is killed, once it is ready: make them then.
        """
        for folder in self.folders:
            with contextlib.suppress(OSError):
                os.makedirs(folder, mode=0o700, exist_ok=True)
                self._lock(folder)

    def parts(self, worker: int) -> Iterator[Path]:
        """States that a worker has not written completely."""
        for folder in self.folders:
            yield from Path(folder).glob(f"{worker}-*{PART}")

    def close(self) -> None:
        """Remove all; may be called twice."""
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks.clear()

    def _lock(self, folder: str) -> None:
        held = self._locks.get(folder)
        if held is not None:
            if os.path.samestat(os.fstat(held), os.stat(folder)):
                return
            os.close(self._locks.pop(folder))  # it was deleted, and made anew
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._locks[folder] = descriptor
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_stale() -> None:
    """Remove the folders of trainers of this user that have ended without doing so.

    A process id may be that of another container, so it is no proof: the lock must be free, too.
    """
    for place in _places(0):
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                found = _NAME.fullmatch(entry.name)
                if found is not None and not lives(int(found[1])):
                    with contextlib.suppress(OSError):
                        _remove(entry.path)


def _remove(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _places(min_free_bytes: int = _MIN_FREE_BYTES) -> Iterator[Path]:
    """Directories for such folders; those in memory only if so much is free there."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(_SHARED_MEMORY).free >= min_free_bytes:
            yield _SHARED_MEMORY
    yield Path(tempfile.gettempdir())
