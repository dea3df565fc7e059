"""Measures what a kill -9 costs: the survivors' pause, and the way back to the whole world."""

from __future__ import annotations

import operator
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.options import before_option, json_option
from tools.benchmarks.processes import (
    ROOT,
    Child,
    ChildError,
    by_public_names,
    lighthouse_address,
    peer_python,
    printed_lines,
    program,
    root_with_package_of,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over

_KINDS = ("trainer", "trainer and manager")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # torch looks up the name of whoever connects; a lost answer must not cost 5 s.
    "RES_OPTIONS": "timeout:1 attempts:1",
}
# Well above the public release's heartbeat timeout (5 s) and a start of Python with torch on a
# machine that is busy with other work.
_PATIENCE_S = 150.0
# Of each side, where two are compared: the kills are spread over them.
_WORLDS = 4
# A kill comes at a random moment of a step, when the whole world has trained for a while.
_CALM_S = (0.2, 0.6)
_COLUMNS = (
    Column("trainer", "trainer"),
    Column("killed", "killed"),
    Column("kills", "kills", 0),
    Column("pause_ms", "pause, ms", 0),
    Column("pause_worst_ms", "worst", 0),
    Column("rejoin_s", "rejoin, s", 2),
    Column("rejoin_worst_s", "worst", 2),
    Column("built_s", "imports and model, s", 2),
    Column("ready_s", "manager, s", 2),
    Column("heal_s", "heal, s", 2),
    Column("rest_s", "the rest, s", 2),
)


@dataclass(frozen=True, slots=True)
class Commit:
    """Group ``group`` committed with ``participants`` groups, at ``at_ns`` (monotonic)."""

    group: int
    participants: int
    at_ns: int


@dataclass(slots=True)
class World:
    """Three replica groups and their lighthouse, killed and restarted."""

    start: Callable[[int], Child]
    num_groups: int
    trainers: dict[int, Child] = field(default_factory=dict)
    _stages_ns: dict[int, dict[str, int]] = field(default_factory=dict)

    def start_trainer(self, group: int) -> int:
        """Start a group's trainer; the instant before (ns)."""
        at_ns = time.monotonic_ns()
        self._stages_ns[group] = {}
        self.trainers[group] = self.start(group)
        self.trainers[group].send("train")
        return at_ns

    def kill(self, group: int, *, with_manager: bool) -> int:
        """SIGKILL the trainer, at choice with its manager; the instant before (ns)."""
        trainer = self.trainers.pop(group)
        managers = trainer.children()
        at_ns = time.monotonic_ns()
        if with_manager:
            for manager in managers:
                manager.kill()
        trainer.kill()
        trainer.close()
        return at_ns

    def commits(self, timeout_s: float) -> Iterator[Commit]:
        """Yield the commits of all groups as they are printed, for ``timeout_s``."""
        for group, line in printed_lines(self.trainers, timeout_s):
            kind, *words = line.split()
            if kind in ("built", "ready"):
                self._stages_ns[group][kind] = int(words[0])
            elif kind == "commit":
                yield Commit(group, int(words[1]), int(words[2]))

    def all_commit(self, participants: int, since_ns: int) -> int:
        """Time when the last of the living groups first committed with so many participants (ns).

        Raises:
            ChildError: not within a long time.
        """
        first: dict[int, int] = {}
        for commit in self.commits(_PATIENCE_S):
            if commit.participants == participants and commit.at_ns > since_ns:
                first.setdefault(commit.group, commit.at_ns)
            if first.keys() == self.trainers.keys():
                return max(first.values())
        raise ChildError(
            f"{len(first)} of {len(self.trainers)} groups committed with {participants} "
            f"participants within {_PATIENCE_S:g} s"
        )

    def train_for(self, duration_s: float) -> None:
        """Let it train, and forget the commits."""
        for _ in self.commits(duration_s):
            pass

    def stages_ns(self, group: int) -> tuple[int, int]:
        """Times when a trainer had imported torch and made its model, and when it could train."""
        stages = self._stages_ns[group]
        return stages["built"], stages["ready"]


