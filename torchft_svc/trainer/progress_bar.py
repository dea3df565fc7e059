"""Shows the progress of training: a bar that rich draws on a terminal, otherwise lines of a log."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any, Protocol, TextIO

from torchft_svc.host.line_writer import LineStream, LineWriter
from torchft_svc.trainer.messages import Position

# Without a terminal, a line is written this often at most.
LINE_EVERY_S = 10.0
_MAX_METRICS = 4


class ProgressBar(Protocol):
    """Shows the progress of a trainer; ``now`` is in monotonic seconds."""

    def update(
        self, now: float, position: Position, num_workers: int, metrics: Mapping[str, Any]
    ) -> None:
        """Training has come to ``position``."""

    def show_sentence(self, text: str) -> None:
        """Something that happened: a lost worker, a wait for resources."""


@contextlib.contextmanager
def progress_bar(
    title: str, first: int, last: int | None, shown: bool | None = None, out: TextIO | None = None
) -> Iterator[ProgressBar]:
    """A bar from step ``first`` to ``last`` (None: not known) until the end of the block.

    A terminal that is frozen, or a pipe that nobody reads, does not stop the training.

    Args:
        shown: False: nothing is written; None: only if ``out`` is a terminal.
        out: default: the standard error output.
    """
    stream = sys.stderr if out is None else out
    is_terminal = stream.isatty()
    if shown is False or (shown is None and not is_terminal):
        yield _Silent()
        return
    with contextlib.closing(LineWriter(stream)) as writer:
        lines: Any = LineStream(writer)
        if is_terminal and importlib.util.find_spec("rich") is not None:
            with _rich_bar(title, first, last, lines) as bar:
                yield bar
        else:
            yield _Lines(title, last, lines)


class _Silent:
    def update(
        self, now: float, position: Position, num_workers: int, metrics: Mapping[str, Any]
    ) -> None:
        pass

    def show_sentence(self, text: str) -> None:
        pass


class _Lines:
    def __init__(self, title: str, last: int | None, out: IO[str]) -> None:
        self._title, self._last, self._out = title, last, out
        self._written_at: float | None = None

    def update(
        self, now: float, position: Position, num_workers: int, metrics: Mapping[str, Any]
    ) -> None:
        is_last = position.step == self._last
        if not is_last and self._written_at is not None and now - self._written_at < LINE_EVERY_S:
            return
        self._written_at = now
        step = f"{position.step}" if self._last is None else f"{position.step}/{self._last}"
        self.show_sentence(" ".join([f"step {step}", *_words(num_workers, metrics)]))

    def show_sentence(self, text: str) -> None:
        print(f"{self._title}: {text}", file=self._out, flush=True)


class _RichBar:
    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def update(
        self, now: float, position: Position, num_workers: int, metrics: Mapping[str, Any]
    ) -> None:
        words = "  ".join(_words(num_workers, metrics))
        self._progress.update(self._task, completed=position.step, words=words)

    def show_sentence(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)


@contextlib.contextmanager
def _rich_bar(title: str, first: int, last: int | None, out: IO[str]) -> Iterator[_RichBar]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with Progress(*columns, console=Console(file=out), transient=False) as progress:
        task = progress.add_task(title, total=last, completed=first, words="")
        yield _RichBar(progress, task)


def _words(num_workers: int, metrics: Mapping[str, Any]) -> list[str]:
    numbers = [
        f"{name} {value:.4g}"
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return [workers, *numbers[:_MAX_METRICS]]
