"""Measures the steps of two groups while a third one joins over a slow link, by both ways."""

from __future__ import annotations

import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.children.healing_ends import MATRIX_BYTES
from tools.benchmarks.options import gb_option, json_option, num_matrices_in
from tools.benchmarks.processes import (
    START_TIMEOUT_S,
    Child,
    lighthouse_address,
    program,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over

_TIMEOUT_S = 900.0
_ENV = {"OMP_NUM_THREADS": "1"}
_NUM_ORDINARY = 20
# The step of the heal, the next one, which waits for its end, and some that are as before.
_NUM_AFTER = 5
_COLUMNS = (
    Column("way", "way"),
    Column("ordinary_ms", "step before ms", 0),
    Column("median_ratio", "median while it joins, before = 1", 2),
    Column("longest_ratio", "longest, before = 1", 1),
    Column("lost_s", "members lose s", 2),
    Column("joined_s", "it takes part after s", 1),
    Column("is_equal", "bitwise equal"),
)


def measure(num_matrices: int, mb_per_s: float, step_s: float, catch_up: bool) -> dict[str, Any]:
    """One join of a group to two others, whose steps are timed."""
    with ExitStack() as stack:
        lighthouse = stack.enter_context(start_lighthouse(min_replicas=1, join_timeout_ms=600_000))
        address = lighthouse_address(lighthouse)

        def start(name: str) -> Child:
            flags = [f"--matrices={num_matrices}", f"--lighthouse={address}", f"--name={name}"]
            flags += [f"--compute-s={step_s}", "--copies", *(["--catch-up"] if catch_up else [])]
            return stack.enter_context(
                Child(program("tools.benchmarks.children.stall_group", *flags), _ENV)
            )

        link_flag = f"--bytes-per-s={mb_per_s * 1e6}"
        link = stack.enter_context(
            Child(program("tools.benchmarks.children.healing_link", link_flag), _ENV)
        )
        link.read_line(START_TIMEOUT_S)
        groups = [start(name) for name in "abc"]
        urls = [each.read_line(START_TIMEOUT_S).split()[1] for each in groups]
        *members, joiner = groups
        for member, url in zip(members, urls, strict=False):
            link.send(url)
            member.send(link.read_line(START_TIMEOUT_S))

        def ask(line: str, *asked: Child) -> list[Any]:
            for each in asked:
                each.send(line)
            return [json.loads(each.read_line(_TIMEOUT_S)) for each in asked]

        ask("meet 2 5", *members)  # the first ones do not count
        ordinary = ask(f"steps {_NUM_ORDINARY}", *members)
        for each in members:
            each.send(f"meet 3 {_NUM_AFTER}")
        joiner.send(urls[-1])
        (joined,) = ask(f"steps {1 + _NUM_AFTER}", joiner)
        steps = [json.loads(each.read_line(_TIMEOUT_S)) for each in members]
        for each in groups:
            each.send("digest")
        digests = {each.read_line(_TIMEOUT_S) for each in groups}
        before_ms = statistics.median(step["total"] for step in ordinary[0])
        during = [step["total"] for step in steps[0]]
        return {
            "way": "catch-up" if catch_up else "heal alone",
            "ordinary_ms": before_ms,
            "longest_before_ms": max(step["total"] for step in ordinary[0]),
            "median_ratio": statistics.median(during) / before_ms,
            "longest_ratio": max(during) / before_ms,
            "lost_s": sum(each - before_ms for each in during) / 1000,
            "joined_s": joined[0]["total"] / 1000,
            "num_steps": len(during),
            "is_equal": "yes" if len(digests) == 1 else "NO",
            "steps": during,
        }


@click.command(context_settings={"show_default": True})
@gb_option
@click.option("--mb-per-s", type=click.FloatRange(1.0), default=20.0, help="What the link carries.")
@click.option("--step-s", type=click.FloatRange(0.0), default=1.0, help="Of a step's computing.")
@json_option
def main(gb: float, mb_per_s: float, step_s: float, json_file: Path | None) -> None:
    """A group joins two others over a slow link: how long do their steps take meanwhile?"""
    num_matrices = num_matrices_in(gb)
    num_bytes = num_matrices * MATRIX_BYTES
    result = Result(
        name="catch_up",
        title=f"Steps of two groups while a third one takes {num_bytes / 1e9:.2f} GB, "
        f"{mb_per_s:g} MB/s",
        columns=_COLUMNS,
        settings={
            "bytes": num_bytes,
            "mb_per_s": mb_per_s,
            "step_s": step_s,
            "cores": os.cpu_count(),
        },
        notes=[
            "all but 17 kB of the state is frozen; both sources are behind one link; what is",
            "healed is copied into the tensors; members lose: time beyond that of ordinary steps,",
            "from the start of the third group until all have trained five more steps together",
        ],
    )
    result.rows += [measure(num_matrices, mb_per_s, step_s, way) for way in (False, True)]
    hand_over(result, json_file)


if __name__ == "__main__":
    sys.exit(main())
