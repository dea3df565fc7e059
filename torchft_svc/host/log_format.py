"""The two formats of log lines: one to be read by people, and JSON for programs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

# What peers say of themselves gets into lines: it must not end one, or take over a terminal.
_ESCAPED = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}
# What logging itself puts into a record; all else was given as ``extra``.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def escaped(text: str) -> str:
    """``text`` without control characters, for a log or a terminal."""
    return text.translate(_ESCAPED)


def _nothing() -> Mapping[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Speaker:
    """The program that logs: ``name`` for people (empty: each line names its module).

    ``fields`` are added to each line of JSON, as are those that ``describe`` returns when a line is
    written, such as the step.
    """

    name: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)
    describe: Callable[[], Mapping[str, object]] = _nothing


class LineFormatter(logging.Formatter):
    """One line for a record (and its traceback below); control characters are escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        record.message = escaped(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object for a record: time (RFC 3339, UTC), level, logger, message, the fields of the
    speaker, those that were given as ``extra``, and the exception with its traceback."""

    def __init__(self, speaker: Speaker) -> None:
        super().__init__()
        self._speaker = speaker

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._speaker.fields,
            **self._speaker.describe(),
            **{name: value for name, value in vars(record).items() if name not in _OWN},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps({name: _as_json(value) for name, value in line.items()})


def _as_json(value: object) -> Any:
    """``value`` as JSON has it; what that does not know, such as an exception, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    return str(value)


def make_formatter(log_format: str, speaker: Speaker) -> logging.Formatter:
    """The formatter for ``TORCHFT_LOG_FORMAT``, ``text`` or ``json``."""
    if log_format == "json":
        return JsonFormatter(speaker)
    name = speaker.name.replace("%", "%%")
    who = f"torchft_svc[{name}]" if name else "%(name)s"
    return LineFormatter(f"%(asctime)s %(levelname)s {who} %(message)s")
