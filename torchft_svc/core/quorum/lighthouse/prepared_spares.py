"""Keeps the prepared spares of a job: groups that stand by until there is a place for one of them.

A prepared spare is no group of `Membership`: no rule of quorums knows of it, so it is in none, is
not counted, and delays nobody. Its request is kept here; when a place is free, the one that has
stood by for the longest time becomes an ordinary group that asks (rule G2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchft_svc.core.quorum.types import Member

# A job that loses more groups than that at once has another problem.
MAX_PREPARED_SPARES = 256


@dataclass(frozen=True, slots=True)
class PreparedSpare:
    """A prepared spare, for the status of its job.

    ``asks``: it can take a place at once, because its model is built. ``silent_s``: since its last
    sign of life.
    """

    replica_id: str
    asks: bool = False
    silent_s: float = 0.0


@dataclass(slots=True)
class _Record:
    seen_at: float
    request: tuple[Member, int] | None = None  # and the caller that waits for its answer


@dataclass(slots=True)
class PreparedSpares:
    """The prepared spares of one job, the one that has stood by for the longest time first.

    One that was silent for ``heartbeat_timeout_s`` gets no place until it gives a sign of life.
    """

    heartbeat_timeout_s: float
    _records: dict[str, _Record] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether no other one is accepted."""
        return len(self._records) >= MAX_PREPARED_SPARES

    def add(self, replica_id: str, now: float) -> None:
        """Let a group stand by; it has not asked yet."""
        self._records.setdefault(replica_id, _Record(now)).seen_at = now

    def record_sign(self, replica_id: str, now: float) -> bool:
        """Record a sign of life; returns whether the group can take a place since then."""
        record = self._records[replica_id]
        was_silent = self._is_silent(record, now)
        record.seen_at = now
        return was_silent and record.request is not None

    def record_request(self, member: Member, caller: int, now: float) -> int | None:
        """Record that ``caller`` waits for a place for ``member``; returns the caller before."""
        record = self._records[member.replica_id]
        before, record.request = record.request, (member, caller)
        record.seen_at = now
        return before[1] if before else None

    def withdraw(self, caller: int) -> bool:
        """Drop the request of ``caller``, which waits no longer; whether it was of a spare."""
        for record in self._records.values():
            if record.request is not None and record.request[1] == caller:
                record.request = None
                return True
        return False

    def forget_group(self, replica_id: str) -> int | None:
        """Forget a group that is gone; returns the caller that waited for its place, if any."""
        record = self._records.pop(replica_id, None)
        return record.request[1] if record and record.request else None

    def pop_next(self, now: float) -> tuple[Member, int] | None:
        """Remove the group that is to take a place, and return its request (None: none can)."""
        for replica_id, record in self._records.items():
            if record.request is not None and not self._is_silent(record, now):
                del self._records[replica_id]
                return record.request
        return None

    def _is_silent(self, record: _Record, now: float) -> bool:
        return now - record.seen_at >= self.heartbeat_timeout_s

    def describe(self, now: float) -> tuple[PreparedSpare, ...]:
        """All of them, for the status."""
        return tuple(
            PreparedSpare(key, record.request is not None, now - record.seen_at)
            for key, record in self._records.items()
        )

    @property
    def replica_ids(self) -> list[str]:
        """The replica ids of all of them."""
        return list(self._records)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._records

    def __len__(self) -> int:
        return len(self._records)
