"""Explores seeds for a given time on all cores: `python -m tools.sim --seconds 600`."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import click

from tools.sim.explore import describe, run_launch_seed, run_seed
from tools.sim.fleet import RunOutcome
from tools.sim.launch_fleet import LaunchOutcome

# How often the line of progress is written anew.
PROGRESS_S = 0.5


@click.command()
@click.option("--seed", type=int, default=None, help="The first seed (default: a fresh one).")
@click.option("--count", type=int, default=None, help="How many seeds at most.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="For how long.")
@click.option(
    "--groups", type=int, default=None, help="Groups, or nodes, in each run (default: drawn)."
)
@click.option("--launcher", is_flag=True, help="Runs of the elastic launcher, not of groups.")
@click.option("--processes", type=int, default=os.cpu_count() or 1, help="Default: all cores.")
def main(
    seed: int | None,
    count: int | None,
    seconds: float,
    groups: int | None,
    launcher: bool,
    processes: int,
) -> None:
    """Simulate fleets, or launched runs, with faults; exit with 1 and a trace when a rule falls."""
    first = time.time_ns() // 1_000_000 if seed is None else seed
    seeds = range(first, first + count) if count is not None else itertools.count(first)
    click.echo(f"seeds from {first} on, {processes} processes, {seconds:g} s at most", err=True)
    began_at = time.monotonic()
    progress = _Progress(began_at)
    pending: set[Future[Any]] = set()
    run: Callable[..., Any] = run_launch_seed if launcher else run_seed
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        for each in seeds:
            if time.monotonic() - began_at >= seconds:
                break
            pending.add(pool.submit(run, each, groups))
            if len(pending) >= 2 * processes:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                _look_at(done, pending, progress)
        _look_at(pending, set(), progress)
    progress.end()


def _look_at(
    done: Iterable[Future[Any]], pending: Iterable[Future[Any]], progress: _Progress
) -> None:
    """Count what is done; a fall ends everything."""
    for future in done:
        outcome = future.result()
        progress.add(outcome)
        if outcome.fell is not None:
            for other in pending:
                other.cancel()
            progress.end()
            click.echo(describe(outcome))
            sys.exit(1)


class _Progress:
    """A line that says how far it is."""

    def __init__(self, began_at: float) -> None:
        self._began_at = began_at
        self._shown_at = began_at
        self._num_seeds = 0
        self._num_events = 0
        self._num_commits = 0
        self._num_worlds = 0
        self._virtual_s = 0.0

    def add(self, outcome: RunOutcome | LaunchOutcome) -> None:
        self._num_seeds += 1
        self._num_events += outcome.num_events
        if isinstance(outcome, RunOutcome):
            self._num_commits += outcome.num_commits
        else:
            self._num_worlds += outcome.num_worlds
        self._virtual_s += outcome.virtual_s
        if time.monotonic() - self._shown_at >= PROGRESS_S:
            self._shown_at = time.monotonic()
            click.echo(f"\r{self._line()}", nl=False, err=True)

    def end(self) -> None:
        click.echo(f"\r{self._line()}", err=True)

    def _line(self) -> str:
        per_s = self._num_events / max(time.monotonic() - self._began_at, 0.001)
        made = (
            f"{self._num_worlds:,} worlds" if self._num_worlds else f"{self._num_commits:,} commits"
        )
        return (
            f"{self._num_seeds} seeds, {self._num_events:,} events ({per_s:,.0f}/s), "
            f"{made}, {self._virtual_s / 3600:.1f} hours of their time "
        )


if __name__ == "__main__":
    main()
