"""Measures a training step of two groups without failures, beside plain torch DDP's."""

from __future__ import annotations

import json
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil

from tools.benchmarks.children.phases import PARTS, PHASES, WRAPPERS
from tools.benchmarks.options import before_option, json_option
from tools.benchmarks.processes import (
    ROOT,
    START_TIMEOUT_S,
    Child,
    by_public_names,
    lighthouse_address,
    peer_python,
    program,
    root_with_package_of,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over, show

_BLOCK_TIMEOUT_S = 120.0
_NUM_GROUPS = 2
# The two trainers of a pair begin a block at slightly different times.
WARM_UP_STEPS = 3
# Each trainer has one thread for its sums: two trainers, two cores.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # torch looks up the name of whoever connects; a lost answer must not cost 5 s.
    "RES_OPTIONS": "timeout:1 attempts:1",
}
_CPU: tuple[str, ...] = ("trainer", "manager", "lighthouse")
_COLUMNS = (
    Column("trainer", "trainer"),
    Column("total_ms", "step ms", 2),
    Column("ratio", "of plain DDP", 3),
    Column("before_ratio", "of before", 3),
    *(Column(f"{phase}_ms", f"{phase}()", 2) for phase in PHASES),
    Column("vote_ms", "of it vote", 2),
    Column("trainer_cpu_ms", "CPU ms: trainer", 2),
    Column("manager_cpu_ms", "manager", 2),
    Column("lighthouse_cpu_ms", "lighthouse", 2),
)


@dataclass(slots=True)
class Pair:
    """Two groups that train together; ``manager`` is a process of its own only in ours."""

    name: str
    trainers: list[Child]  # of all workers
    lighthouse: Child | None = None
    blocks: list[dict[str, list[float]]] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_CPU, 0.0))
    num_steps: int = 0

    def run(self, num_steps: int) -> None:
        """Measure one block."""
        before = self._cpu_s()
        for trainer in self.trainers:
            trainer.send(f"measure {num_steps + WARM_UP_STEPS}")
        answers = [json.loads(trainer.read_line(_BLOCK_TIMEOUT_S)) for trainer in self.trainers]
        for trainer, answer in zip(self.trainers, answers, strict=True):
            (discarded,) = answer.pop("discarded")
            if discarded:  # what such steps take says nothing
                raise trainer.error(f"discarded {discarded:g} steps, though nothing failed")
        for name, used in self._cpu_s().items():
            self.cpu_s[name] += used - before[name]
        self.num_steps += num_steps + WARM_UP_STEPS
        block: dict[str, list[float]] = {}
        for answer in answers:
            for phase, times in answer.items():
                block.setdefault(phase, []).extend(times[WARM_UP_STEPS:])
        self.blocks.append(block)

    def _cpu_s(self) -> dict[str, float]:
        managers = [child for trainer in self.trainers for child in trainer.children()]
        return {
            "trainer": sum(trainer.cpu_s() for trainer in self.trainers) / len(self.trainers),
            "manager": sum(map(cpu_s_of, managers)) / _NUM_GROUPS,
            "lighthouse": self.lighthouse.cpu_s() if self.lighthouse else 0.0,
        }

    def ratios(self, other: Pair) -> list[float]:
        """Ratios of neighbouring blocks' step times, so that drift cancels."""
        return [
            statistics.median(mine["total"]) / statistics.median(theirs["total"])
            for mine, theirs in zip(self.blocks, other.blocks, strict=True)
        ]

    def row(self, plain: Pair) -> dict[str, Any]:
        """Medians over all steps."""
        medians = {
            phase: statistics.median([t for block in self.blocks for t in block[phase]])
            for phase in self.blocks[0]
        }
        ratios = self.ratios(plain)
        row: dict[str, Any] = {"trainer": self.name}
        row |= {f"{phase}_ms": time_ms for phase, time_ms in medians.items()}
        row |= {f"{name}_cpu_ms": 1000 * s / self.num_steps for name, s in self.cpu_s.items()}
        row |= {"ratio": statistics.median(ratios), "ratios": ratios, "steps": self.num_steps}
        return row


def cpu_s_of(process: psutil.Process) -> float:
    """CPU seconds that a process has used; 0 if it has just ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def plain_pair(model: list[str], group_size: int) -> Iterator[Pair]:
    """Workers of torch's own DDP: for each worker of a group, two that train together."""
    commands = [
        program("tools.benchmarks.children.trainer_plain", *model, f"--rank={rank}", port)
        for port in [f"--store-port={free_port()}" for _ in range(group_size)]
        for rank in range(_NUM_GROUPS)
    ]
    with started("plain DDP", commands, None) as pair:
        yield pair


@contextmanager
def tolerant_pair(
    name: str,
    model: list[str],
    peer: str | None = None,
    root: Path = ROOT,
    group_size: int = 1,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    is_adapted: bool = False,
) -> Iterator[Pair]:
    """Two replica groups of ours, or with ``peer`` of the public release, and its lighthouse.

    ``environment``: more variables for the trainers. ``flags``: of the lighthouse.
    ``is_adapted``: the program for the public release, with our package in its place.
    """
    more = flags or {}
    with start_lighthouse(min_replicas=_NUM_GROUPS, peer=peer, root=root, **more) as lighthouse:
        where = f"--lighthouse={lighthouse_address(lighthouse)}"
        kind = "public" if peer or is_adapted else "ours"
        run: Callable[..., list[str]] = (
            by_public_names if is_adapted else partial(program, python=peer or sys.executable)
        )
        place = [] if group_size == 1 else [f"--group-size={group_size}"]
        commands = [
            run(
                f"tools.benchmarks.children.trainer_{kind}",
                *(*model, where, f"--name={group}", *place, *port, f"--rank={rank}"),
            )
            for group in range(_NUM_GROUPS)
            for port in [[f"--store-port={free_port()}"] if place else []]
            for rank in range(group_size)
        ]
        with started(name, commands, lighthouse, root, environment) as pair:
            yield pair


