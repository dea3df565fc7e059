"""Checks which prepared spares take places in their jobs, and when they end (rules G1, G2, G4).

Like the other checks it keeps ledgers of its own, from what a lighthouse receives and sends.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tools.sim.invariants import SLACK_S, must
from torchft_svc.core.quorum.session_messages import Departure, Leave
from torchft_svc.core.quorum.types import Quorum

Key = tuple[str, str]  # job and replica id


@dataclass(slots=True)
class _Spare:
    seen_at: float
    asks: bool = False


@dataclass(slots=True)
class _Job:
    """What a lighthouse knows of one job. ``least`` and ``most`` places it has, as far as that is
    certain; ``asked``: living groups that have a place; ``members``: of the last quorum;
    ``reported``: groups that were in a quorum elsewhere, before the first one here;
    ``remaining``: of the last quorum, those that have not ended on purpose. ``away``: spares whose
    session has ended, and when; ``ending``: those that have to end as soon as they have a session
    again."""

    least: int = 0
    most: int = 0
    living: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    members: frozenset[str] = frozenset()
    reported: set[str] = field(default_factory=set)
    remaining: set[str] = field(default_factory=set)
    former: set[str] = field(default_factory=set)
    spares: dict[str, _Spare] = field(default_factory=dict)  # the longest there first
    away: dict[str, float] = field(default_factory=dict)
    ending: set[str] = field(default_factory=set)
    due_since: float | None = None

    @property
    def has_finished(self) -> bool:
        """Whether all groups of the last quorum have ended on purpose, and no other one lives."""
        return bool(self.members) and not self.remaining and not self.living


class PlaceChecks:
    """Checks one life of a lighthouse; times are on its clock."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._jobs: dict[str, _Job] = {}

    # -- what comes in ---------------------------------------------------------------------------

    def opened(self, key: Key, num_groups: int, now: float, *, is_spare: bool) -> None:
        """A session begins, of a group that was in a quorum of ``num_groups`` (0: in none)."""
        job, replica_id = self._job(key), key[1]
        if is_spare and replica_id not in job.living:
            job.spares.setdefault(replica_id, _Spare(now)).seen_at = now
            job.away.pop(replica_id, None)
            return
        self._admit(job, replica_id, has_place=num_groups > 0)
        if num_groups and not job.members:
            job.reported.add(replica_id)
        job.most = max(job.most, num_groups)

    def record_sign(self, key: Key, now: float) -> bool:
        """A sign of life; whether it is of a spare that stands by."""
        spare = self._job(key).spares.get(key[1])
        if spare is not None:
            spare.seen_at = now
        elif key[1]:
            self._admit(self._job(key), key[1], has_place=False)
        return spare is not None

    def asked(self, key: Key, seen_quorum_id: int, *, has_rival: bool) -> bool:
        """A group asks; returns whether it waits for a place."""
        job, replica_id = self._job(key), key[1]
        spare = job.spares.get(replica_id)
        if spare is not None and not seen_quorum_id:
            spare.asks = True
            return True
        job.spares.pop(replica_id, None)
        self._admit(job, replica_id, has_place=not has_rival)
        return False

    def withdrew(self, key: Key) -> None:
        spare = self._job(key).spares.get(key[1])
        if spare is not None:
            spare.asks = False

    def refused(self, key: Key) -> None:
        """Forget a group that is refused because an earlier one has its name: it is not lost."""
        self._forget(self._job(key), key[1])

    def left(self, key: Key, now: float, leave: Leave | None = None) -> None:
        """A group leaves, or its last session has ended; a group is gone when that is reported."""
        job = self._job(key)
        was_spare = job.spares.pop(key[1], None) is not None
        if was_spare and leave is None and job.living:
            job.away[key[1]] = now
        if leave is None or not leave.ends or key[1] not in job.members & job.living:
            return
        job.remaining.discard(key[1])
        if leave.departure is Departure.OTHER:
            job.least, job.most = max(0, job.least - 1), max(0, job.most - 1)

    def _job(self, key: Key) -> _Job:
        return self._jobs.setdefault(key[0], _Job())

    def _admit(self, job: _Job, replica_id: str, *, has_place: bool) -> None:
        if not job.living and job.has_finished:  # another run
            job.least = job.most = 0
            job.members = frozenset()
            job.ending.clear()
        job.living.add(replica_id)
        if has_place:
            job.asked.add(replica_id)

    # -- what goes out ---------------------------------------------------------------------------

    def placed(self, key: Key, now: float, *, has_rival: bool) -> None:
        """Check that there is a place, and that the spare is the first of those that can join."""
        job, replica_id = self._job(key), key[1]
        in_quorum = (job.members or job.reported) & job.living
        must(bool(in_quorum), "G2", f"{key} takes a place of a job that is lost")
        first = next((each for each, it in job.spares.items() if self._can_join(it, now)), None)
        must(first == replica_id, "G2", f"{key} takes a place, and {first} has waited for longer")
        what = f"{key} takes one of {job.most} places, which {sorted(job.asked)} have"
        must(len(job.asked) < job.most, "G2", what)
        del job.spares[replica_id]
        job.former.add(replica_id)
        self._admit(job, replica_id, has_place=not has_rival)

    def returned(self, key: Key, now: float) -> None:
        """Check that a spare which has taken a place stands by again for a reason."""
        job, replica_id = self._job(key), key[1]
        must(replica_id in job.former, "G2", f"{key} was never a spare, and has to stand by")
        living = (job.members & job.living) - job.former
        must(not living, "G2", f"{key} has to stand by again, while {sorted(living)} live")
        self._forget(job, replica_id)
        job.spares[replica_id] = _Spare(now, asks=True)

    def published(self, name: str, quorum: Quorum, *, goes_back: bool) -> None:
        """Check a quorum; ``goes_back``: at an earlier step than that of the job."""
        job = self._jobs.setdefault(name, _Job())
        ids = {each.replica_id for each in quorum.participants}
        is_for_spares = ids <= job.former and job.members & job.living <= ids
        must(not (goes_back and is_for_spares), "G2", f"{sorted(ids)} take {name} back")
        job.members, job.reported = frozenset(ids), set()
        early = job.members & job.spares.keys()
        must(not early, "G1", f"{sorted(early)} stand by, and are in a quorum of {name}")
        job.remaining = set(job.members)
        num_ordinary = len(job.members - job.former)
        job.least, job.most = max(job.least, num_ordinary), max(job.most, num_ordinary)
        job.asked |= job.members

    def gone(self, key: Key, now: float) -> bool:
        """A group is gone; returns whether its job has finished with that."""
        job = self._job(key)
        self._forget(job, key[1])
        if job.has_finished:
            limit_s = self._heartbeat_timeout_s
            job.ending = {each for each, since in job.away.items() if since + limit_s > now}
            job.ending |= job.spares.keys()
        if not job.living:
            job.away.clear()
        return job.has_finished

    def _forget(self, job: _Job, replica_id: str) -> None:
        for ids in (job.living, job.asked, job.former):
            ids.discard(replica_id)
        if job.remaining and not job.living:  # what comes is no member
            job.members = frozenset()

    # -- what is looked at -----------------------------------------------------------------------

    def has_finished(self, name: str) -> bool:
        """Whether all groups of the job have ended on purpose."""
        return name in self._jobs and self._jobs[name].has_finished

    def spares_of(self, name: str) -> Collection[Key]:
        """The spares of a job that stand by."""
        return [(name, each) for each in self._jobs[name].spares] if name in self._jobs else []

    def has_to_end(self, key: Key) -> bool:
        """Whether a spare whose session begins has to end, because its job has finished.

        It stood by then, or was away for a moment.
        """
        return key[1] in self._job(key).ending

    def check(self, now: float) -> None:
        """A free place is taken soon, if a spare can take it."""
        for name, job in self._jobs.items():
            is_free = bool(job.members & job.living) and len(job.living) < job.least
            if not (is_free and any(self._can_join(each, now) for each in job.spares.values())):
                job.due_since = None
            elif job.due_since is None:
                job.due_since = now
            else:
                what = f"a place of {name} is free since {job.due_since:.2f} s, and spares ask"
                must(now - job.due_since < SLACK_S, "G2", what)

    def _can_join(self, spare: _Spare, now: float) -> bool:
        return spare.asks and now - spare.seen_at < self._heartbeat_timeout_s
