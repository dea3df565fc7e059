"""Wakes whoever waits for files in a directory, by Linux' inotify, without a dependency."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# From <sys/inotify.h>; the flags of inotify_init1 are those of open.
_IN_MOVED_TO, _IN_CREATE, _IN_DELETE_SELF, _IN_ONLYDIR = 0x80, 0x100, 0x400, 0x1000000
_READ_BYTES = 4096


class DirectoryWatch:
    """``fileno`` becomes readable when ``directory`` gets a file, or is removed.

    It is None where the system has no inotify, or has no more of it for this user.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = _watch(directory)

    def fileno(self) -> int | None:
        return self._descriptor

    def clear(self) -> None:
        """Forget what has happened so far: it is not readable until something else does."""
        if self._descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._descriptor, _READ_BYTES):
                    pass

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _watch(directory: Path) -> int | None:
    libc = _libc()
    if libc is None:
        return None
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        _note_polling(directory)
        return None
    wanted = _IN_CREATE | _IN_MOVED_TO | _IN_DELETE_SELF | _IN_ONLYDIR
    if libc.inotify_add_watch(descriptor, os.fsencode(directory), wanted) < 0:
        os.close(descriptor)
        _note_polling(directory)
        return None
    return int(descriptor)


def _note_polling(directory: Path) -> None:
    reason = os.strerror(ctypes.get_errno())
    logger.info("polling %s, because inotify cannot watch it: %s", directory, reason)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "inotify_init1") else None
