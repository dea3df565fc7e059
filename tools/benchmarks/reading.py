"""Measures what reading through an `ElasticDataLoader` costs, beside torch's own DataLoader."""

from __future__ import annotations

import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.options import json_option
from tools.benchmarks.processes import (
    START_TIMEOUT_S,
    Child,
    lighthouse_address,
    program,
    start_lighthouse,
)
from tools.benchmarks.step_time import WARM_UP_STEPS
from tools.benchmarks.table import Column, Result, hand_over

_BLOCK_TIMEOUT_S = 300.0
_KINDS = {
    "torch": "DataLoader, DistributedSampler",
    "ours": "ElasticDataLoader",
    "seeded": "the same, seed_samples=True",
    "micro": "four microbatches",
    "ordered": "the same, ordered_sums=True",
}
_FIRST = ("torch", "ours", "seeded")
_COLUMNS = (
    Column("groups", "groups", 0),
    Column("loader", "loader"),
    Column("step_ms", "step ms", 2),
    Column("ratio", "of the first", 3),
    Column("cpu_ms", "CPU ms", 2),
    Column("cpu_ratio", "of the first", 3),
)


def measure(
    kinds: tuple[str, ...],
    num_groups: int,
    steps: int,
    blocks: int,
    batch: int,
    workers: int,
    channels: int,
) -> list[dict[str, Any]]:
    """A row for each loader; the groups read through each of them in turns, in one process."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu_times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        lighthouse = stack.enter_context(start_lighthouse(min_replicas=num_groups))
        flags = [
            f"--lighthouse={lighthouse_address(lighthouse)}",
            f"--groups={num_groups}",
            f"--batch={batch}",
            f"--workers={workers}",
            f"--channels={channels}",
        ]
        groups = [
            stack.enter_context(
                Child(
                    program("tools.benchmarks.children.reading_group", *flags, f"--group={group}"),
                    {"OMP_NUM_THREADS": "1"},
                )
            )
            for group in range(num_groups)
        ]
        for group in groups:
            while group.read_line(START_TIMEOUT_S) != "ready":
                pass
        for block in range(blocks + 1):  # the first one starts the worker processes
            first = block % len(kinds)
            for kind in (*kinds[first:], *kinds[:first]):
                for group in groups:
                    group.send(f"{kind} {steps + WARM_UP_STEPS}")
                answers = [json.loads(group.read_line(_BLOCK_TIMEOUT_S)) for group in groups]
                if block:
                    mean = statistics.fmean(
                        time for answer in answers for time in answer["times"][WARM_UP_STEPS:]
                    )
                    times[kind].append(mean)
                    cpu_times[kind].append(statistics.fmean(each["cpu_ms"] for each in answers))
    rows = []
    for kind in kinds:
        ratios, cpu_ratios = (
            [mine / theirs for mine, theirs in zip(of[kind], of[kinds[0]], strict=True)]
            for of in (times, cpu_times)
        )
        row = {
            "groups": num_groups,
            "loader": _KINDS[kind],
            "step_ms": statistics.median(times[kind]),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "cpu_ms": statistics.median(cpu_times[kind]),
            "cpu_ratio": statistics.median(cpu_ratios),
            "cpu_ratios": cpu_ratios,
        }
        rows.append(row)
    return rows


@click.command(context_settings={"show_default": True})
@click.option("--groups", type=click.IntRange(1), multiple=True, default=(1, 2))
@click.option("--steps", type=click.IntRange(2), default=60, help="Steps of a block.")
@click.option("--blocks", type=click.IntRange(1), default=9, help="Blocks of each, in turns.")
@click.option("--batch", type=click.IntRange(1), default=32, help="Images of a group in a step.")
@click.option("--workers", type=click.IntRange(0), default=2, help="Worker processes of a loader.")
@click.option("--channels", type=click.IntRange(1), default=16, help="Of the small network.")
@click.option("--kind", "kinds", type=click.Choice(tuple(_KINDS)), multiple=True, default=_FIRST,
              help="What is compared, with the first one.")  # fmt: skip
@json_option
def main(
    groups: tuple[int, ...],
    steps: int,
    blocks: int,
    batch: int,
    workers: int,
    channels: int,
    kinds: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Time of a training step on small images: the same loop, read through each loader in turns."""
    result = Result(
        name="reading",
        title=f"Reading: images of 32 x 32, {batch} in a group, {workers} worker processes",
        columns=_COLUMNS,
        settings={"steps": steps, "blocks": blocks, "batch": batch, "workers": workers},
        notes=[
            "a block's step time is the mean over its steps; the ratio is the median over "
            "neighbouring blocks",
            "CPU time is that of a trainer and the worker processes of its loaders, for a step; it "
            "counts on a machine that does other work, too",
            "one group asks for each quorum; two are in a term, which asks nobody",
        ],
    )
    for num_groups in groups:
        result.rows += measure(kinds, num_groups, steps, blocks, batch, workers, channels)
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
