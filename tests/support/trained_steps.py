"""Reads what the workers of the soft restart example print, and checks what it promises."""

from __future__ import annotations

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
    found = []
    for line in lines:
        match = _LINE.search(line)
        if match:
            pid, rank, size, round_, step = map(int, match.groups()[:5])
            found.append(Step(pid, rank, size, round_, step, float(match[6]), match[7]))
    return found


def check_all(steps: list[Step]) -> None:
    """Bits are equal across ranks in every step, and no worker's step goes back or skips one."""
    digests = defaultdict(set)
    by_pid = defaultdict(list)
    for each in steps:
        digests[each.step].add(each.digest)
        by_pid[each.pid].append(each.step)
    assert not {step: found for step, found in digests.items() if len(found) > 1}
    for pid, numbers in by_pid.items():
        jumps = [
            (before, after) for before, after in itertools.pairwise(numbers) if after != before + 1
        ]
        # One that was lost in a step may have missed its update, and gets it from another.
        assert all(after == before + 2 for before, after in jumps), (pid, jumps)
