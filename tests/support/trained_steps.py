"""Reads what the workers of the soft restart example print, and checks what it promises."""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(
    r"pid (\d+) rank (\d+) of (\d+) round (\d+) step (\d+) loss ([\d.]+) digest ([0-9a-f]{8})$"
)


@dataclass(frozen=True)
class Step:
    """One worker's update."""

    pid: int
    rank: int
    world_size: int
    round: int
    step: int
    loss: float
    digest: str


def trained(lines: Iterable[str]) -> list[Step]:
    return [step for step in map(_step, lines) if step is not None]


@functools.cache  # who waits for a step asks for all of them again and again
def _step(line: str) -> Step | None:
    match = _LINE.search(line)
    if match is None:
        return None
    pid, rank, size, round_, step = map(int, match.groups()[:5])
    return Step(pid, rank, size, round_, step, float(match[6]), match[7])


def check_all(steps: list[Step]) -> None:
    """Bits are equal across ranks in every step, and no worker's step goes back.

    Within a world none is left out; a worker that was away may have missed some.
    """
    digests = defaultdict(set)
    by_pid = defaultdict(list)
    for each in steps:
        digests[each.step].add(each.digest)
        by_pid[each.pid].append(each)
    assert not {step: found for step, found in digests.items() if len(found) > 1}
    for found in by_pid.values():
        for before, after in itertools.pairwise(found):
            assert after.step > before.step
            assert after.step == before.step + 1 or after.round > before.round


def check_survivor(steps: list[Step]) -> None:
    """Check the steps of a worker that was in all worlds.

    It may have missed the update in which a world broke, and no other.
    """
    for before, after in itertools.pairwise(steps):
        assert after.step <= before.step + 1 + (after.round > before.round)
    assert steps[-1].loss < steps[0].loss
