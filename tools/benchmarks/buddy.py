"""Measures what copies of its state cost a group, with and without a process that holds them."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.children.memory_trainer import peak_bytes
from tools.benchmarks.options import gb_option, json_option
from tools.benchmarks.processes import (
    START_TIMEOUT_S,
    Child,
    lighthouse_address,
    program,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over
from torchft_svc.coordination import LighthouseClient

_TIMEOUT_S = 900.0
_ENV = {"OMP_NUM_THREADS": "1"}
_WARM_UP = 5
_COLUMNS = (
    Column("way", "way"),
    Column("median_ms", "median step ms", 1),
    Column("longest_ms", "longest ms", 1),
    Column("mean_ms", "mean ms", 1),
    Column("behind", "steps back"),
    Column("group_gb", "group's peak GB", 2),
    Column("holder_gb", "holder's peak GB", 2),
)


def measure(gb: float, step_s: float, every: int, steps: int, way: str) -> dict[str, Any]:
    """The steps of a group, with copies ``off``, without a holder (``idle``), or ``held``."""
    with ExitStack() as stack:
        lighthouse = stack.enter_context(start_lighthouse(min_replicas=1, join_timeout_ms=60_000))
        address = lighthouse_address(lighthouse)
        flags = [f"--lighthouse={address}", f"--num-bytes={int(gb * 1e9)}"]
        flags += [f"--compute-s={step_s}", f"--every={0 if way == 'off' else every}"]
        group = stack.enter_context(
            Child(program("tools.benchmarks.children.buddy_group", *flags), _ENV)
        )
        holder = None
        if way == "held":
            flags = [f"--lighthouse={address}", "--advertise-host=127.0.0.1"]
            holder = stack.enter_context(Child(program("torchft_svc.buddy", *flags), _ENV))
            holder.read_line(START_TIMEOUT_S)
        group.read_line(START_TIMEOUT_S)

        def train(num: int) -> list[float]:
            group.send(f"steps {num}")
            times: list[float] = json.loads(group.read_line(_TIMEOUT_S))
            return times

        train(_WARM_UP)
        if holder is not None:
            time.sleep(1.5)  # it has reported once, and waits for the first copy
            train(every)
        times = train(steps)
        with LighthouseClient(address, timedelta(seconds=5)) as client:
            (job,) = client.status()
        return {
            "way": way,
            "median_ms": statistics.median(times),
            "longest_ms": max(times),
            "mean_ms": statistics.mean(times),
            "behind": "-" if holder is None else job.committed_step - job.copy_step,
            "group_gb": peak_bytes(group.pid) / 1e9,
            "holder_gb": 0.0 if holder is None else peak_bytes(holder.pid) / 1e9,
            "steps": times,
        }


@click.command(context_settings={"show_default": True})
@gb_option
@click.option("--step-s", type=click.FloatRange(0.0), default=0.5, help="Of a step's computing.")
@click.option("--every", type=click.IntRange(1), default=10, help="Steps between two copies.")
@click.option("--steps", type=click.IntRange(10), default=60, help="Steps that are measured.")
@json_option
def main(gb: float, step_s: float, every: int, steps: int, json_file: Path | None) -> None:
    """A group trains, and another process holds copies of its state: what does a step cost?"""
    result = Result(
        name="buddy",
        title=f"Steps of a group with a state of {gb:g} GB, and a copy of it each {every} steps",
        columns=_COLUMNS,
        settings={"gb": gb, "step_s": step_s, "every": every, "cores": os.cpu_count()},
        notes=[
            "each step changes the whole state; idle: copies are on, and no process holds them;",
            "held: a process on the same machine does",
        ],
    )
    result.rows += [measure(gb, step_s, every, steps, way) for way in ("off", "idle", "held")]
    hand_over(result, json_file)


if __name__ == "__main__":
    sys.exit(main())
