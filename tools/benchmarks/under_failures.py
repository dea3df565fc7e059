"""Measures a fixed amount of training under a fixed schedule of kills: how long it takes."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import random
import select
import signal
import statistics
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tools.benchmarks.options import json_option
from tools.benchmarks.processes import (
    START_TIMEOUT_S,
    Child,
    ChildError,
    lighthouse_address,
    peer_python,
    program,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN, PUBLIC, OURS = "plain DDP, torchrun", "public release", "ours"
SPARE = "ours, with a spare"
_SIDES = (PLAIN, PUBLIC, OURS, SPARE)
_COLORS = {PLAIN: "#8a8f98", PUBLIC: "#d9772b", OURS: "#3568b8", SPARE: "#2f9e63"}
# Groups that have committed one of so many last steps train.
_RECENT_STEPS = 3
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "RES_OPTIONS": "timeout:1 attempts:1",
    # With the store of its rendezvous shared, torchrun's jobs do not outlive most kills.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_MODEL = ("--width=64", "--depth=2", "--batch=16")
# A run is given up after so many times its steps, and the rest: kills come faster than it recovers.
_PATIENCE = 4.0
_PATIENCE_S = 60.0
# Sides that are measured at the same time have their kills so long after each other, if there is
# room for that in the interval: a start takes both cores for some seconds.
_APART_S = 7.0
# Points of a curve in the JSON.
_CURVE_S = 0.5
_COLUMNS = (
    Column("side", "trainer"),
    Column("every", "a kill each"),
    Column("runs", "runs", 0),
    Column("kills", "kills", 0),
    Column("wall_s", "wall time, s", 1),
    Column("wall_worst_s", "worst", 1),
    Column("goodput", "goodput", 3),
    Column("goodput_worst", "worst", 3),
    Column("steps_ratio", "steps", 3),
    Column("standstill_s", "standstill, s", 2),
    Column("standstill_worst_s", "worst", 2),
    Column("crashes", "ended by themselves", 0),
    Column("given_up", "given up", 0),
)


@dataclass(frozen=True, slots=True)
class Commit:
    """An update to which ``batches`` groups contributed, at ``at_ns`` (monotonic)."""

    step: int
    batches: int
    at_ns: int


class Job(ABC):
    """Groups of one worker that train together; who is killed is started again at once."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self.num_crashes = 0

    @abstractmethod
    def read_commits(self, timeout_s: float) -> list[Commit]:
        """Return the commits that were printed within ``timeout_s``, at the first ones' arrival."""

    @abstractmethod
    def kill(self, group: int) -> bool:
        """SIGKILL the group's trainer; whether there was one."""


class TorchrunJob(Job):
    """Plain DDP under one launcher, whose workers all start again from the last checkpoint."""

    def __init__(
        self, num_groups: int, trainer: list[str], every: int, folder: Path, stack: ExitStack
    ) -> None:
        super().__init__(num_groups)
        self._workers: dict[int, int] = {}
        command = [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
            *("--standalone", f"--nproc-per-node={num_groups}", "--max-restarts=100000"),
            *("-m", "tools.benchmarks.children.trainer_checkpointed", *trainer),
            *(f"--checkpoint={folder / 'latest.pt'}", f"--checkpoint-every={every}"),
        ]
        self._launcher = stack.enter_context(Child(command, _ENVIRONMENT))

    def read_commits(self, timeout_s: float) -> list[Commit]:
        found: list[Commit] = []
        if self._launcher.wait_for_output(timeout_s) and not self._launcher.read_available():
            raise self._launcher.error("ended")
        for line in self._launcher.take_lines():
            kind, *words = line.split()
            if kind == "worker":
                self._workers[int(words[0])] = int(words[1])
            elif kind == "commit":
                found.append(Commit(*map(int, words)))
        return found

    def kill(self, group: int) -> bool:
        self._launcher.children()  # remembered, to be ended with it
        try:
            os.kill(self._workers.pop(group), signal.SIGKILL)
        except (KeyError, ProcessLookupError):
            return False
        return True


