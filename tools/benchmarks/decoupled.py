"""Measures learners of Decoupled DiLoCo while one is slow, one is killed and one is frozen.

The figure is the tokens of the living learners, divided by what each of them would have seen at its
own pace, which is measured first, without merges, for all of them at the same time.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
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
from tools.benchmarks.table import Column, Result, hand_over

_COLUMNS = (
    Column("learner", "learner"),
    Column("own", "own pace, tokens/s", 0),
    Column("merged", "with merges", 0),
    Column("living_s", "living, s"),
    Column("ratio", "ratio", 3),
)
# The first lines of a process are not its usual pace.
_WARM_UP_S = 2.0
# A process may run for a moment after the signal.
_STOPPED_S = 0.1


@dataclass
class Learner:
    """A learner, whose process may be replaced, and what all of them have printed.

    ``spans``: tokens and seconds of each time in which it lived and ran.
    """

    name: str
    pause_s: float
    child: Child | None = None
    began: tuple[float, int] | None = None
    last: tuple[float, int] = (0.0, 0)
    merges: int = 0
    spans: list[tuple[int, float]] = field(default_factory=list)

    def read(self) -> None:
        """Take in what the process has printed."""
        if self.child is None:
            return
        while self.child.wait_for_output(0.0) and self.child.read_available():
            pass
        for line in self.child.take_lines():
            at, tokens, merges = line.split()
            self.last = float(at), int(tokens)
            self.merges = int(merges)
            self.began = self.began or self.last

    def end_span(self) -> None:
        """The learner does not run any more; the next line begins another span."""
        self.read()
        if self.began is not None:
            self.spans.append((self.last[1] - self.began[1], self.last[0] - self.began[0]))
        self.began = None

    @property
    def tokens_per_s(self) -> float:
        return sum(tokens for tokens, _ in self.spans) / self.living_s

    @property
    def living_s(self) -> float:
        return sum(seconds for _, seconds in self.spans)


class Measurement:
    """Learners that run at the same time."""

    def __init__(self, stack: ExitStack, pauses: dict[str, float], *flags: str, **env: str) -> None:
        self.learners = {name: Learner(name, pause_s) for name, pause_s in pauses.items()}
        self._stack = stack
        self._flags = flags
        self._env = env
        for name in self.learners:
            self.start(name)
        for learner in self.learners.values():
            assert learner.child is not None
            learner.child.wait_for_output(START_TIMEOUT_S)
        self.run(_WARM_UP_S)
        for learner in self.learners.values():
            if learner.began is None and learner.child is not None:
                raise learner.child.error("has not begun to train")
            learner.began = None

    def start(self, name: str) -> None:
        learner = self.learners[name]
        command = program(
            "tools.benchmarks.children.decoupled_learner",
            f"--pause={learner.pause_s}",
            *self._flags,
        )
        env = {**self._env, "REPLICA_GROUP_ID": name, "OMP_NUM_THREADS": "1"}
        learner.child = self._stack.enter_context(Child(command, env))

    def kill(self, name: str) -> None:
        learner = self.learners[name]
        assert learner.child is not None
        learner.child.kill()
        learner.end_span()
        learner.child = None

    def signal(self, name: str, number: signal.Signals) -> None:
        learner = self.learners[name]
        assert learner.child is not None
        os.kill(learner.child.pid, number)
        if number == signal.SIGSTOP:
            time.sleep(_STOPPED_S)
            learner.end_span()  # with the last line that it has printed

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for learner in self.learners.values():
                learner.read()
            time.sleep(0.05)

    def end(self) -> None:
        for learner in self.learners.values():
            learner.end_span()
            if learner.child is not None:
                learner.child.stop()


def measure(pauses: dict[str, float], seconds: float) -> tuple[list[dict[str, Any]], int]:
    """The rows, and how many merges there were."""
    with ExitStack() as stack:
        alone = Measurement(stack, pauses, "--alone")
        alone.run(seconds / 4)
        alone.end()
        lighthouse = stack.enter_context(start_lighthouse(min_replicas=1))
        address = lighthouse_address(lighthouse)
        merged = Measurement(stack, pauses, TORCHFT_LIGHTHOUSE=address)
        before = merged.learners["fast"].merges
        for _ in range(2):
            merged.run(seconds / 8)
            merged.kill("killed")
            merged.run(seconds / 8)
            merged.start("killed")
            merged.run(seconds / 8)
            merged.signal("frozen", signal.SIGSTOP)
            merged.run(seconds / 8)
            merged.signal("frozen", signal.SIGCONT)
        merges = merged.learners["fast"].merges - before
        merged.end()
    rows: list[dict[str, Any]] = []
    for name, learner in merged.learners.items():
        own = alone.learners[name].tokens_per_s
        rows.append(
            {
                "learner": name,
                "own": own,
                "merged": learner.tokens_per_s,
                "living_s": learner.living_s,
                "ratio": learner.tokens_per_s / own,
            }
        )
    expected = sum(row["own"] * row["living_s"] for row in rows)
    seen = sum(row["merged"] * row["living_s"] for row in rows)
    rows.append({"learner": "all living", "ratio": seen / expected})
    return rows, merges


@click.command(context_settings={"show_default": True})
@click.option("--seconds", type=click.FloatRange(8.0), default=120.0, help="With merges.")
@click.option("--pause", "pause_s", type=float, default=0.02, help="Of a fast learner's step.")
@click.option("--slower", type=float, default=5.0, help="How many times as long the slow one's is.")
@json_option
def main(seconds: float, pause_s: float, slower: float, json_file: Path | None) -> None:
    """Measure four learners, of which one is slow, one is killed and one is frozen, twice each."""
    pauses = {"fast": pause_s, "killed": pause_s, "frozen": pause_s, "slow": slower * pause_s}
    settings: dict[str, Any] = {"seconds": seconds, "pause_s": pause_s, "slower": slower}
    result = Result("decoupled", "Decoupled DiLoCo under failures", _COLUMNS, settings)
    result.rows, merges = measure(pauses, seconds)
    result.notes = [f"{merges} merges"]
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
