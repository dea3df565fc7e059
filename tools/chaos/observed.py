"""Measures the goodput of a job from outside: by the commits that its trainers print."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tools.demo.events import Committed

# The usual time of a step is that of the last ones that nothing disturbed.
NUM_USUAL = 20


@dataclass(frozen=True, slots=True)
class Observed:
    """What an observer sees of the time from ``since`` to the last commit, ``until``."""

    since: float
    until: float
    committed_s: float

    @property
    def ratio(self) -> float:
        """The share of the time that ended in committed steps."""
        return self.committed_s / (self.until - self.since)


def observe(commits: Iterable[Committed], since: float, until: float) -> Observed:
    """The time between commits, where the quorum stays the same; where it does not, something has
    disturbed the step, and no more than a usual step of this time was of use. Steps that a job goes
    back behind were not."""
    first: dict[tuple[int, int], Committed] = {}  # of each step, the group that was first
    for commit in sorted(commits, key=lambda each: each.at):
        if since <= commit.at <= until:
            first.setdefault((commit.quorum_id, commit.step), commit)
    usual: deque[float] = deque(maxlen=NUM_USUAL)
    counted: list[tuple[int, float]] = []  # the step, and its time
    last = None
    for commit in sorted(first.values(), key=lambda each: each.at):
        if last is not None:
            took_s = commit.at - last.at
            if commit.quorum_id == last.quorum_id:
                usual.append(took_s)
            else:
                took_s = min(took_s, statistics.median(usual)) if usual else 0.0
            while counted and counted[-1][0] >= commit.step:
                counted.pop()
            counted.append((commit.step, took_s))
        last = commit
    committed_s = sum(took_s for _, took_s in counted)
    return Observed(since, since if last is None else last.at, committed_s)