class GroupsJob(Job):
    """Replica groups, of ours or (``peer``: a Python) of the public release.

    With ``num_spares`` so many more stand by, and a group that was killed is started as one.
    """

    def __init__(
        self,
        num_groups: int,
        trainer: list[str],
        peer: str | None,
        stack: ExitStack,
        num_spares: int = 0,
    ) -> None:
        super().__init__(num_groups)
        self._num_spares = num_spares
        self._steps: dict[int, int] = {}  # the last one that each trainer has committed
        lighthouse = stack.enter_context(start_lighthouse(min_replicas=1, peer=peer))
        self._trainer = [*trainer, f"--lighthouse={lighthouse_address(lighthouse)}"]
        self._peer = peer
        self._stack = stack
        self._trainers: dict[int, Child] = {}
        for group in range(num_groups + num_spares):
            self._start(group, is_spare=group >= num_groups)

    def read_commits(self, timeout_s: float) -> list[Commit]:
        found: list[Commit] = []
        groups = {child.fileno(): group for group, child in self._trainers.items()}
        readable, _, _ = select.select(list(groups), [], [], max(0.0, timeout_s))
        for descriptor in readable:
            child = self._trainers[groups[descriptor]]
            has_ended = not child.read_available()
            for line in child.take_lines():
                kind, *words = line.split()
                if kind == "commit":
                    found.append(Commit(*map(int, words)))
                    self._steps[groups[descriptor]] = found[-1].step
            if has_ended:
                self.num_crashes += 1
                self._restart(groups[descriptor])
        return sorted(found, key=operator.attrgetter("at_ns"))

    def kill(self, group: int) -> bool:
        """SIGKILL the ``group``-th of those that train."""
        newest = max(self._steps.values(), default=0)
        trains = [each for each, step in self._steps.items() if step > newest - _RECENT_STEPS]
        if self._num_spares:
            if len(trains) < self.num_groups:
                return False
            group = sorted(trains)[group]
        self._trainers[group].kill()
        self._restart(group)
        return True

    def _start(self, group: int, *, is_spare: bool = False) -> None:
        name = f"tools.benchmarks.children.trainer_{'ours' if self._peer is None else 'public'}"
        python = {} if self._peer is None else {"python": self._peer}
        role = ["--spare"] * is_spare
        command = program(name, *self._trainer, f"--name=group-{group}", *role, **python)
        child = self._stack.enter_context(Child(command, _ENVIRONMENT))
        child.send("train")
        self._trainers[group] = child

    def _restart(self, group: int) -> None:
        # The stack ends it for good; until then its output is nobody's.
        self._trainers.pop(group).close()
        self._steps.pop(group, None)
        self._start(group, is_spare=self._num_spares > 0)


