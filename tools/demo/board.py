"""Decides what state each group is in, from the events so far, for the screen and the director."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from tools.demo.events import (
    Committed,
    Discarded,
    Event,
    Exited,
    Finished,
    Healed,
    Joined,
    Killed,
    PhaseBegan,
    Started,
)

# Enough for a median that one slow step does not move, and for a curve that fits on a line.
_RECENT = 40


@dataclass(slots=True)
class GroupStatus:
    """What is known of one group; ``state`` is one of starting, healing, training, killed, gone."""

    group: int
    state: str = "waiting"
    incarnation: int = 0
    pid: int = 0
    step: int = 0
    num_commits: int = 0
    num_discards: int = 0
    num_kills: int = 0
    num_participants: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    phase_times_s: dict[str, deque[float]] = field(default_factory=dict)
    phase: PhaseBegan | None = None
    committed_at: float | None = None

    @property
    def step_time_s(self) -> float:
        """Median seconds between recent commits, 0 before the second."""
        return median(self.step_times_s) if self.step_times_s else 0.0

    def phase_time_s(self, phase: str) -> float:
        """Median seconds that the trainer recently spent in ``phase``, 0 if never."""
        times = self.phase_times_s.get(phase)
        return median(times) if times else 0.0


class Board:
    """The status of every group, moved on by ``apply``."""

    def __init__(self, num_groups: int) -> None:
        self.groups = [GroupStatus(group) for group in range(num_groups)]

    @property
    def all_training(self) -> bool:
        return all(status.state == "training" for status in self.groups)

    @property
    def top_step(self) -> int:
        return max(status.step for status in self.groups)

    @property
    def last_commit_at(self) -> float:
        """Instant of the latest commit of any group, 0 before the first."""
        return max(status.committed_at or 0.0 for status in self.groups)

    def apply(self, event: Event) -> str | None:
        """Take one event in; a sentence for the list of events if it deserves one."""
        status = self.groups[event.group]
        if isinstance(event, PhaseBegan):
            _begin_phase(status, event)
            return None
        if isinstance(event, Committed):
            return _commit(status, event)
        return _change(status, event)


def _begin_phase(status: GroupStatus, event: PhaseBegan) -> None:
    if status.phase is not None:
        times = status.phase_times_s.setdefault(status.phase.phase, deque(maxlen=_RECENT))
        times.append(event.at - status.phase.at)
    status.phase = event


def _commit(status: GroupStatus, event: Committed) -> str | None:
    # A life's last words may be read after its kill: that does not bring it back.
    has_ended = status.state in ("killed", "gone") and event.incarnation <= status.incarnation
    trains = event.participating and not has_ended
    came_back = trains and status.state != "training"
    if status.committed_at is not None and status.state == "training":
        status.step_times_s.append(event.at - status.committed_at)
    status.step, status.committed_at = event.step, event.at
    status.num_commits += 1
    status.num_participants = event.num_participants
    if trains:
        status.state = "training"
    if event.participating:
        status.losses.append(event.loss)
    return f"trains with the others, step {event.step}" if came_back else None


def _change(status: GroupStatus, event: Event) -> str | None:
    match event:
        case Started():
            status.state, status.pid, status.incarnation = "starting", event.pid, event.incarnation
            status.phase = None
            return f"started, process {event.pid}"
        case Joined():
            status.state = "healing"
            return "asks to join"
        case Discarded():
            status.num_discards += 1
            return f"discarded an update; still at step {event.step}"
        case Healed():
            return "has taken over another group's state"
        case Killed():
            phase = status.phase.phase if status.phase else "its start"
            where = "while it heals" if status.state == "healing" else f"in phase {phase}"
            status.state = "killed"
            status.num_kills += 1
            what = "trainer and sidecar" if event.whole_group else "trainer"
            return f"SIGKILL for its {what}, {where}"
        case Finished():
            status.state = "gone"
            return f"leaves after step {event.step}"
        case Exited():
            was_killed = status.state == "killed"
            status.state = "killed" if was_killed else "gone"
            return None if event.expected else f"died by itself, status {event.status}"
        case _:
            raise AssertionError(f"unknown event {event!r}")
