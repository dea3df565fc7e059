"""Measures what a heal over a slow link costs the healthy side, step by step."""

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

_TIMEOUT_S = 600.0
_ENV = {"OMP_NUM_THREADS": "1"}
_NUM_ORDINARY = 50
# The next step waits for the group that heals; a few more show that all is as before.
_NUM_AFTER = 4
_COLUMNS = (
    Column("join_timeout_s", "join timeout s"),
    Column("ordinary_ms", "ordinary step ms"),
    Column("clone_ms", "plain clone ms", 0),
    Column("heal_ms", "step of the heal ms", 0),
    Column("update_ms", "of which update ms", 0),
    Column("next_wait_ms", "next step waits ms", 0),
    Column("transfer_ms", "joiner heals in ms", 0),
)


def measure(num_matrices: int, mb_per_s: float, join_timeout_s: float) -> dict[str, Any]:
    """One heal of a group that joins another one, whose steps are timed."""
    with ExitStack() as stack:
        lighthouse = stack.enter_context(
            start_lighthouse(min_replicas=1, join_timeout_ms=int(join_timeout_s * 1000))
        )
        address = lighthouse_address(lighthouse)

        def start(name: str) -> Child:
            flags = (f"--matrices={num_matrices}", f"--lighthouse={address}", f"--name={name}")
            return stack.enter_context(
                Child(program("tools.benchmarks.children.stall_group", *flags), _ENV)
            )

        link_flag = f"--bytes-per-s={mb_per_s * 1e6}"
        link = stack.enter_context(
            Child(program("tools.benchmarks.children.healing_link", link_flag), _ENV)
        )
        link.read_line(START_TIMEOUT_S)
        source, joiner = start("a"), start("b")
        urls = [each.read_line(START_TIMEOUT_S).split()[1] for each in (source, joiner)]
        link.send(urls[0])
        source.send(link.read_line(START_TIMEOUT_S))

        def ask(group: Child, line: str) -> Any:
            group.send(line)
            return json.loads(group.read_line(_TIMEOUT_S))

        ask(source, "steps 5")  # the first ones do not count
        ordinary = ask(source, f"steps {_NUM_ORDINARY}")
        clone_s = ask(source, "clone")
        source.send(f"meet 2 {_NUM_AFTER}")
        joiner.send(urls[1])  # from here on it has a manager, and a job that begins would wait
        joined = ask(joiner, "steps 1")
        joiner.send(f"steps {_NUM_AFTER}")
        steps = json.loads(source.read_line(_TIMEOUT_S))
        heal, after, *_ = steps[-_NUM_AFTER - 1 :]
        return {
            "join_timeout_s": join_timeout_s,
            "ordinary_ms": statistics.median(step["total"] for step in ordinary),
            "longest_ordinary_ms": max(step["total"] for step in ordinary),
            "clone_ms": clone_s * 1000,
            "heal_ms": heal["total"],
            "update_ms": heal["update"],
            "next_wait_ms": after["wait"],
            "transfer_ms": joined[0]["total"],
            "steps": steps[-_NUM_AFTER - 1 :],
        }


@click.command(context_settings={"show_default": True})
@gb_option
@click.option(
    "--mb-per-s", type=click.FloatRange(1.0), default=100.0, help="What the link carries."
)
@click.option("--join-timeout-s", type=click.FloatRange(0.1), multiple=True, default=(60.0, 2.0),
              help="Of the lighthouse; may be repeated.")  # fmt: skip
@json_option
def main(
    gb: float, mb_per_s: float, join_timeout_s: tuple[float, ...], json_file: Path | None
) -> None:
    """A group joins another over a slow link: how long do the healthy one's steps take?"""
    num_matrices = num_matrices_in(gb)
    num_bytes = num_matrices * MATRIX_BYTES
    result = Result(
        name="stall",
        title=f"Steps of a group that {num_bytes / 1e9:.2f} GB are healed from, {mb_per_s:g} MB/s",
        columns=_COLUMNS,
        settings={"bytes": num_bytes, "mb_per_s": mb_per_s, "cores": os.cpu_count()},
        notes=[
            "plain clone: of the state, into fresh memory in huge pages; update: a vote, a copy of",
            "what is not fetched yet, and the optimizer; then the quorum waits for the group that",
            "heals, at most the join timeout, because it could never catch up with moving weights",
        ],
    )
    result.rows += [measure(num_matrices, mb_per_s, limit_s) for limit_s in join_timeout_s]
    hand_over(result, json_file)


if __name__ == "__main__":
    sys.exit(main())
