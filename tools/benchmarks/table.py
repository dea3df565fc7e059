"""One result: the table that a benchmark prints and the JSON that it writes."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Value = str | int | float | None


@dataclass(frozen=True, slots=True)
class Column:
    """``key`` is the row's field, ``title`` its heading; numbers are shown with ``digits``."""

    key: str
    title: str
    digits: int = 1


@dataclass(slots=True)
class Result:
    """The rows of one benchmark, and under which settings they were measured.

    A row maps column keys to values (None: not measured) and may hold more than is shown.
    """

    name: str
    title: str
    columns: Sequence[Column]
    settings: dict[str, Value]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The whole result, with date and machine, ready for `json.dump`."""
        return {
            "benchmark": self.name,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "settings": self.settings,
            "rows": self.rows,
            "notes": self.notes,
        }

    def shown(self) -> list[Column]:
        """The columns in which something was measured."""
        return [c for c in self.columns if any(row.get(c.key) is not None for row in self.rows)]

    def cells(self) -> list[list[str]]:
        """The table's text, row by row."""
        return [[_text(row.get(c.key), c.digits) for c in self.shown()] for row in self.rows]


def machine() -> dict[str, Value]:
    """What the figures depend on, in words that name no machine."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average_1min": load,
    }


def hand_over(result: Result, json_file: Path | None) -> None:
    """Print the table, and write ``json_file`` if one is named."""
    show(result)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result.as_json(), indent=2) + "\n")


def show(result: Result) -> None:
    """Print the table."""
    if importlib.util.find_spec("rich") is not None:
        _print_rich(result)
    else:
        _print_plain(result)


def _text(value: Value, digits: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return str(value)


def _print_rich(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a log is wide enough; do not cut the table there
    table = Table(title=result.title, title_justify="left", caption_justify="left")
    for index, column in enumerate(result.shown()):
        table.add_column(column.title, justify="left" if index == 0 else "right")
    for row in result.cells():
        table.add_row(*row)
    console.print(table)
    for note in result.notes:
        console.print(f"  {note}", highlight=False, markup=False)


def _print_plain(result: Result) -> None:
    rows = [[column.title for column in result.shown()], *result.cells()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(result.title)
    for row in rows:
        first, *others = row
        line = [first.ljust(widths[0])]
        line += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join(line).rstrip())
    for note in result.notes:
        print(f"  {note}")
