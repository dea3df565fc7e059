"""A worker's step and last failure, in a file that outlives it, for who restarts it.

A worker that is killed reports nothing any more. So it writes the number of its last committed step
to a file that is mapped into its memory, which the system keeps, and its launcher, or a scheduler's
script, reads it afterwards. The other direction has one number: until when a drain has to be over.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import time
from pathlib import Path

from torchft_svc.errors import ConfigError

_MAGIC = b"torchft1"
# What it is, the committed step, until when to drain, the step of the last failure, its length.
_HEADER = struct.Struct("<8sqdqH")
_STEP = struct.Struct("<q")
_DRAIN = struct.Struct("<d")
_STEP_AT, _DRAIN_AT, _FAILURE_AT = 8, 16, 24
_SIZE = 4096
_UNKNOWN = -1
# A drain of more than a week is a number of before the machine was booted.
_LONGEST_DRAIN_S = 7 * 86_400.0


class ProgressFile:
    """The file at ``path``, which is made if it is not there; without a path nothing is recorded.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._map: mmap.mmap | None = None
        if path is None:
            return
        try:
            with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                if os.fstat(file.fileno()).st_size < _SIZE:
                    file.truncate(_SIZE)
                self._map = mmap.mmap(file.fileno(), _SIZE)
        except OSError as error:
            reason = f"it cannot be opened: {error.strerror}"
            raise ConfigError("TORCHFT_PROGRESS_FILE", str(path), reason) from error
        if self._map[: len(_MAGIC)] != _MAGIC:
            _HEADER.pack_into(self._map, 0, _MAGIC, _UNKNOWN, 0.0, _UNKNOWN, 0)

    @property
    def step(self) -> int | None:
        """The last committed step; None: not known."""
        if self._map is None:
            return None
        (step,) = _STEP.unpack_from(self._map, _STEP_AT)
        return None if step == _UNKNOWN else int(step)

    def record_step(self, step: int) -> None:
        """Record that ``step`` is committed; for each step, at no cost."""
        if self._map is not None:
            _STEP.pack_into(self._map, _STEP_AT, step)

    @property
    def drain_until(self) -> float | None:
        """The monotonic instant at which this worker is killed; None: not known."""
        if self._map is None:
            return None
        (until,) = _DRAIN.unpack_from(self._map, _DRAIN_AT)
        return until if 0.0 < until - time.monotonic() < _LONGEST_DRAIN_S else None

    def record_drain(self, until: float | None) -> None:
        """Record for the worker that it is killed at this instant of the monotonic clock."""
        if self._map is not None:
            _DRAIN.pack_into(self._map, _DRAIN_AT, until or 0.0)

    def record_failure(self, failure: str) -> bool:
        """Record what ends the worker; return whether it was ended by the same at the same step."""
        if self._map is None:
            return False
        _, step, _, failed_at, length = _HEADER.unpack_from(self._map)
        text = failure.encode()[: _SIZE - _HEADER.size]
        before = self._map[_HEADER.size : _HEADER.size + length]
        self._map[_HEADER.size : _HEADER.size + len(text)] = text
        struct.pack_into("<qH", self._map, _FAILURE_AT, step, len(text))
        return step != _UNKNOWN and (before, failed_at) == (text, step)

    def close(self) -> None:
        """Unmap the file; idempotent."""
        if self._map is not None:
            self._map.close()
            self._map = None


@functools.cache
def open_progress(path: str | None) -> ProgressFile:
    """Return the file that all managers of this program share; see `ProgressFile`."""
    return ProgressFile(path)


def highest_step(path: str | os.PathLike[str]) -> int | None:
    """Return the highest step in the file at ``path``, and in those of its workers (``path.*``)."""
    base = Path(path)
    steps = []
    for each in (base, *base.parent.glob(f"{base.name}.*")):
        with contextlib.suppress(OSError):
            header = each.read_bytes()[: _HEADER.size]
            if header[: len(_MAGIC)] == _MAGIC and len(header) == _HEADER.size:
                steps.append(_HEADER.unpack(header)[1])
    best = max(steps, default=_UNKNOWN)
    return None if best == _UNKNOWN else best
