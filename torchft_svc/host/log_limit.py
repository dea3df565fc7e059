"""A limit for log lines that repeat for ever new peers.

A kind of line is its logger and its text before the arguments are filled in. What was left out is
counted, and logged before the next line that is written after the window, or at the end.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
import time
from dataclasses import dataclass

from torchft_svc.host.line_writer import LineWriter

# Enough to see what goes on; a flood of a thousand lines a second would fill a disk in a day.
MAX_LINES, WINDOW_S = 20, 10.0
# More than this package has; what a library invents beyond counts as one kind.
MAX_KINDS = 200
_OTHERS = "lines of other kinds"


def level_number(name: str) -> int:
    """The number of the level ``debug``, ``info``, ``warning``, ``error``, or of ``off``."""
    return logging.CRITICAL + 1 if name == "off" else int(getattr(logging, name.upper()))


@dataclass(slots=True)
class _Window:
    began_at: float
    num_lines: int = 0


class LineLimit:
    """Passes at most ``MAX_LINES`` of a kind in ``WINDOW_S`` seconds; ``now`` is monotonic."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def admit(self, kind: str, now: float) -> bool:
        """Count a line; False if it is to be left out."""
        if kind not in self._windows and len(self._windows) >= MAX_KINDS:
            kind = _OTHERS
        window = self._windows.setdefault(kind, _Window(now))
        window.num_lines += 1
        return window.num_lines <= MAX_LINES

    def ended(self, now: float) -> list[tuple[str, int]]:
        """Forget the windows that are over; the kinds that had lines left out, and how many."""
        over = [kind for kind, w in self._windows.items() if now - w.began_at >= WINDOW_S]
        left_out = [(kind, self._windows.pop(kind).num_lines - MAX_LINES) for kind in over]
        return [(kind, count) for kind, count in left_out if count > 0]


class LimitedLog(logging.handlers.QueueHandler):
    """Logs to stderr within a `LineLimit`; whoever logs does not wait for whoever reads.

    ``writer``: of the standard error (default: one of its own, for what that is now). Lines are
    formatted where they are logged, and written by its thread.
    """

    queue: LineWriter  # type: ignore[assignment]

    def __init__(self, writer: LineWriter | None = None) -> None:
        super().__init__(LineWriter(sys.stderr) if writer is None else writer)  # type: ignore[arg-type]
        self.queue.report = self._lost_line
        self._limit = LineLimit()

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record) + "\n"

    def emit(self, record: logging.LogRecord) -> None:
        if _is_of_a_gone_client(record):
            return
        now = time.monotonic()
        self._report_left_out(now)
        if self._limit.admit(f"{record.name}: {record.msg}", now):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as logging calls it
        """Log why ``record`` cannot be formatted; logging would write that to stderr itself."""
        if logging.raiseExceptions:
            ours = _warning("cannot log %s: %r", record.name, record.msg)
            ours.exc_info = sys.exc_info()
            self.queue.put_nowait(self.prepare(ours))

    def flush(self) -> None:
        """Wait a moment until all lines are written."""
        self.queue.flush()

    def close(self) -> None:
        """Log what was left out last, and end the thread; may be called twice."""
        self._report_left_out(float("inf"))
        self.queue.close()
        super().close()

    def _report_left_out(self, now: float) -> None:
        for kind, count in self._limit.ended(now):
            super().emit(_warning("omitted %d more lines like %r", count, kind))

    def _lost_line(self, num_lines: int) -> str:
        text = "lost %d lines of this log, which nobody read in time"
        return self.prepare(_warning(text, num_lines))


def _warning(text: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, "", 0, text, args, None)


def _is_of_a_gone_client(record: logging.LogRecord) -> bool:
    """Whether gRPC logs, as a fault of ours, a call that has ended while it was being answered."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ == "ExecuteBatchError"
