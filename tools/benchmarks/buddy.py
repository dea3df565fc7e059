"""Measures what copies of its state cost a group, with and without a process that holds them."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.children.memory_trainer import peak_bytes
from tools.benchmarks.options import json_option
from tools.benchmarks.processes import (
    START_TIMEOUT_S,
    Child,
    lighthouse_address,
    program,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over
from torchft_svc.coordination import LighthouseClient
from torchft_svc.core.quorum.lighthouse.overview import JobStatus

_TIMEOUT_S = 900.0
_ENV = {"OMP_NUM_THREADS": "1"}
_COLUMNS = (
    Column("way", "way"),
    Column("step_ms", "step ms", 1),
    Column("ratio", "to off", 3),
    Column("median_ms", "median ms", 1),
    Column("longest_ms", "longest ms", 1),
    Column("copy_ms", "a copy ms", 1),
    Column("behind", "steps back"),
    Column("group_gb", "group's peak GB", 2),
    Column("holder_gb", "holder's peak GB", 2),
)
WAYS = ("off", "idle", "held")


class CopiedGroup(AbstractContextManager["CopiedGroup"]):
    """A group with a lighthouse of its own; its copies are ``off``, ``idle`` or ``held``."""

    def __init__(self, way: str, gb: float, step_s: float, every: int) -> None:
        self.way = way
        self._every = every
        self._num_steps = 0
        self.blocks: list[list[float]] = []
        self._copy_ms: list[float] = []
        with ExitStack() as stack:
            lighthouse = stack.enter_context(
                start_lighthouse(min_replicas=1, join_timeout_ms=60_000)
            )
            self._address = lighthouse_address(lighthouse)
            where = f"--lighthouse={self._address}"
            flags = [where, f"--num-bytes={int(gb * 1e9)}", f"--compute-s={step_s}"]
            flags.append(f"--every={0 if way == 'off' else every}")
            self._group = stack.enter_context(
                Child(program("tools.benchmarks.children.buddy_group", *flags), _ENV)
            )
            self._holder = None
            if way == "held":
                flags = [where, "--advertise-host=127.0.0.1"]
                self._holder = stack.enter_context(
                    Child(program("torchft_svc.buddy", *flags), _ENV)
                )
                self._holder.read_line(START_TIMEOUT_S)
            self._group.read_line(START_TIMEOUT_S)
            self._stack = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def warm_up(self) -> None:
        """Train until a copy is held, if one will be: memory for it is allocated then."""
        self._train(self._every + 1)
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._holder is not None and not self._status().copy_step:
            if time.monotonic() > deadline:
                raise self._holder.error(f"held no copy within {START_TIMEOUT_S:g} s")
            self._train(self._every)

    def train_block(self) -> None:
        """Train as many steps as have one copy among them."""
        first = self._num_steps
        times = self._train(self._every)
        usual = statistics.median(times)
        self._copy_ms += [
            each - usual
            for number, each in enumerate(times, first)
            if number and number % self._every == 0
        ]
        self.blocks.append(times)

    def _train(self, num: int) -> list[float]:
        self._group.send(f"steps {num}")
        self._num_steps += num
        times: list[float] = json.loads(self._group.read_line(_TIMEOUT_S))
        return times

    def _status(self) -> JobStatus:
        with LighthouseClient(self._address, timedelta(seconds=5)) as client:
            (job,) = client.status()
        return job

    def row(self, off: CopiedGroup) -> dict[str, Any]:
        """What was measured, beside the blocks of ``off`` that were between these."""
        ratios = [
            statistics.fmean(mine) / statistics.fmean(theirs)
            for mine, theirs in zip(self.blocks, off.blocks, strict=True)
        ]
        steps = [each for block in self.blocks for each in block]
        job, holder = self._status(), self._holder
        return {
            "way": self.way,
            "step_ms": statistics.median(map(statistics.fmean, self.blocks)),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "median_ms": statistics.median(steps),
            "longest_ms": max(steps),
            "copy_ms": statistics.median(self._copy_ms),
            "behind": None if holder is None else job.committed_step - job.copy_step,
            "group_gb": peak_bytes(self._group.pid) / 1e9,
            "holder_gb": None if holder is None else peak_bytes(holder.pid) / 1e9,
            "steps": self.blocks,
        }


def measure(gb: float, step_s: float, every: int, blocks: int) -> list[dict[str, Any]]:
    """One row for each way; their blocks of steps take turns."""
    with ExitStack() as stack:
        groups = [stack.enter_context(CopiedGroup(way, gb, step_s, every)) for way in WAYS]
        for group in groups:
            group.warm_up()
        for _ in range(blocks):
            for group in groups:
                group.train_block()
        return [group.row(groups[0]) for group in groups]


@click.command(context_settings={"show_default": True})
@click.option("--gb", type=click.FloatRange(0.01), default=0.5, help="Size of the state in GB.")
@click.option("--step-s", type=click.FloatRange(0.0), default=0.5, help="Of a step's computing.")
@click.option("--every", type=click.IntRange(2), default=10, help="Steps between two copies.")
@click.option("--blocks", type=click.IntRange(1), default=5,
              help="Blocks of so many steps for each way, in turns.")  # fmt: skip
@json_option
def main(gb: float, step_s: float, every: int, blocks: int, json_file: Path | None) -> None:
    """A group trains, and another process holds copies of its state: what does a step cost?"""
    result = Result(
        name="buddy",
        title=f"Steps of a group with a state of {gb:g} GB, and a copy of it each {every} steps",
        columns=_COLUMNS,
        settings={
            "gb": gb,
            "step_s": step_s,
            "every": every,
            "blocks": blocks,
            "cores": os.cpu_count(),
        },
        notes=[
            "each step changes the whole state; idle: copies are on, and no process holds them; "
            "held: a process on the same machine does",
            "a block has one copy; its step time is the mean over its steps, and 'to off' the "
            "median over neighbouring blocks",
            "a copy: how much longer than the median of its block the step takes that is copied",
        ],
    )
    result.rows += measure(gb, step_s, every, blocks)
    hand_over(result, json_file)


if __name__ == "__main__":
    sys.exit(main())
