"""Measures a lighthouse with a thousand groups: CPU time in steady training, joins, losses."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from tools.benchmarks.quorum_rounds import shares
from tools.benchmarks.simulated_fleet import simulate
from tools.benchmarks.table import Column, Result, hand_over

_WAIT_S = 120.0
# Between two events: what the one before has begun is over.
_PAUSE_S = 2.0
_FIRST_DEAF = 10_000  # of those that read nothing, the first one's number
_COLUMNS = (
    Column("groups", "groups", 0),
    Column("mode", "mode"),
    Column("deaf", "deaf", 0),
    Column("start_s", "cold start s", 2),
    Column("steps_per_s", "steps/s of a group", 2),
    Column("cpu_percent", "lighthouse CPU %", 1),
    Column("load_percent", "load CPU %", 1),
    Column("memory_mb", "lighthouse MB", 0),
    Column("join_s", "join s", 3),
    Column("join_worst_s", "worst", 3),
    Column("news_s", "kill to news s", 3),
    Column("news_worst_s", "worst", 3),
    Column("loss_s", "kill to quorum s", 3),
    Column("loss_worst_s", "worst", 3),
)
_SIMULATED_COLUMNS = (
    Column("groups", "groups", 0),
    Column("event", "event"),
    Column("count", "events", 0),
    Column("median_us", "median us", 1),
    Column("p99_us", "99 % us", 1),
    Column("worst_us", "worst us", 0),
    Column("total_ms", "all ms", 0),
    Column("news", "messages", 1),
)


@dataclass(slots=True)
class Fleet:
    """A lighthouse, and processes of simulated trainers; instants are monotonic seconds."""

    lighthouse: Child
    address: str
    load: list[Child]
    groups: int
    flags: list[str]
    deaf: list[Child]  # one with all that read nothing, if there are any
    num_deaf: int
    joins: list[float] = field(default_factory=list)
    news: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def all_in(self, groups: int) -> list[dict[str, Any]]:
        """Return when all trainers of the load are in a quorum of so many groups, and those that
        read nothing."""
        return self._ask_all({"do": "wait", "groups": groups + self.num_deaf})

    def _ask_all(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        for child in self.load:
            child.send(json.dumps(asked))
        return [json.loads(child.read_line(_WAIT_S)) for child in self.load]

    def start(self) -> float:
        """Start all groups; the seconds until all are in the first quorum."""
        for child in self.deaf:
            child.send('{"do": "start"}')
        began_at = min(each["at"] for each in self._ask_all({"do": "start"}))
        return float(max(each["quorum_at"] for each in self.all_in(self.groups)) - began_at)

    def train(self, seconds: float) -> dict[str, float]:
        """Train while no group joins or leaves."""
        before, server_s, load_s = self._steps(), self.lighthouse.cpu_s(), self._load_cpu_s()
        began_at = time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - began_at
        server_s = self.lighthouse.cpu_s() - server_s
        load_s = self._load_cpu_s() - load_s
        return {
            "steps_per_s": (self._steps() - before) / self.groups / took_s,
            "cpu_percent": 100 * server_s / took_s,
            "load_percent": 100 * load_s / took_s,
            "memory_mb": self.lighthouse.memory_bytes() / 1e6,
        }

    def _steps(self) -> int:
        return sum(each["steps"] for each in self._ask_all({"do": "report"}))

    def _load_cpu_s(self) -> float:
        return sum(child.cpu_s() for child in self.load)

    def join_and_kill(self, number: int) -> None:
        """One more group joins, trains for a moment, and its process is killed."""
        with Child(trainers(self.address, number, 1, self.flags)) as child:
            child.read_line(START_TIMEOUT_S)
            child.send('{"do": "start"}')
            joined_at = json.loads(child.read_line(_WAIT_S))["at"]
            answers = self.all_in(self.groups + 1)
            self.joins.append(max(each["quorum_at"] for each in answers) - joined_at)
            if self.num_deaf:
                return  # their sessions are about to be ended
            time.sleep(_PAUSE_S)
            killed_at = time.monotonic()
            child.kill()
            answers = self.all_in(self.groups)
            assert sum(each["num_informed"] for each in answers) >= self.groups
            self.news.append(max(each["lost_at"] for each in answers) - killed_at)
            self.losses.append(max(each["quorum_at"] for each in answers) - killed_at)
        time.sleep(_PAUSE_S)


def trainers(address: str, first: int, count: int, flags: list[str]) -> list[str]:
    own = [f"--address={address}", f"--first={first}", f"--count={count}"]
    return program("tools.benchmarks.children.fleet_trainers", *own, *flags)


@contextmanager
def fleet(
    lighthouse: Child, groups: int, processes: int, flags: list[str], num_deaf: int = 0
) -> Iterator[Fleet]:
    with ExitStack() as stack:
        address = lighthouse_address(lighthouse)
        load = [
            stack.enter_context(Child(trainers(address, first, count, flags)))
            for first, count in shares(groups, processes)
        ]
        deaf = []
        if num_deaf:
            command = trainers(address, _FIRST_DEAF, num_deaf, [*flags, "--deaf"])
            deaf.append(stack.enter_context(Child(command)))
        for child in (*load, *deaf):
            child.read_line(START_TIMEOUT_S)
        yield Fleet(lighthouse, address, load, groups, flags, deaf, num_deaf)


def measure(
    groups: int,
    *,
    steady: bool,
    seconds: float,
    joins: int,
    steps_per_s: float,
    processes: int,
    num_deaf: int,
) -> dict[str, object]:
    flags = [f"--step-s={1 / steps_per_s}"] + ["--steady"] * steady
    with (
        start_lighthouse(min_replicas=groups + num_deaf) as lighthouse,
        fleet(lighthouse, groups, processes, flags, num_deaf) as found,
    ):
        row: dict[str, object] = {
            "groups": groups,
            "mode": "steady" if steady else "asking in each step",
            "deaf": num_deaf,
            "start_s": found.start(),
        }
        time.sleep(_PAUSE_S)
        row |= found.train(seconds)
        for number in range(1 if num_deaf and joins else joins):
            found.join_and_kill(groups + number)
    for name, times in (("join", found.joins), ("news", found.news), ("loss", found.losses)):
        if times:
            row |= {f"{name}_s": statistics.median(times), f"{name}_worst_s": max(times)}
    return row


@click.command(context_settings={"show_default": True})
@click.option("--groups", type=click.IntRange(2, 5000), multiple=True, default=(100, 1000),
              help="Groups with sessions; may be repeated.")  # fmt: skip
@click.option("--steady/--asking", "steady", default=None,
              help="Only one mode: trainers ask when the membership changes, or in each step.",
              show_default="both")  # fmt: skip
@click.option("--steps-per-s", type=click.FloatRange(0.1, 1000.0), default=10.0,
              help="How fast a group would train.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0.1), default=10.0, help="Of steady training.")
@click.option("--joins", type=click.IntRange(0), default=3,
              help="How often another group joins, and is killed.")  # fmt: skip
@click.option("--load-processes", type=click.IntRange(1, 16), default=2,
              help="Processes that the groups are spread over.")  # fmt: skip
@click.option("--deaf", "num_deaf", type=click.IntRange(0, 5000), default=0,
              help="More groups, which do not read answers; for one join.")  # fmt: skip
@click.option("--simulated", type=click.IntRange(2, 20_000), multiple=True,
              help="Instead: so many groups in one process, with a virtual clock.")  # fmt: skip
@json_option
def main(
    groups: tuple[int, ...], steady: bool | None, steps_per_s: float, seconds: float, joins: int,
    load_processes: int, num_deaf: int, simulated: tuple[int, ...], json_file: Path | None,
) -> None:  # fmt: skip
    """A lighthouse with many groups, whose trainers are simulated."""
    if simulated:
        result = Result("fleet", "The core of a lighthouse", _SIMULATED_COLUMNS, {"joins": joins})
        for size in simulated:
            rows, memory = simulate(size, seconds=seconds, joins=joins)
            result.rows += rows
            result.notes.append(f"{size} groups: {memory}")
        hand_over(result, json_file)
        return
    settings = {"steps_per_s": steps_per_s, "seconds": seconds, "joins": joins}
    result = Result("fleet", "A lighthouse with many groups", _COLUMNS, dict(settings))
    result.notes.append("the trainers run on the same cores as the lighthouse: 'load CPU'")
    for size in groups:
        for mode in (False, True) if steady is None else (steady,):
            result.rows.append(
                measure(
                    size,
                    steady=mode,
                    seconds=seconds,
                    joins=joins,
                    steps_per_s=steps_per_s,
                    processes=load_processes,
                    num_deaf=num_deaf,
                )
            )
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
