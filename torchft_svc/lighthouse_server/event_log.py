"""Writes incidents to a file as JSON lines, which is rotated by size (`--event-log`)."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from logging.handlers import RotatingFileHandler
from typing import NoReturn, TextIO, cast

from torchft_svc.core.quorum.lighthouse.incidents import Incident
from torchft_svc.errors import ConfigError
from torchft_svc.host.line_writer import LineWriter

log = logging.getLogger(__name__)

# An incident has half a kilobyte, and is written about five times while it is completed.
MAX_BYTES, NUM_OLD_FILES = 10 << 20, 4


class EventLog:
    """Appends records to the file at ``path``; a thread writes, so that nobody waits for a disk.

    A line is a record as it was then: the last line with a number is the record's latest state. A
    file that cannot be written is one warning, and lines are lost until it can be.

    Raises:
        ConfigError: nothing can be written there.
    """

    def __init__(
        self, path: str, max_bytes: int = MAX_BYTES, num_old_files: int = NUM_OLD_FILES
    ) -> None:
        try:
            self._file = _RotatedFile(path, max_bytes, num_old_files)
        except OSError as error:
            reason = f"it cannot be written: {error.strerror}"
            raise ConfigError("event_log", path, reason) from None
        self._path = path
        self._writer = LineWriter(cast("TextIO", self._file), self._warn_once)

    def write(self, incident: Incident) -> None:
        """Append ``incident``, soon."""
        self._writer.put_nowait(json.dumps(incident.as_dict()) + "\n")

    def close(self) -> None:
        """Write what waits, for a second at most."""
        self._writer.close()
        self._file.close()

    def _warn_once(self, line: str, error: OSError) -> None:
        if not self._file.has_failed:
            log.warning(
                "the event log %s cannot be written, its records are lost meanwhile: %s",
                self._path,
                error,
            )
        self._file.has_failed = True


class _RotatedFile(io.TextIOBase):
    """A text file that is renamed when it is full; ``has_failed``: the last line was not
    written."""

    def __init__(self, path: str, max_bytes: int, num_old_files: int) -> None:
        self._handler = _Handler(path, "a", max_bytes, num_old_files, "utf-8")
        self._handler.setFormatter(logging.Formatter("%(message)s"))
        self.has_failed = False

    def write(self, text: str) -> int:
        # What was written of the last line, if anything, stands alone.
        start = "\n" if self.has_failed else ""
        self._handler.emit(logging.makeLogRecord({"msg": start + text.rstrip("\n")}))
        self.has_failed = False
        return len(text)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what waits for room on the disk is lost
            self._handler.close()


class _Handler(RotatingFileHandler):
    """Raises what goes wrong, as a stream does."""

    def handleError(self, record: logging.LogRecord) -> NoReturn:  # noqa: N802 - logging's name
        _, error, _ = sys.exc_info()
        assert error is not None
        raise error
