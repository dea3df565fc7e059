"""Measures what the loss of a worker costs its replica group: its peers survive, or are restarted.

Two groups of two workers train `examples/train_hsdp.py`, each with a launcher of its own.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from tools.benchmarks.courses import Course
from tools.benchmarks.options import json_option
from tools.benchmarks.processes import (
    Child,
    ChildError,
    lighthouse_address,
    printed_lines,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over

NUM_WORKERS = 2
HIT, OTHER = 1, 0  # replica groups
_EXAMPLE = ("examples/train_hsdp.py", "--steps=1000000", "--print-every=1")
_PRELOAD = "torch,torch._dynamo,torch.distributed.fsdp,torchft_svc.preload"
_STEP = re.compile(r"step (\d+) loss \S+ groups (\d) rank (\d) pid (\d+) ")
_PATIENCE_S = 150.0
_CALM_S = (1.0, 2.0)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_COLUMNS = (
    Column("launcher", "torchft-run"),
    Column("killed", "SIGKILL to"),
    Column("kills", "kills", 0),
    Column("back_s", "group trains again, s", 2),
    Column("back_worst_s", "worst", 2),
    Column("gain", "hard / this", 1),
    Column("other_s", "the other stands still, s", 2),
    Column("other_worst_s", "worst", 2),
    Column("ended", "ended by a kill", 0),
)


@dataclass(frozen=True, slots=True)
class Side:
    """A policy of the launcher; ``survives``: the program lives through the loss of a peer.

    ``settle_s``: before the first kill, until its fork server has imported all.
    """

    name: str
    arguments: tuple[str, ...]
    survives: bool = False
    settle_s: float = 0.0


HARD = "hard"
SIDES = (
    Side(HARD, ("--restart-policy=hard",)),
    Side("soft-replace", ("--restart-policy=soft-replace",), survives=True),
    Side(
        "soft-replace, warm start",
        ("--restart-policy=soft-replace", "--warm-start", f"--warm-start-preload={_PRELOAD}"),
        survives=True,
        settle_s=20.0,
    ),
)
_NAMES = [side.name for side in SIDES]


@dataclass(frozen=True, slots=True)
class Step:
    """A step that a worker has committed, and when that was read."""

    step: int
    num_groups: int
    rank: int
    pid: int
    at_s: float


@dataclass(slots=True)
class Groups:
    """Both groups of a job, and the last step of each of their workers."""

    agents: dict[int, Child]
    last: dict[tuple[int, int], Step] = field(default_factory=dict)

    def steps(self, timeout_s: float) -> Iterator[tuple[int, Step]]:
        """Yield each step with the group whose worker printed it, for ``timeout_s``."""
        for group, line in printed_lines(self.agents, timeout_s):
            if match := _STEP.match(line):
                number, num_groups, rank, pid = map(int, match.groups())
                step = Step(number, num_groups, rank, pid, time.monotonic())
                yield group, step
                self.last[group, step.rank] = step

    def train_for(self, seconds: float) -> None:
        for _ in self.steps(seconds):
            pass

    def wait_for_all(self) -> None:
        """Wait until all workers have made a step with both groups."""
        seen: set[tuple[int, int]] = set()
        for group, step in self.steps(_PATIENCE_S):
            if step.num_groups == 2:
                seen.add((group, step.rank))
            if len(seen) == 2 * NUM_WORKERS:
                return
        raise ChildError(f"only {sorted(seen)} train together")

    def kill(self, rank: int) -> tuple[float, float]:
        """How long until the group trains with the other one again, and for how long the other
        stood still meanwhile."""
        victim = self.last[HIT, rank].pid
        killed_s = time.monotonic()
        psutil.Process(victim).send_signal(signal.SIGKILL)
        begun: dict[int, Step] = {}  # the first steps of the group as a whole
        before, gap_s = self.last[OTHER, 0], 0.0
        for group, step in self.steps(_PATIENCE_S):
            if group == OTHER and step.rank == 0:
                gap_s, before = max(gap_s, step.at_s - before.at_s), step
            elif group == HIT and step.num_groups == 2:
                if step.rank == rank and step.pid != victim:
                    begun.setdefault(rank, step)
                new = begun.get(rank)
                if new is not None and step.rank != rank and step.step >= new.step:
                    begun[step.rank] = step
            if len(begun) == NUM_WORKERS:
                return max(each.at_s for each in begun.values()) - killed_s, gap_s
        raise ChildError("the group did not train again")


@dataclass(slots=True)
class GroupCourse(Course[Groups]):
    """One policy; the workers that are killed have one rank after the other."""

    side: Side
    dice: random.Random
    ranks: tuple[int, ...]
    step_s: float
    backs_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    others_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def name(self) -> str:
        return self.side.name

    @contextlib.contextmanager
    def start(self) -> Iterator[Groups]:
        with ExitStack() as stack:
            lighthouse = stack.enter_context(start_lighthouse(min_replicas=1))
            address = lighthouse_address(lighthouse)
            agents = {}
            for group in (OTHER, HIT):
                child = Child(_command(self, group, address), _environment(group, address))
                agents[group] = stack.enter_context(child)
            groups = Groups(agents)
            groups.wait_for_all()
            groups.train_for(self.side.settle_s)
            yield groups

    def wait(self, job: Groups) -> None:
        job.train_for(self.dice.uniform(*_CALM_S))
        job.wait_for_all()

    def hit(self, job: Groups) -> str:
        rank = self.ranks[(self.num_hits - 1) % len(self.ranks)]
        back_s, other_s = job.kill(rank)
        self.backs_s[rank].append(back_s)
        self.others_s[rank].append(other_s)
        return (
            f"rank {rank}: trains after {back_s:.2f} s, the other stood still for {other_s:.2f} s"
        )

    def row(self, rank: int, hard: GroupCourse | None) -> dict[str, Any]:
        row: dict[str, Any] = {
            "launcher": self.side.name,
            "killed": f"rank {rank}",
            "kills": len(range(self.ranks.index(rank), self.num_hits, len(self.ranks))),
            "ended": self.num_ended,
        }
        if backs_s := self.backs_s[rank]:
            row |= {
                "back_s": statistics.median(backs_s),
                "back_worst_s": max(backs_s),
                "other_s": statistics.median(self.others_s[rank]),
                "other_worst_s": max(self.others_s[rank]),
                "backs_s": backs_s,
                "others_s": self.others_s[rank],
            }
            if hard is not None and hard.backs_s[rank]:
                row["gain"] = statistics.median(hard.backs_s[rank]) / row["back_s"]
        return row


def _command(course: GroupCourse, group: int, address: str) -> list[str]:
    options = [
        *course.side.arguments,
        f"--nproc-per-node={NUM_WORKERS}",
        "--max-restarts=1000",
        "--max-soft-failures=1000",
        "--rdzv-backend=lighthouse",
        f"--rdzv-endpoint={address}",
        f"--rdzv-id=group{group}",
        "--local-addr=localhost",
        *_EXAMPLE,
        f"--step-s={course.step_s}",
        *(["--survive"] if course.side.survives else []),
    ]
    return [sys.executable, "-W", "ignore", "-m", "torchft_svc.elastic.run", *options]


def _environment(group: int, address: str) -> dict[str, str]:
    return {**_ENVIRONMENT, "TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": str(group)}


@click.command(context_settings={"show_default": True})
@click.option("--kills", type=click.IntRange(1), default=3, help="Kills of each rank.")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(0, NUM_WORKERS - 1),
    multiple=True,
    default=range(NUM_WORKERS),
    help="Whom to kill.",
)
@click.option("--step-s", type=click.FloatRange(0), default=0.0, help="Added to each step.")
@click.option("--side", "sides", type=click.Choice(_NAMES), multiple=True, default=_NAMES)
@click.option("--seed", type=int, default=0, help="Draws the moments.")
@json_option
def main(
    kills: int,
    ranks: tuple[int, ...],
    step_s: float,
    sides: tuple[str, ...],
    seed: int,
    json_file: Path | None,
) -> None:
    """SIGKILL a worker of a replica group, and look how long it takes until the group trains."""
    result = Result(
        name="replica_groups",
        title=f"A worker of a replica group is lost: two groups of {NUM_WORKERS} workers",
        columns=_COLUMNS,
        settings={"kills": kills, "step_s": step_s, "seed": seed},
        notes=[
            "group trains again: from the kill until all workers of its group have committed a "
            "step with the other group",
            "hard / this: by how much the median of the hard policy is longer",
            "the other stands still: its longest time between two steps until then",
            "ended by a kill: of both ranks together",
        ],
    )
    dice = random.Random(seed)
    chosen = [side for side in SIDES if side.name in sides]
    courses = [GroupCourse(kills * len(ranks), side, dice, ranks, step_s) for side in chosen]
    for course in courses:
        course.run()
    hard = next((course for course in courses if course.side.name == HARD), None)
    result.rows = [course.row(rank, hard) for course in courses for rank in ranks]
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
