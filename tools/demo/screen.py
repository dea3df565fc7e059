"""Shows the run while it goes on: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tools.demo.board import Board, GroupStatus

_NUM_LINES_SHOWN = 10
_PROGRESS_EVERY_S = 3.0
_REDRAW_EVERY_S = 0.2
_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLE = {"training": "green", "killed": "bold red", "starting": "yellow", "healing": "cyan"}


class Screen(Protocol):
    """Takes sentences about events, and the board again and again; a context manager."""

    def __enter__(self) -> Screen: ...

    def __exit__(self, *_: object) -> None: ...

    def show_event(self, elapsed_s: float, sentence: str) -> None:
        """Show an event."""

    def show(self, elapsed_s: float, board: Board) -> None:
        """Show the present state; called often, shown as often as it is useful."""


def make_screen(console: Console) -> Screen:
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


class PlainScreen:
    """One line for each event, and a line of progress every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_at = 0.0

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show_event(self, elapsed_s: float, sentence: str) -> None:
        self._write(f"{elapsed_s:6.1f} s  {sentence}")

    def show(self, elapsed_s: float, board: Board) -> None:
        if elapsed_s - self._shown_at < _PROGRESS_EVERY_S:
            return
        self._shown_at = elapsed_s
        groups = ", ".join(_in_words(status) for status in board.groups)
        self._write(f"{elapsed_s:6.1f} s  step {board.top_step}: {groups}")

    def _write(self, line: str) -> None:
        # Not wrapped, coloured or buffered: it is read by programs, and by people as it comes.
        self._console.file.write(line + "\n")
        self._console.file.flush()


def _in_words(status: GroupStatus) -> str:
    loss = f" loss {status.losses[-1]:.2f}" if status.losses else ""
    return f"group {status.group} {status.state}{loss}"


class LiveScreen:
    """A table that is drawn anew several times a second, above the latest events."""

    def __init__(self, console: Console) -> None:
        self._lines: deque[str] = deque(maxlen=_NUM_LINES_SHOWN)
        # No thread of its own: the demo starts processes, which threads do not like.
        self._live = Live(console=console, auto_refresh=False)
        self._drawn_at = -_REDRAW_EVERY_S

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show_event(self, elapsed_s: float, sentence: str) -> None:
        self._lines.append(f"{elapsed_s:6.1f} s  {sentence}")

    def show(self, elapsed_s: float, board: Board) -> None:
        if elapsed_s - self._drawn_at < _REDRAW_EVERY_S:
            return
        self._drawn_at = elapsed_s
        lines = Text("\n".join(self._lines))
        title = f"{elapsed_s:.0f} s, step {board.top_step}"
        self._live.update(
            Group(board_table(board, title), Panel(lines, title="events")), refresh=True
        )


def board_table(board: Board, title: str) -> Table:
    table = Table(title=title, expand=True)
    names = "group,state,process,step,with,ms/step,discarded,kills,loss"
    for name in names.split(","):
        table.add_column(name, justify="right")
    table.add_column("recent losses", no_wrap=True)
    for status in board.groups:
        table.add_row(
            str(status.group),
            Text(status.state, style=_STATE_STYLE.get(status.state, "")),
            str(status.pid or "-"),
            str(status.step),
            f"{status.num_participants} groups",
            f"{status.step_time_s * 1000:.0f}",
            str(status.num_discards),
            str(status.num_kills),
            f"{status.losses[-1]:.2f}" if status.losses else "-",
            _bars(list(status.losses)),
        )
    return table


def _bars(values: list[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
