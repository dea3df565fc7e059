"""The ledger of `LivenessChecks`: what a simulated lighthouse has received and sent about a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchft_svc.core.quorum.activity import Activity, Phase


@dataclass(slots=True)
class Ledger:
    """The ledger of one job, in one life of a lighthouse.

    ``late``: groups that are late, and are not awaited until they ask. ``evicted``:
    left out of ``previous`` since it was published, and have not asked; ``recalled`` may be awaited
    again, because nobody else was left. ``doing``: what groups report, or that they ask.
    """

    previous: frozenset[str] = frozenset()
    asking: dict[str, float] = field(default_factory=dict)
    gave_up: dict[str, tuple[float, float]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    evicted: set[str] = field(default_factory=set)
    recalled: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    doing: dict[str, Activity] = field(default_factory=dict)
    reported_at: dict[str, float] = field(default_factory=dict)  # when they reported that
    left_healing: set[str] = field(default_factory=set)  # and that was reported
    first_back_at: float | None = None  # the first of ``previous`` has asked
    due_since: float | None = None
    hangs_unhandled_since: float | None = None

    def going_on(self) -> frozenset[str]:
        """The groups of the last quorum that ask, or may still ask."""
        return self.previous - self.evicted - self.recalled - self.late - self.dead

    def who(self, *phases: Phase) -> set[str]:
        return {key for key, doing in self.doing.items() if doing.phase in phases}

    def may_be_late(self, now: float, join_timeout_s: float) -> bool:
        """Whether groups of the last quorum that have not asked may be out of time."""
        return self.first_back_at is not None and now >= self.first_back_at + join_timeout_s

    def forget(self, replica_id: str) -> None:
        self.asking.pop(replica_id, None)
        self.gave_up.pop(replica_id, None)
        self.doing.pop(replica_id, None)
        self.reported_at.pop(replica_id, None)
        for ids in (self.late, self.evicted, self.recalled, self.left_healing):
            ids.discard(replica_id)
        self.dead.add(replica_id)
