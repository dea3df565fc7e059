"""Measures quorum rounds over sessions and unary calls: wall time, lighthouse CPU time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click

from tools.benchmarks.options import before_option, json_option
from tools.benchmarks.processes import (
    ROOT,
    START_TIMEOUT_S,
    Child,
    lighthouse_address,
    peer_python,
    program,
    root_with_package_of,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over

_ROUND_TIMEOUT_S = 90.0
# A thousand callers connect and answer within seconds; nobody may be taken for dead meanwhile.
_NEVER_MS = 600_000
_COLUMNS = (
    Column("callers", "callers", 0),
    Column("lighthouse", "lighthouse"),
    Column("over", "over"),
    Column("wall_ms", "wall ms", 2),
    Column("wall_worst_ms", "worst ms", 2),
    Column("server_cpu_ms", "server CPU ms", 2),
    Column("load_cpu_ms", "load CPU ms", 2),
    Column("wall_ratio", "wall, public = 1", 2),
    Column("cpu_ratio", "CPU, public = 1", 2),
    Column("before_wall_ratio", "wall, before = 1", 3),
    Column("before_cpu_ratio", "CPU, before = 1", 3),
)


@dataclass(slots=True)
class Course:
    """One lighthouse with its callers; filled by alternating with the other one."""

    name: str
    over: str
    lighthouse: Child
    load: list[Child]
    step: int = 0
    walls_ms: list[float] = field(default_factory=list)
    server_cpu_s: float = 0.0
    load_cpu_s: float = 0.0

    def run(self, rounds: int) -> None:
        """Measure ``rounds`` more."""
        server_cpu_s, load_cpu_s = self.lighthouse.cpu_s(), self._load_cpu_s()
        self.walls_ms += [self.round() for _ in range(rounds)]
        self.server_cpu_s += self.lighthouse.cpu_s() - server_cpu_s
        self.load_cpu_s += self._load_cpu_s() - load_cpu_s

    def round(self) -> float:
        """Everybody asks, everybody has the answer; milliseconds from the first to the last."""
        self.step += 1
        for child in self.load:
            child.send(f"step {self.step}")
        for child in self.load:
            child.read_line(_ROUND_TIMEOUT_S)
        for child in self.load:
            child.send("go")
        spans = [child.read_line(_ROUND_TIMEOUT_S).split() for child in self.load]
        began_ns = min(int(began) for began, _, _ in spans)
        ended_ns = max(int(ended) for _, ended, _ in spans)
        return (ended_ns - began_ns) / 1e6

    def _load_cpu_s(self) -> float:
        return sum(child.cpu_s() for child in self.load)

    def row(self, callers: int) -> dict[str, object]:
        rounds = len(self.walls_ms)
        return {
            "callers": callers,
            "lighthouse": self.name,
            "over": self.over,
            "rounds": rounds,
            "wall_ms": statistics.median(self.walls_ms),
            "wall_worst_ms": max(self.walls_ms),
            "server_cpu_ms": 1000 * self.server_cpu_s / rounds,
            "load_cpu_ms": 1000 * self.load_cpu_s / rounds,
        }


@contextmanager
def course(
    name: str, over: str, callers: int, processes: int, peer: str | None = None, root: Path = ROOT
) -> Iterator[Course]:
    """Start a lighthouse (with ``peer``, the public release's) and its callers, all connected."""
    with ExitStack() as stack:
        flags = {"join_timeout_ms": _NEVER_MS, "heartbeat_timeout_ms": _NEVER_MS}
        lighthouse = start_lighthouse(min_replicas=callers, peer=peer, root=root, **flags)
        stack.enter_context(lighthouse)
        address = lighthouse_address(lighthouse)
        load = []
        for first, count in shares(callers, processes):
            flags_of_load = (f"--address={address}", f"--over={over}", f"--first={first}")
            command = program(
                "tools.benchmarks.children.callers", *flags_of_load, f"--count={count}"
            )
            child = Child(command, root=root)
            load.append(stack.enter_context(child))
        for child in load:
            child.read_line(START_TIMEOUT_S)
        yield Course(name, over, lighthouse, load)


def shares(callers: int, processes: int) -> list[tuple[int, int]]:
    """First number and count of each process' callers; no process without a caller."""
    processes = min(callers, processes)
    bounds = [callers * index // processes for index in range(processes + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(bounds)]


def measure(
    callers: int, rounds: int, blocks: int, processes: int, before: Path | None
) -> list[dict[str, object]]:
    """Rows of ours, both ways, and where installed of the public release, measured in turns."""
    peer = peer_python()
    with ExitStack() as stack:
        sides = [("ours", ROOT)]
        if root := stack.enter_context(root_with_package_of(before)):
            sides.append(("ours, before", root))
        courses = [
            stack.enter_context(course(name, over, callers, processes, root=root))
            for over in ("sessions", "unary")
            for name, root in sides
        ]
        if peer:
            courses.append(stack.enter_context(course("public", "unary", callers, processes, peer)))
        for each in courses:
            each.round()
            each.round()
        for block in range(blocks):
            for each in courses if block % 2 == 0 else courses[::-1]:
                each.run(rounds)
        rows = [each.row(callers) for each in courses]
    add_ratios(rows)
    return rows


def add_ratios(rows: list[dict[str, object]]) -> None:
    """Relate each row to the public release's, and ours to what it was before, where measured."""
    found = {(row["lighthouse"], row["over"]): row for row in rows}
    for row in rows:
        _add_ratios(row, found.get(("public", "unary")), "")
        if row["lighthouse"] == "ours":
            _add_ratios(row, found.get(("ours, before", row["over"])), "before_")


def _add_ratios(row: dict[str, object], other: dict[str, object] | None, prefix: str) -> None:
    if other is None:
        return
    for ratio, key in (("wall_ratio", "wall_ms"), ("cpu_ratio", "server_cpu_ms")):
        value, base = row[key], other[key]
        assert isinstance(value, float)
        assert isinstance(base, float)
        row[prefix + ratio] = value / base if base else None


def rounds_for(callers: int, seconds: float) -> int:
    """Rounds of a block that take about ``seconds``, at about 0.4 ms for each caller."""
    return max(1, min(500, int(seconds / (0.0004 * callers + 0.002))))


@click.command(context_settings={"show_default": True})
@click.option("--callers", "sizes", type=click.IntRange(1, 5000), multiple=True,
              default=(10, 100, 1000), help="Callers of a round; may be repeated.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0.01), default=1.0,
              help="Length of a block of rounds, roughly.")  # fmt: skip
@click.option("--blocks", type=click.IntRange(1), default=4,
              help="Blocks of rounds for each lighthouse, in turns.")  # fmt: skip
@click.option("--load-processes", type=click.IntRange(1, 16), default=2,
              help="Processes that the callers are spread over.")  # fmt: skip
@before_option
@json_option
def main(
    sizes: tuple[int, ...], seconds: float, blocks: int, load_processes: int,
    before: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Quorum rounds: every caller on its own connection, all asking at once.

    Over sessions (ours alone has them) and over the unary call of the public release.
    """
    result = Result(
        name="quorum_rounds",
        title="Quorum rounds",
        columns=_COLUMNS,
        settings={"seconds": seconds, "blocks": blocks, "load_processes": load_processes},
        notes=[
            "wall: from the first question to the last answer, median of all rounds",
            "the callers run on the same cores as the lighthouse and cost what 'load CPU' says",
        ],
    )
    for callers in sizes:
        rounds = rounds_for(callers, seconds)
        result.rows += measure(callers, rounds, blocks, load_processes, before)
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
