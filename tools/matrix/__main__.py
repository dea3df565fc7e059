"""Runs ``python -m tools.matrix``; exit status 1 if a program did not do what is promised."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from tools.demo.orphans import MARK, end_leftovers
from tools.matrix.program import Program, decode, draw
from tools.matrix.runner import ProgramRunner
from tools.matrix.smallest import find_smallest
from tools.matrix.verdicts import Run, judge, judge_stalls, report_failure

# How long to look for a smaller program that fails, too.
_SHRINK_S = 90.0
# On a busy machine a manager needs a while to notice that its worker is dead.
_LEFTOVER_GRACE_S = 5.0


@click.command(context_settings={"show_default": True})
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    help="Start no program after this time.",
)
@click.option("--seed", type=int, default=None, help="The first seed.  [default: a new one]")
@click.option("--program", "given", default=None, help="Run only this program (JSON, as printed).")
@click.option("--shrink/--no-shrink", default=True, help="Search for a smaller program that fails.")
def main(seconds: float, seed: int | None, given: str | None, shrink: bool) -> None:
    """Draw training programs, run them with real kills, and compare their bits."""
    folder = Path(tempfile.mkdtemp(prefix="torchft-programs-"))
    os.environ[MARK] = mark = uuid.uuid4().hex  # inherited by every process that is started
    if given is not None:
        drawn: Iterator[Program] = iter([decode(json.loads(given))])
        shrink = False
    else:
        first = random.SystemRandom().randrange(10**6) if seed is None else seed
        drawn = map(draw, itertools.count(first))
    with ProgramRunner(folder) as runner:
        series = Series(runner, seconds, shrinks=shrink)
        try:
            series.run(drawn)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    leftovers = end_leftovers(mark, _LEFTOVER_GRACE_S)
    for leftover in leftovers:
        print(f"left over: {leftover}", flush=True)
    failed = series.conclude() or bool(leftovers)
    if failed:
        print(f"logs: {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    sys.exit(int(failed))


@dataclass(slots=True)
class Series:
    """Programs one after another, and what became of them; begins none after ``seconds``."""

    runner: ProgramRunner
    seconds: float
    shrinks: bool
    _began_at: float = field(default_factory=time.monotonic)
    _num_run: int = 0
    _shown: Counter[str] = field(default_factory=Counter)
    _failed: list[tuple[Program, str]] = field(default_factory=list)

    def run(self, programs: Iterator[Program]) -> None:
        for program in programs:
            self._show(program)
            if self._elapsed_s() >= self.seconds:
                break

    def _show(self, program: Program) -> None:
        began_at = time.monotonic()
        run = self.runner.run(program)
        faults = judge(run)
        self._num_run += 1
        self._shown.update([program.pg.value, program.wrapper.value, program.transport.value])
        self._shown.update(feature.value for feature in program.features)
        took_s = time.monotonic() - began_at
        outcome = "FAILED" if faults else "good"
        stall = judge_stalls(run).detail
        self._print_progress(
            f"seed {program.seed}: {outcome} after {took_s:.1f} s, {stall}: {program}"
        )
        if faults:
            self._show_failure(run)

    def _show_failure(self, run: Run) -> None:
        print(report_failure(run), flush=True)
        smallest = run.program
        if self.shrinks:
            deadline = time.monotonic() + _SHRINK_S
            smallest = find_smallest(run.program, lambda each: self._fails(each, deadline))
        if smallest != run.program:
            print(f"smaller, and fails as well: {smallest}", flush=True)
        command = f"python -m tools.matrix --program '{json.dumps(smallest.encode())}'"
        print(
            f"again: python -m tools.matrix --seconds 0 --seed {run.program.seed}\n   or: {command}"
        )
        self._failed.append((smallest, judge(run)[0].detail))

    def _fails(self, program: Program, deadline: float) -> bool | None:
        if time.monotonic() > deadline:
            return None
        return bool(judge(self.runner.run(program)))

    def conclude(self) -> bool:
        """Print what was shown; whether something failed."""
        shown = ", ".join(f"{name}: {count}" for name, count in sorted(self._shown.items()))
        print(f"{self._num_run} programs, {len(self._failed)} failed; {shown}")
        for program, detail in self._failed:
            print(f"  seed {program.seed}: {detail}: {program}")
        sys.stdout.flush()
        return bool(self._failed)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_at

    def _print_progress(self, sentence: str) -> None:
        # Not wrapped, coloured or buffered: it is read by programs, and by people as it comes.
        print(f"{self._elapsed_s():7.1f} s  {sentence}", flush=True)


if __name__ == "__main__":
    main()
