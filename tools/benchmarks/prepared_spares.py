"""Measures how soon a killed group is replaced: by a new process, and by a prepared spare."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
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

RESTART, SPARE, FOLLOWS = "a new process", "a spare", "a spare that follows"
WAYS = (RESTART, SPARE, FOLLOWS)
_TIMEOUT_S = 600.0
_ENV = {"OMP_NUM_THREADS": "1", "TORCHFT_LOG": "info"}
_NUM_CALM = 40
# Steps with the whole world, after the first one.
_NUM_AFTER = 5
_CALM_S = 0.5
_COLUMNS = (
    Column("way", "the killed group is replaced by"),
    Column("calm_ms", "step before ms", 1),
    Column("standing_ratio", "step while it stands by, before = 1", 3),
    Column("whole_s", "kill -> whole world s", 2),
    Column("longest_ms", "longest step of the others ms", 0),
    Column("is_equal", "bitwise equal"),
)


def measure(num_matrices: int, step_s: float, way: str, refresh_s: float = 5.0) -> dict[str, Any]:
    """Kill one group of three, and wait until three contribute again."""
    with ExitStack() as stack:
        lighthouse = stack.enter_context(start_lighthouse(min_replicas=1, join_timeout_ms=600_000))
        address = lighthouse_address(lighthouse)

        def start(name: str, *, is_spare: bool = False) -> Child:
            flags = [f"--matrices={num_matrices}", f"--lighthouse={address}", f"--name={name}"]
            flags += [f"--compute-s={step_s}", "--copies"]
            flags += ["--catch-up"] * (way == FOLLOWS) + ["--spare"] * is_spare
            env = {**_ENV, "TORCHFT_SPARE_REFRESH_SEC": str(refresh_s)}
            command = program("tools.benchmarks.children.stall_group", *flags)
            child = stack.enter_context(Child(command, env))
            child.send("")  # it is reached where it is
            return child

        members = [start(name) for name in "abc"]
        _ask("meet 3 5", *members)  # the first ones do not count
        calm_ms = _median(_ask(f"steps {_NUM_CALM}", *members))
        standing_ms = calm_ms
        if way != RESTART:
            newcomer = start("d", is_spare=True)
            newcomer.read_line(START_TIMEOUT_S)  # its address
            newcomer.send(f"join d {_NUM_AFTER}")
            if way == FOLLOWS:
                _await_state(newcomer, members)
            else:
                _ask(f"steps {_NUM_CALM}", *members)
            standing_ms = _median(
                _ask(f"steps {max(_NUM_CALM, int(2 * refresh_s / step_s))}", *members)
            )
        *others, victim = members
        for each in others:
            each.send(f"join d {_NUM_AFTER}")
        victim.send("steps 100000")
        time.sleep(_CALM_S)
        killed_at = time.monotonic()
        for process in victim.children():
            process.kill()
        victim.kill()
        if way == RESTART:
            newcomer = start("d")
            newcomer.read_line(START_TIMEOUT_S)
            newcomer.send(f"join d {_NUM_AFTER}")
        theirs = [_answer(each) for each in others]
        joined = _answer(newcomer)
        whole_at = next(each["at"] for each in joined if each["contribute"] == 3)
        for each in (*others, newcomer):
            each.send("digest")
        digests = {_line(each) for each in (*others, newcomer)}
        return {
            "way": way,
            "calm_ms": calm_ms,
            "standing_ratio": standing_ms / calm_ms,
            "whole_s": whole_at - killed_at,
            "longest_ms": max(step["total"] for steps in theirs for step in steps),
            "is_equal": "yes" if len(digests) == 1 else "NO",
        }


def _ask(line: str, *asked: Child) -> list[Any]:
    for each in asked:
        each.send(line)
    return [_answer(each) for each in asked]


def _line(child: Child) -> str:
    """The next line that is an answer."""
    while (line := child.read_line(_TIMEOUT_S)).split()[0] in ("ready", "followed"):
        pass
    return line


def _answer(child: Child) -> list[dict[str, float]]:
    answer: list[dict[str, float]] = json.loads(_line(child))
    return answer


def _median(answers: list[list[dict[str, float]]]) -> float:
    return statistics.median(step["total"] for step in answers[0])


def _await_state(newcomer: Child, members: list[Child]) -> None:
    """Let the members train until the spare has what does not change."""
    while not newcomer.wait_for_output(0.0):
        _ask("steps 10", *members)
    assert newcomer.read_line(START_TIMEOUT_S) == "followed"


@click.command(context_settings={"show_default": True})
@gb_option
@click.option("--step-s", type=click.FloatRange(0.001), default=0.1, help="Of a step's computing.")
@click.option("--refresh-s", type=click.FloatRange(0.1), default=5.0, help="Of a spare's looks.")
@json_option
def main(gb: float, step_s: float, refresh_s: float, json_file: Path | None) -> None:
    """One of three groups is killed: how long until three groups train again?"""
    num_matrices = num_matrices_in(gb)
    num_bytes = num_matrices * MATRIX_BYTES
    result = Result(
        name="prepared_spares",
        title=f"A group of three with a state of {num_bytes / 1e9:.2f} GB is killed",
        columns=_COLUMNS,
        settings={
            "bytes": num_bytes,
            "step_s": step_s,
            "refresh_s": refresh_s,
            "cores": os.cpu_count(),
        },
        notes=[
            "all but 17 kB of the state is frozen; what is healed is copied into the tensors;",
            "the whole world: three groups contribute to a committed step",
        ],
    )
    result.rows += [measure(num_matrices, step_s, way, refresh_s) for way in WAYS]
    hand_over(result, json_file)


if __name__ == "__main__":
    sys.exit(main())