@dataclass(slots=True)
class Run:
    """One run of one side, from the first step of all groups to the end of its work."""

    side: str
    interval_s: float
    began_ns: int
    kills_ns: list[int] = field(default_factory=list)
    num_crashes: int = 0
    gave_up_ns: int | None = None
    # Each step counts once, when it was first committed: work that is done again adds nothing.
    _steps: dict[int, Commit] = field(default_factory=dict)
    _num_batches: int = 0

    def record(self, commit: Commit) -> None:
        if commit.at_ns > self.began_ns and commit.step not in self._steps:
            self._steps[commit.step] = commit
            self._num_batches += commit.batches

    @property
    def num_batches(self) -> int:
        return self._num_batches

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def wall_s(self) -> float:
        if self.gave_up_ns is not None:
            return (self.gave_up_ns - self.began_ns) / 1e9
        return max(self._times_s(), default=0.0)

    def standstills_s(self) -> list[float]:
        """Return, for each kill, the longest time without new work until the next kill."""
        times_s = sorted(self._times_s())
        kills_s = [(kill_ns - self.began_ns) / 1e9 for kill_ns in self.kills_ns]
        found = []
        for kill_s, next_s in itertools.pairwise([*kills_s, self.wall_s]):
            before = [at for at in times_s if at <= kill_s][-1:] or [kill_s]
            during = [*before, *(at for at in times_s if kill_s < at <= next_s), next_s]
            gaps = [later - earlier for earlier, later in itertools.pairwise(during)]
            found.append(max(gaps))
        return found

    def curve(self) -> list[tuple[float, int]]:
        """Seconds since the begin, and the batches that were done by then, every so often."""
        points, total = [(0.0, 0)], 0
        for commit in sorted(self._steps.values(), key=operator.attrgetter("at_ns")):
            total += commit.batches
            at_s = (commit.at_ns - self.began_ns) / 1e9
            if at_s >= points[-1][0] + _CURVE_S or total == self._num_batches:
                points.append((round(at_s, 2), total))
        return points

    def as_json(self) -> dict[str, Any]:
        return {
            "wall_s": self.wall_s,
            "batches": self.num_batches,
            "steps": self.num_steps,
            "kills_s": [round((at - self.began_ns) / 1e9, 2) for at in self.kills_ns],
            "standstills_s": self.standstills_s(),
            "crashes": self.num_crashes,
            "curve": self.curve(),
        }

    def _times_s(self) -> list[float]:
        return [(commit.at_ns - self.began_ns) / 1e9 for commit in self._steps.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured: ``steps`` of all groups are the work of a run with kills."""

    groups: int
    steps: int
    calm_steps: int
    step_s: float
    checkpoint_every: int
    peer: str | None

    def batches(self, interval_s: float) -> int:
        return self.groups * (self.steps if interval_s else self.calm_steps)

    @contextlib.contextmanager
    def start(self, side: str) -> Iterator[Job]:
        """Start all groups of a side."""
        trainer = [*_MODEL, f"--pause-s={self.step_s}"]
        with ExitStack() as stack:
            if side == PLAIN:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                every = self.checkpoint_every
                yield TorchrunJob(self.groups, trainer, every, folder, stack)
            else:
                peer, num_spares = self.peer if side == PUBLIC else None, int(side == SPARE)
                yield GroupsJob(self.groups, trainer, peer, stack, num_spares)


def await_all(job: Job) -> None:
    """Wait for a step of all groups.

    Raises:
        ChildError: there is none within a long time.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if any(c.batches == job.num_groups for c in job.read_commits(1.0)):
            return
    raise ChildError(f"{job.num_groups} groups took no step together within {START_TIMEOUT_S:g} s")


def measure(
    plan: Plan, side: str, interval_s: float, seed: int, start_together: threading.Barrier,
    delay_s: float,
) -> Run:  # fmt: skip
    """Do the work of one run, and kill a group each ``interval_s`` (0: never).

    Several sides may be measured at once: they begin when all train, each ``delay_s`` later.
    """
    dice = random.Random(seed)
    with plan.start(side) as job:
        await_all(job)
        start_together.wait(START_TIMEOUT_S)
        deadline = time.monotonic() + delay_s
        while (left_s := deadline - time.monotonic()) > 0:
            job.read_commits(left_s)
        run = Run(side, interval_s, time.monotonic_ns())
        crashes_before = job.num_crashes
        work = plan.batches(interval_s)
        patience_s = _PATIENCE_S + _PATIENCE * plan.step_s * work / plan.groups
        limit_ns = run.began_ns + int(1e9 * patience_s)
        next_kill_ns = run.began_ns + int(interval_s * 1e9)
        while run.num_batches < work:
            now_ns = time.monotonic_ns()
            if now_ns > limit_ns:
                run.gave_up_ns = now_ns
                break
            if interval_s and now_ns >= next_kill_ns and job.kill(dice.randrange(plan.groups)):
                run.kills_ns.append(now_ns)
                next_kill_ns += int(interval_s * 1e9)
            for commit in job.read_commits(0.02):
                run.record(commit)
        run.num_crashes = job.num_crashes - crashes_before
    return run


def measure_together(
    plan: Plan, sides: tuple[str, ...], interval_s: float, seed: int
) -> Iterator[Run]:
    """Measure several sides at the same time, with their kills apart."""
    barrier = threading.Barrier(len(sides))
    apart_s = min(_APART_S, interval_s / len(sides))

    def measure_one(index: int) -> Run:
        try:
            return measure(plan, sides[index], interval_s, seed, barrier, index * apart_s)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(sides)) as pool:
        for run in pool.map(measure_one, range(len(sides))):
            kills = f"{len(run.kills_ns)} kills" if interval_s else "no kills"
            end = ", given up" if run.gave_up_ns is not None else ""
            click.echo(f"{run.side}, {kills}: {run.wall_s:.1f} s{end}", err=True)
            yield run


def row_of(runs: list[Run], calm: Run, work: int) -> dict[str, Any]:
    """The row of one side and one schedule, compared with the run of that side without kills.

    ``work``: the batches of each run.
    """
    goodputs = [_rate(run.num_batches, run) / _rate(calm.num_batches, calm) for run in runs]
    steps = [_rate(run.num_steps, run) / _rate(calm.num_steps, calm) for run in runs]
    standstills = [each for run in runs for each in run.standstills_s()]
    interval_s = runs[0].interval_s
    return {
        "side": runs[0].side,
        "every": f"{interval_s:g} s" if interval_s else "no kills",
        "runs": len(runs),
        "work": work,
        "kills": sum(len(run.kills_ns) for run in runs),
        "wall_s": statistics.median(run.wall_s for run in runs),
        "wall_worst_s": max(run.wall_s for run in runs),
        "goodput": statistics.median(goodputs),
        "goodput_worst": min(goodputs),
        "steps_ratio": statistics.median(steps),
        "standstill_s": statistics.median(standstills) if standstills else None,
        "standstill_worst_s": max(standstills, default=None),
        "crashes": sum(run.num_crashes for run in runs),
        "given_up": sum(run.gave_up_ns is not None for run in runs),
        "each": [run.as_json() for run in runs],
    }


