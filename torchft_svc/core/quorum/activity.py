"""What workers and groups are doing, since when, and which of them have hung (rule Q17).

``now`` and ``since`` are monotonic seconds on the clock of the caller.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


class Phase(enum.Enum):
    """What a worker is doing, as its manager and the lighthouse know it."""

    IDLE = "idle"
    QUORUM = "quorum"
    HEALING = "healing"
    TRAINING = "training"
    VOTING = "voting"
    APPLYING = "applying"

    __hash__ = object.__hash__  # Enum's own is written in Python, and a step needs eight


# A group hangs only in phases that it has to end by itself. One that waits for others, for a quorum
# or for gradients, reports QUORUM; a heal has its own deadline; and what users do between two steps
# (an evaluation, a checkpoint) may take long.
HANGING_PHASES = frozenset({Phase.TRAINING, Phase.VOTING})
# What holds a worker up that is not its own group; each has a deadline.
HELD_UP_PHASES = frozenset({Phase.QUORUM, Phase.HEALING})


@dataclass(frozen=True, slots=True)
class Activity:
    """A worker or group is in ``phase`` of ``step`` since ``since``, without a change.

    ``received_bytes``, ``state_bytes``: how much of the state that it heals with has arrived, and
    how large that is (0: it does not heal, or this is not known).
    """

    phase: Phase
    step: int
    since: float
    received_bytes: int = 0
    state_bytes: int = 0

    def has_begun(self, step: int) -> bool:
        """Whether ``step`` is under way, or over; a heal is no part of a step."""
        if self.phase is Phase.HEALING:
            return True
        return self.step > step or (self.step == step and self.phase is not Phase.IDLE)

    @property
    def reached(self) -> int:
        """The step whose weights are certainly in place. Between two steps an update may still be
        under way, and a group that heals is not there yet."""
        if self.phase is Phase.HEALING:
            return 0
        return self.step - (self.phase is Phase.IDLE)


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """A worker's message to its manager when its phase changes, or more of a state has arrived.

    ``received_bytes``, ``state_bytes``: see `Activity`.

    ``went_on_to``: the step that the group is in, or begins next, if that is without a question (0:
    it is not). ``round_before``: the round before that of the worker's last quorum (0: not known).
    """

    phase: Phase
    step: int
    went_on_to: int = 0
    round_before: int = 0
    received_bytes: int = 0
    state_bytes: int = 0


class WorkerActivities:
    """What the workers of a group do; the group does what the slowest of them does.

    That is the one that has stood still for the longest time.

    A worker that votes waits for the others: what they do counts, as long as they do anything else.
    A worker that heals or waits for other groups counts first: the others of its group may wait for
    it in a collective of their own, and cannot distinguish that from a hang. The same is true of
    one that starts, as it may fetch a preview for long before it asks (rule K1): until then nothing
    is known of its group, and the others' phases begin no earlier.
    """

    def __init__(self) -> None:
        self._workers: dict[int, Activity] = {}
        self._held_up: set[int] = set()
        self._starting: set[int] = set()

    def starts(self, group_rank: int) -> None:
        """A worker has opened its stream: it asks, or reports what it does, when it has started."""
        if group_rank not in self._workers:
            self._starting.add(group_rank)

    def asks(self, group_rank: int, step: int, now: float) -> None:
        """A worker asks for the quorum: it waits for the others of its group first."""
        self._end_start(group_rank, now)
        self._workers[group_rank] = Activity(Phase.QUORUM, step, now)
        self._held_up.discard(group_rank)

    def reported(self, group_rank: int, report: PhaseReport, now: float) -> None:
        """A worker has changed to a phase, maybe through others back to the same one; or its heal
        has progressed.

        `Phase.QUORUM` says that it waits for the gradients of other groups.
        """
        self._end_start(group_rank, now)
        phase, known = report.phase, self._workers.get(group_rank)
        heals_on = report.state_bytes > 0 and known is not None and known.phase is phase
        since = known.since if known is not None and heals_on else now
        self._workers[group_rank] = Activity(
            phase, report.step, since, report.received_bytes, report.state_bytes
        )
        if phase in HELD_UP_PHASES:
            self._held_up.add(group_rank)
        else:
            self._held_up.discard(group_rank)

    def gone(self, group_rank: int) -> None:
        self._workers.pop(group_rank, None)
        self._held_up.discard(group_rank)
        self._starting.discard(group_rank)

    def _end_start(self, group_rank: int, now: float) -> None:
        """The others could end no phase before, if they have waited for this worker."""
        if group_rank in self._starting:
            self._starting.remove(group_rank)
            for other, doing in self._workers.items():
                if doing.phase in HANGING_PHASES:
                    self._workers[other] = replace(doing, since=now)

    @property
    def num_workers(self) -> int:
        """How many have reported something."""
        return len(self._workers)

    def reached(self, num_workers: int) -> int:
        """The step that all ``num_workers`` have reached (0: not all have reported one)."""
        if self.num_workers < num_workers:
            return 0
        return max(0, min(each.reached for each in self._workers.values()))

    def slowest(self) -> Activity | None:
        """None: no worker has reported anything, or one of them starts."""
        if self._starting:
            return None
        counting = [self._workers[rank] for rank in self._held_up] or self._workers.values()
        return min(
            counting, key=lambda each: (each.phase is Phase.VOTING, each.since), default=None
        )


class HangWatch:
    """The activities of a job's groups; one that lasts for ``timeout_s`` is a hang (None: none is).

    All costs are constant, except for one look at all groups about once in ``timeout_s``.
    ``unhandled`` groups hang, and nothing was done about it yet.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._reports: dict[str, tuple[Activity, float]] = {}  # the last ones, and when they came
        self._hung: set[str] = set()
        self.unhandled: set[str] = set()
        self._look_at: float | None = None

    def record_activity(self, replica_id: str, activity: Activity, now: float) -> None:
        """Record what a group reports to do."""
        self._reports[replica_id] = activity, now
        ends_at = self._hangs_at(activity)
        if ends_at is None or ends_at > now:
            self._hung.discard(replica_id)
            self.unhandled.discard(replica_id)
        if replica_id in self._hung or ends_at is None:
            return
        if self._look_at is None or ends_at < self._look_at:
            self._look_at = ends_at

    def forget_group(self, replica_id: str) -> None:
        """Forget a group that is gone."""
        self._reports.pop(replica_id, None)
        self._hung.discard(replica_id)
        self.unhandled.discard(replica_id)

    def activity(self, replica_id: str) -> Activity | None:
        """The last report of a group (None: there is none)."""
        report = self._reports.get(replica_id)
        return report and report[0]

    def reported_at(self, replica_id: str) -> float:
        """The time of the last report of a group (-inf: there is none)."""
        return self._reports[replica_id][1] if replica_id in self._reports else -math.inf

    def why(self, replica_id: str, now: float) -> str:
        """What a group hangs in, for people."""
        hang, _ = self._reports[replica_id]
        return f"it hangs: {hang.phase.value} in step {hang.step} for {now - hang.since:.1f} s"

    def is_hung(self, replica_id: str) -> bool:
        """Whether the group hangs."""
        return replica_id in self._hung

    def look_at(self) -> float | None:
        """The time to call `newly_hung`; may be too early, never too late."""
        return self._look_at

    def newly_hung(self, now: float) -> list[tuple[str, Activity]]:
        """The groups that have hung since the last call, each with what it hangs in."""
        if self._look_at is None or now < self._look_at:
            return []
        found = []
        later = []
        for replica_id, (activity, _) in self._reports.items():
            ends_at = self._hangs_at(activity)
            if ends_at is None or replica_id in self._hung:
                continue
            if ends_at > now:
                later.append(ends_at)
            else:
                self._hung.add(replica_id)
                self.unhandled.add(replica_id)
                found.append((replica_id, activity))
        self._look_at = min(later, default=None)
        return found

    def handle_again(self, replica_ids: Iterable[str]) -> None:
        """Add those of these groups that hang to ``unhandled``: what was done about them was
        undone."""
        self.unhandled |= self._hung.intersection(replica_ids)

    def _hangs_at(self, activity: Activity) -> float | None:
        if self._timeout_s is None or activity.phase not in HANGING_PHASES:
            return None
        return activity.since + self._timeout_s
