"""Which groups heal, and who was left out for that: heals have their own deadline (rule Q16)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heal:
    """A group has been healing since ``since``, until ``ended_at`` (None: it still does)."""

    since: float
    ended_at: float | None = None

    def patience_until(self, join_timeout_s: float) -> float:
        """Until when this is reason to wait: when it is over, its group has a step to finish."""
        return math.inf if self.ended_at is None else self.ended_at + join_timeout_s


class Heals:
    """Those of one job's living groups that have not asked since; ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self.known: dict[str, Heal] = {}
        self._left_out: dict[str, Heal] = {}  # to be reported
        self._reported: set[str] = set()

    def told(self, replica_id: str, since: float | None, now: float) -> bool:
        """A group heals since ``since``, or (None) does something else; whether a heal has ended
        with this."""
        heal = self.known.get(replica_id)
        if since is not None:
            self.known[replica_id] = Heal(min(since, heal.since) if heal else since)
            return False
        if heal is None or heal.ended_at is not None:
            return False
        self.known[replica_id] = Heal(heal.since, now)
        return True

    def is_under_way(self, replica_id: str) -> bool:
        """As far as it has told."""
        heal = self.known.get(replica_id)
        return heal is not None and heal.ended_at is None

    def over(self, replica_id: str) -> bool:
        """The group asks; whether it has healed since the last time."""
        return self.known.pop(replica_id, None) is not None

    def gone(self, replica_id: str) -> bool:
        """Whether it healed, or had healed and not asked yet."""
        self._left_out.pop(replica_id, None)
        self._reported.discard(replica_id)
        return self.known.pop(replica_id, None) is not None

    def left_out(self, replica_ids: Iterable[str]) -> None:
        """Nobody waits for these any longer."""
        for key in replica_ids:
            heal = self.known.get(key)
            if heal is not None and heal.ended_at is None and key not in self._reported:
                self._left_out[key] = heal

    def take_left_out(self) -> list[tuple[str, float]]:
        """Who was left out while it healed, and since when it did; each group is told once."""
        taken = [(key, heal.since) for key, heal in self._left_out.items()]
        self._reported.update(self._left_out)
        self._left_out.clear()
        return taken