@dataclass(slots=True)
class Course:
    """One kind of trainer and of kill, and what was measured."""

    name: str
    killed: str
    with_manager: bool
    pauses_ms: list[float] = field(default_factory=list)
    rejoins_s: list[float] = field(default_factory=list)
    builts_s: list[float] = field(default_factory=list)
    readies_s: list[float] = field(default_factory=list)
    heals_s: list[float] = field(default_factory=list)

    def run(self, world: World, dice: random.Random) -> None:
        """One kill and one restart."""
        world.train_for(dice.uniform(*_CALM_S))
        victim = dice.randrange(world.num_groups)
        killed_ns = world.kill(victim, with_manager=self.with_manager)
        paused_ns = world.all_commit(world.num_groups - 1, killed_ns) - killed_ns
        began_ns = world.start_trainer(victim)
        whole_ns = world.all_commit(world.num_groups, began_ns) - began_ns
        built_ns, ready_ns = world.stages_ns(victim)
        self.pauses_ms.append(paused_ns / 1e6)
        self.rejoins_s.append(whole_ns / 1e9)
        self.builts_s.append((built_ns - began_ns) / 1e9)
        self.readies_s.append((ready_ns - built_ns) / 1e9)
        self.heals_s.append((began_ns + whole_ns - ready_ns) / 1e9)

    def row(self) -> dict[str, Any]:
        return {
            "trainer": self.name,
            "killed": self.killed,
            "kills": len(self.pauses_ms),
            "pause_ms": statistics.median(self.pauses_ms),
            "pause_worst_ms": max(self.pauses_ms),
            "rejoin_s": statistics.median(self.rejoins_s),
            "rejoin_worst_s": max(self.rejoins_s),
            "built_s": statistics.median(self.builts_s),
            "ready_s": statistics.median(self.readies_s),
            "heal_s": statistics.median(self.heals_s),
            "rest_s": statistics.median(map(operator.sub, self.rejoins_s, self.builts_s)),
            "pauses_ms": self.pauses_ms,
            "rejoins_s": self.rejoins_s,
        }


@contextmanager
def whole_world(
    model: list[str],
    num_groups: int,
    peer: str | None = None,
    root: Path = ROOT,
    *,
    is_adapted: bool = False,
    is_early: bool = False,
) -> Iterator[World]:
    """All groups train together; ``peer``: the Python of the public release, None: ours.

    ``is_adapted``: the program for the public release, with our package in its place. ``is_early``:
    our trainers start their managers before they import torch.
    """
    with ExitStack() as stack:
        lighthouse = start_lighthouse(min_replicas=1, peer=peer, root=root)
        stack.enter_context(lighthouse)
        address = lighthouse_address(lighthouse)
        where = f"--lighthouse={address}"
        variables = {**_ENVIRONMENT, "TORCHFT_LIGHTHOUSE": f"http://{address}"}
        kind = "public" if peer or is_adapted else "early" if is_early else "ours"
        name = f"tools.benchmarks.children.trainer_{kind}"
        run: Callable[..., list[str]] = (
            by_public_names if is_adapted else partial(program, python=peer or sys.executable)
        )

        def start(group: int) -> Child:
            command = run(name, *model, where, f"--name=group-{group}")
            return stack.enter_context(Child(command, variables, root=root))

        world = World(start, num_groups)
        for group in range(num_groups):
            world.start_trainer(group)
        world.all_commit(num_groups, 0)
        yield world


