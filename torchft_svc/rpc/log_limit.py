"""How lines of a log look; and of lines that say the same of ever new peers, only the first ones.

A kind of line is its logger and its text before the arguments are filled in. What was left out is
counted, and told before the next line that is written after the window, or at the end.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

# Enough to see what goes on; a flood of a thousand lines a second would fill a disk in a day.
MAX_LINES, WINDOW_S = 20, 10.0
# More than this package has; what a library invents beyond counts as one kind.
MAX_KINDS = 200
_OTHERS = "lines of other kinds"
# What peers say of themselves gets into lines: it must not end one, or take over a terminal.
_ESCAPED = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}


def escaped(text: str) -> str:
    """``text`` without control characters, for a log or a terminal."""
    return text.translate(_ESCAPED)


class LineFormatter(logging.Formatter):
    """One line for a record (and its traceback below); control characters are escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        record.message = escaped(record.message)
        return super().formatMessage(record)


def line_formatter(who: str = "") -> logging.Formatter:
    """Time, level, who speaks (the module, or ``who`` by name), and what."""
    speaker = f"torchft_svc[{who.replace('%', '%%')}]" if who else "%(name)s"
    return LineFormatter(f"%(asctime)s %(levelname)s {speaker} %(message)s")


def level_number(name: str) -> int:
    """Of ``debug``, ``info``, ``warning``, ``error``, or ``off``, which is above all."""
    return logging.CRITICAL + 1 if name == "off" else int(getattr(logging, name.upper()))


@dataclass(slots=True)
class _Window:
    began_at: float
    num_lines: int = 0


class LineLimit:
    """At most ``MAX_LINES`` of a kind in ``WINDOW_S`` seconds. ``now`` is monotonic seconds."""

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


class LimitedLog(logging.StreamHandler):  # type: ignore[type-arg,unused-ignore]  # for 3.10
    """Writes to stderr, within a `LineLimit`."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = LineLimit()

    def emit(self, record: logging.LogRecord) -> None:
        if _is_of_a_gone_client(record):
            return
        now = time.monotonic()
        self._tell_left_out(now)
        if self._limit.admit(f"{record.name}: {record.msg}", now):
            super().emit(record)

    def close(self) -> None:
        """Tell what was left out last; may be called twice."""
        self._tell_left_out(float("inf"))
        super().close()

    def _tell_left_out(self, now: float) -> None:
        for kind, count in self._limit.ended(now):
            text = "omitted %d more lines like %r"
            level = logging.WARNING
            super().emit(logging.LogRecord(__name__, level, "", 0, text, (count, kind), None))


def _is_of_a_gone_client(record: logging.LogRecord) -> bool:
    """gRPC tells of each call that has ended while it was being answered, as of a fault of ours."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ == "ExecuteBatchError"