def _rate(amount: int, run: Run) -> float:
    return amount / run.wall_s


def draw_picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG to ``path``: the work done over time, a panel for each schedule of kills."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot

    schedules = list(dict.fromkeys(row["every"] for row in rows if row["kills"]))
    figure, panels = pyplot.subplots(
        1, len(schedules), figsize=(5.5 * len(schedules), 4), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel, every in zip(panels[0], schedules, strict=True):
        for row in (row for row in rows if row["every"] == every):
            _draw_side(panel, row)
        panel.set_title(f"a trainer is killed every {every}")
        panel.set_xlabel("seconds")
        panel.set_ylim(0, 1.02)
        panel.set_xlim(0)
        panel.legend(loc="lower right", frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("share of the training that is done")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_side(panel: Axes, row: dict[str, Any]) -> None:
    """Draw all runs of a side; the legend has their median."""
    label: str | None = f"{row['side']}: {row['wall_s']:.0f} s, goodput {row['goodput']:.2f}"
    for run in row["each"]:
        times, done = zip(*run["curve"], strict=True)
        color = _COLORS[row["side"]]
        shares = [each / row["work"] for each in done]
        panel.plot(times, shares, color=color, lw=1.6, label=label)
        label = None  # one entry for all runs


@click.command(context_settings={"show_default": True})
@click.option("--groups", type=click.IntRange(2), default=3, help="Replica groups.")
@click.option("--side", "sides", type=click.Choice(_SIDES), multiple=True,
              default=(PLAIN, PUBLIC, OURS), help="May be repeated.")  # fmt: skip
@click.option("--every", "intervals_s", type=click.FloatRange(0.5), multiple=True,
              default=(20.0, 60.0), help="Seconds between two kills; may be repeated.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=1800,
              help="Steps of all groups: the training of a run with kills.")  # fmt: skip
@click.option("--calm-steps", type=click.IntRange(1), default=400,
              help="The same of the run without kills, whose rate is the measure.")  # fmt: skip
@click.option("--step-s", type=click.FloatRange(0), default=0.05,
              help="How long a step sleeps, as if it computed elsewhere.")  # fmt: skip
@click.option("--checkpoint-every", type=click.IntRange(1), default=100,
              help="Steps of plain DDP between two checkpoints.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(1), default=3, help="Runs of each kind.")
@click.option("--seed", type=int, default=0, help="The first one; it draws the victims.")
@click.option("--one-by-one", is_flag=True,
              help="Measure one side after the other, not all at the same time.")  # fmt: skip
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path),
              help="Draw the runs into this PNG; needs matplotlib.")  # fmt: skip
@json_option
def main(
    groups: int, sides: tuple[str, ...], intervals_s: tuple[float, ...], steps: int,
    calm_steps: int, step_s: float, checkpoint_every: int, seeds: int, seed: int,
    one_by_one: bool, picture: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Train a fixed amount while trainers are killed: who needs how long?"""
    peer = peer_python()
    sides = tuple(side for side in sides if side != PUBLIC or peer is not None)
    plan = Plan(
        groups=groups, steps=steps, calm_steps=calm_steps, step_s=step_s,
        checkpoint_every=checkpoint_every, peer=peer,
    )  # fmt: skip
    result = Result(
        name="under_failures",
        title=f"Training under failures: {groups} groups, {steps} steps of {step_s:g} s each",
        columns=_COLUMNS,
        settings={
            "groups": groups, "steps": steps, "calm_steps": calm_steps, "step_s": step_s,
            "checkpoint_every": checkpoint_every, "seeds": seeds, "seed": seed,
            "at_once": not one_by_one,
        },
        notes=[
            "goodput: batches that were trained per second, compared with the same trainers "
            "without kills; steps: the same of updates",
            "standstill: the longest time without new work after a kill, until the next one",
            f"plain DDP saves a checkpoint every {checkpoint_every} steps; torchrun starts all of "
            "its workers again, and they repeat the steps since then",
        ],
    )  # fmt: skip
    rounds = [(side,) for side in sides] if one_by_one else [sides]
    runs: dict[tuple[str, float], list[Run]] = {}
    for interval_s in (0.0, *intervals_s):
        for number in range(seeds if interval_s else 1):
            for together in rounds:
                for run in measure_together(plan, together, interval_s, seed + number):
                    runs.setdefault((run.side, interval_s), []).append(run)
    result.rows = [
        row_of(runs[side, interval_s], runs[side, 0.0][0], plan.batches(interval_s))
        for interval_s in (0.0, *intervals_s)
        for side in sides
    ]
    hand_over(result, json_file)
    if picture is not None:
        draw_picture(result.rows, picture)


if __name__ == "__main__":
    main()