def measure_ours(
    model: list[str], num_groups: int, kinds: tuple[str, ...], kills: int, seed: int,
    before: Path | None, early: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each kind of kill; with another checkout beside this one, also of its package."""
    with root_with_package_of(before) as root_before:
        sides = [Side(partial(whole_world, model, num_groups), _courses("ours", kinds))]
        if early:
            world_early = partial(whole_world, model, num_groups, is_early=True)
            sides.append(Side(world_early, _courses("ours, early manager", kinds)))
        if root_before is not None:
            world_before = partial(whole_world, model, num_groups, root=root_before)
            sides.append(Side(world_before, _courses("ours, before", kinds)))
        return measure_in_turns(sides, kills, seed)


def measure_peer(
    peer: str, model: list[str], num_groups: int, kills: int, seed: int
) -> list[dict[str, Any]]:
    """The public release, and its program with our package in its place, in turns.

    The public release's manager is a part of its trainer: there is but one way to kill it.
    """
    world = partial(whole_world, model, num_groups)
    sides = [
        Side(partial(world, peer), _courses("public release", ("trainer",))),
        Side(partial(world, is_adapted=True), _courses("its program, ours below", ("trainer",))),
    ]
    return measure_in_turns(sides, kills, seed)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: how its groups are started, and what happens to them."""

    start_world: Callable[[], AbstractContextManager[World]]
    courses: list[Course]


def measure_in_turns(sides: list[Side], kills: int, seed: int) -> list[dict[str, Any]]:
    """``kills`` of each course of each side, and a row of each course.

    Worlds of several sides follow each other, in alternating order: two at a time would take each
    other's cores.
    """
    dice = random.Random(seed)
    worlds = 1 if len(sides) == 1 else min(_WORLDS, kills)
    for number in range(worlds):
        share = kills * (number + 1) // worlds - kills * number // worlds
        for side in sides if number % 2 == 0 else sides[::-1]:
            with side.start_world() as world:
                run_all(side.courses, world, share, dice)
    return [course.row() for side in sides for course in side.courses]


def _courses(name: str, kinds: tuple[str, ...]) -> list[Course]:
    return [Course(name, kind, with_manager=kind != "trainer") for kind in kinds]


def run_all(courses: list[Course], world: World, kills: int, dice: random.Random) -> None:
    """``kills`` of each course, in turns."""
    for _ in range(kills):
        for course in courses:
            course.run(world, dice)


@click.command(context_settings={"show_default": True})
@click.option("--groups", type=click.IntRange(2), default=3, help="Replica groups.")
@click.option("--kind", "kinds", type=click.Choice(_KINDS), multiple=True, default=_KINDS,
              help="What of a group of ours is killed; may be repeated.")  # fmt: skip
@click.option("--kills", type=click.IntRange(1), default=20, help="Kills of each kind.")
@click.option("--peer-kills", type=click.IntRange(0), default=5,
              help="Kills of the public release's trainers, which take longer.")  # fmt: skip
@click.option("--early", is_flag=True,
              help="Measure groups that start their managers before torch, too.")  # fmt: skip
@click.option("--width", type=click.IntRange(1), default=64, help="Width of the MLP's layers.")
@click.option("--depth", type=click.IntRange(1), default=2, help="Number of its layers.")
@click.option("--seed", type=int, default=0, help="Draws the victims and the moments.")
@before_option
@json_option
def main(
    groups: int, kinds: tuple[str, ...], kills: int, peer_kills: int, early: bool, width: int,
    depth: int, seed: int, before: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """SIGKILL one of several replica groups, restart it, and look how long each takes."""
    result = Result(
        name="recovery",
        title=f"Recovery from a SIGKILL: {groups} groups with a small model, default settings",
        columns=_COLUMNS,
        settings={"groups": groups, "kills": kills, "peer_kills": peer_kills, "seed": seed},
        notes=[
            "pause: from the kill to the first commit without the killed group, of the last "
            "survivor",
            "rejoin: from the start of the process until all have committed together; "
            "the rest: rejoin less what any trainer needs to import torch and make its model: "
            "until it has a manager and wrappers, and until it has healed and committed",
        ],
    )
    model = [f"--width={width}", f"--depth={depth}", "--batch=8"]
    result.rows = measure_ours(model, groups, kinds, kills, seed, before, early)
    peer = peer_python()
    if peer is not None and peer_kills:
        result.rows += measure_peer(peer, model, groups, peer_kills, seed)
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
