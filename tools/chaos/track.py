"""Follows who committed what and when, as the events come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tools.demo.events import Committed, Event, PhaseBegan

Place = tuple[int, int]  # group, group rank


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit, and when its forward pass began."""

    event: Committed
    begun_at: float


@dataclass(slots=True)
class Track:
    """``commits`` in the order in which they were read."""

    commits: list[Commit] = field(default_factory=list)
    _begun_at: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _latest: dict[Place, Commit] = field(default_factory=dict)

    def add(self, events: Iterable[Event]) -> None:
        """More events; those of one worker are in order."""
        for event in events:
            life = (*event.life, event.worker)
            if isinstance(event, PhaseBegan) and event.phase == "forward":
                self._begun_at[life] = event.at
            elif isinstance(event, Committed):
                commit = Commit(event, self._begun_at.get(life, event.at))
                self.commits.append(commit)
                self._latest[event.group, event.worker] = commit

    def fresh(self, place: Place, since: float) -> Commit | None:
        """The latest commit of a worker if its update was begun after ``since``."""
        commit = self._latest.get(place)
        return commit if commit is not None and commit.begun_at >= since else None

    def first_after(self, place: Place, since: float) -> float | None:
        """Time when a worker first committed an update that it had begun after ``since``."""
        found = None
        for commit in reversed(self.commits):
            if commit.event.at < since:
                break
            event = commit.event
            if (event.group, event.worker) == place and commit.begun_at >= since:
                found = event.at
        return found

    def top_step(self, groups: Iterable[int]) -> int:
        wanted = set(groups)
        steps = (c.event.step for (group, _), c in self._latest.items() if group in wanted)
        return max(steps, default=0)
