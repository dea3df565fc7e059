"""Measures what the step costs in which a group is killed: discarded, or recovered within it."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.options import json_option
from tools.benchmarks.processes import lighthouse_address, start_lighthouse
from tools.benchmarks.table import Column, Result, hand_over
from tools.chaos.fleet import Fleet
from tools.chaos.fork_server import worker_server
from tools.demo.events import Committed, Discarded

_GROUPS = {0, 1, 2}
_SAMPLES, _BATCH, _MICROBATCH = 2400, 24, 2
_NUM_PASSES = _BATCH // _MICROBATCH // len(_GROUPS)
_PATIENCE_S = 60.0
_CHOICES = {False: "discarded", True: "recover_within_step=True"}
_COLUMNS = (
    Column("choice", "the step is"),
    Column("kills", "kills", 0),
    Column("step_ms", "step, ms", 0),
    Column("gap_ms", "step with the kill, ms", 0),
    Column("gap_worst_ms", "worst", 0),
    Column("discarded", "discarded by a group", 0),
)


@contextmanager
def _fleet(server: Any, folder: Path, pass_s: float, *, recovers: bool) -> Iterator[Fleet]:
    """Three groups that train together."""
    program = {"samples": _SAMPLES, "batch": _BATCH, "microbatch": _MICROBATCH}
    with start_lighthouse(min_replicas=1) as lighthouse:
        fleet = Fleet(
            server,
            folder,
            lighthouse_address(lighthouse),
            {"program": {**program, "recovers": recovers}, "step_s": pass_s},
        )
        try:
            for group in _GROUPS:
                fleet.start(group)
            fleet.all_meet(_GROUPS)
            yield fleet
        finally:
            fleet.end()


def _kill(fleet: Fleet, dice: random.Random, pass_s: float) -> dict[str, float]:
    """Kill a group at a random moment of a step; what it costs the others, in seconds.

    ``gap``: the time between the others' last commit before the loss and their first one after it,
    of the group for which that is longest.
    """
    victim = dice.choice(sorted(_GROUPS))
    others = _GROUPS - {victim}
    fleet.await_commits(_GROUPS, _PATIENCE_S, since=fleet.events[-1].at, num_members=3)
    begun_at = max(event.at for event in fleet.events if isinstance(event, Committed))
    after_s = dice.uniform(0.1, 0.9) * _NUM_PASSES * pass_s
    time.sleep(max(0.0, begun_at + after_s - time.monotonic()))
    killed_at = fleet.kill(fleet.lives_of(victim)[0], with_manager=True)
    fleet.await_commits(others, _PATIENCE_S, since=killed_at, num_members=2)
    gaps, steps = [], []
    for group in others:
        commits = [event.at for event in fleet.of(group, Committed)]
        before = [at for at in commits if at < killed_at]
        gaps.append(min(at for at in commits if at > killed_at) - before[-1])
        steps.append(before[-1] - before[-2])
    num_discarded = sum(len(fleet.of(group, Discarded, since=killed_at)) for group in others)
    fleet.start(victim)
    fleet.all_meet(_GROUPS)
    return {"gap": max(gaps), "step": statistics.fmean(steps), "discarded": num_discarded}


@click.command(context_settings={"show_default": True})
@click.option("--kills", type=click.IntRange(1), default=5, help="Of each choice.")
@click.option("--pass-s", type=float, default=0.05, help="A pause in each pass, for its work.")
@click.option("--seed", type=int, default=0, help="Of whom is killed, and when.")
@json_option
def main(kills: int, pass_s: float, seed: int, json_file: Path | None) -> None:
    """How long the others take for the step in which a group of three is killed."""
    result = Result(
        name="lost_step",
        title=f"A step in which a group is lost: {_NUM_PASSES} passes of {1000 * pass_s:g} ms",
        columns=_COLUMNS,
        settings={"kills": kills, "pass_s": pass_s, "seed": seed},
        notes=["the first step in another quorum has 6 passes of two groups instead of 4 of three"],
    )
    with ExitStack() as stack:
        server = stack.enter_context(worker_server())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for recovers, name in _CHOICES.items():
            own = folder / str(recovers)
            own.mkdir()
            dice = random.Random(seed)
            with _fleet(server, own, pass_s, recovers=recovers) as fleet:
                costs = [_kill(fleet, dice, pass_s) for _ in range(kills)]
            gaps = [1000 * cost["gap"] for cost in costs]
            result.rows.append(
                {
                    "choice": name,
                    "kills": kills,
                    "step_ms": statistics.median(1000 * cost["step"] for cost in costs),
                    "gap_ms": statistics.median(gaps),
                    "gap_worst_ms": max(gaps),
                    "discarded": sum(cost["discarded"] for cost in costs),
                    "gaps": gaps,
                }
            )
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