@contextmanager
def started(
    name: str,
    commands: list[list[str]],
    lighthouse: Child | None,
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """All trainers, ready."""
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(Child(command, {**_ENVIRONMENT, **(environment or {})}, root=root))
            for command in commands
        ]
        for trainer in trainers:
            while not trainer.read_line(START_TIMEOUT_S).startswith("ready "):
                pass
        yield Pair(name, trainers, lighthouse)


def measure(
    model: list[str],
    wrapper: str,
    num_steps: int,
    blocks: int,
    before: Path | None,
    group_size: int = 1,
) -> list[dict[str, Any]]:
    """The rows of all pairs, measured in turns."""
    peer = peer_python() if group_size == 1 else None
    wrapped = [*model, f"--wrapper={wrapper}"]
    with ExitStack() as stack:
        pairs = [stack.enter_context(plain_pair(model, group_size))]
        ours = partial(tolerant_pair, group_size=group_size)
        pairs.append(stack.enter_context(ours("ours", wrapped)))
        if root := stack.enter_context(root_with_package_of(before)):
            pairs.append(stack.enter_context(ours("ours, before", wrapped, root=root)))
        if peer is not None:
            adapted = tolerant_pair("its program, ours below", model, is_adapted=True)
            pairs.append(stack.enter_context(tolerant_pair("public release", model, peer)))
            pairs.append(stack.enter_context(adapted))
        in_turns(pairs, num_steps, blocks)
        rows = [pair.row(pairs[0]) for pair in pairs]
        if root:
            ratios = pairs[1].ratios(pairs[2])
            rows[1] |= {"before_ratio": statistics.median(ratios), "before_ratios": ratios}
        return rows


def in_turns(pairs: list[Pair], num_steps: int, blocks: int) -> None:
    """``blocks`` blocks of each pair, every time beginning with the next one.

    A pair that comes twice in a row finds its caches warm, which is worth 5 % of a step: of two it
    happens to both, of more to none.
    """
    for pair in pairs:
        pair.run(num_steps)  # connections, allocators and caches warm up
        pair.blocks.clear()
        pair.cpu_s, pair.num_steps = dict.fromkeys(_CPU, 0.0), 0
    for block in range(blocks):
        first = block % len(pairs)
        for pair in (*pairs[first:], *pairs[:first]):
            pair.run(num_steps)


def parts_table(rows: list[dict[str, Any]]) -> Result:
    """Table of the time in our step, phase by phase, beside plain DDP's."""
    plain, ours = rows[0], rows[1]
    table = Result(
        name="step_time_parts",
        title="Where our step spends its time",
        columns=(
            Column("phase", "phase"),
            Column("part", "of which"),
            Column("ours_ms", "ours, ms", 2),
            Column("plain_ms", "plain DDP, ms", 2),
        ),
        settings={},
        notes=["medians; a phase is not the sum of its parts: the rest is torch's own work"],
    )
    for phase in dict.fromkeys((*PHASES, *(phase for phase, _ in PARTS.values()))):
        times = {"ours_ms": ours.get(f"{phase}_ms"), "plain_ms": plain.get(f"{phase}_ms")}
        table.rows.append({"phase": phase, "part": "", **times})
        table.rows += [
            {"phase": "", "part": what, "ours_ms": ours[f"{part}_ms"]}
            for part, (where, what) in PARTS.items()
            if where == phase
        ]
    return table


@click.command(context_settings={"show_default": True})
@click.option("--steps", type=click.IntRange(2), default=30, help="Steps of a block.")
@click.option("--blocks", type=click.IntRange(1), default=6, help="Blocks of each, in turns.")
@click.option("--width", type=click.IntRange(1), default=728, help="Width of the MLP's layers.")
@click.option("--depth", type=click.IntRange(1), default=8, help="Number of its layers.")
@click.option("--batch", type=click.IntRange(1), default=16, help="Samples of a step.")
@click.option("--wrapper", type=click.Choice(WRAPPERS), default=WRAPPERS[0],
              help="What averages ours: its own DDP, torch's over a ManagedProcessGroup, or "
              "Manager.allreduce for each gradient.")  # fmt: skip
@click.option("--group-size", type=click.IntRange(1), default=1,
              help="Workers of a group; each sums with the one of its rank, and all vote. Of "
              "several, the public release is not measured.")  # fmt: skip
@before_option
@json_option
def main(
    steps: int, blocks: int, width: int, depth: int, batch: int, wrapper: str,
    group_size: int, before: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Time of a training step without failures: two groups, over gloo."""
    parameters = depth * (width * width + width) + 16 * (width + 1)
    result = Result(
        name="step_time",
        title=f"Step time without failures: 2 groups, {parameters * 4 / 1e6:.1f} MB of gradients",
        columns=_COLUMNS,
        settings={
            "steps": steps,
            "blocks": blocks,
            "width": width,
            "depth": depth,
            "batch": batch,
            "wrapper": wrapper,
            "group_size": group_size,
        },
        notes=[
            "medians in milliseconds; 'of plain DDP' (of before) is the median over neighbouring "
            "blocks",
            "CPU: milliseconds per step, of one trainer, one manager, and the lighthouse; "
            "the public release's manager is a part of its trainer",
        ],
    )
    model = [f"--width={width}", f"--depth={depth}", f"--batch={batch}"]
    result.rows = measure(model, wrapper, steps, blocks, before, group_size)
    show(parts_table(result.rows))
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
