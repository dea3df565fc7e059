"""Looks at a lighthouse now and then: whom it waits for (I5), and whom it remembers (I7).

Like the other checks it keeps books of its own, from what the lighthouse hears and says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torchft_svc.core.lighthouse import Lighthouse
from torchft_svc.core.step import Phase
from torchft_svc.core.types import Quorum, QuorumConfig
from torchft_svc.sim.invariants import SLACK_S, must, parts_of

LOOK_S = 0.25
_AWAITED = re.compile(r"waiting for (.*?)(?: and \d+ more)?: alive, but has not asked")
_DUE = "a quorum is being published"
_REPLICA_ID = re.compile(r"g\d+:\S+")

Key = tuple[str, str]  # job and replica id


@dataclass(slots=True)
class _Job:
    """``late``: waited for in vain, and not to be waited for again until it asks.

    ``evicted``: left out of ``previous`` since it was published, and has not asked. ``healing``
    tell that they do.
    """

    previous: frozenset[str] = frozenset()
    asking: dict[str, float] = field(default_factory=dict)
    gave_up: dict[str, tuple[float, float]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    evicted: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    healing: set[str] = field(default_factory=set)
    due_since: float | None = None


class Lookout:
    """Over one life of a lighthouse."""

    def __init__(self, config: QuorumConfig) -> None:
        self._config = config
        self._longest_s = config.heal_timeout_s or config.join_timeout_s
        self._jobs: dict[str, _Job] = {}

    def heard(self, key: Key) -> None:
        job = self._jobs.setdefault(key[0], _Job())
        job.dead.discard(key[1])

    def asked(self, key: Key, now: float) -> None:
        job = self._jobs.setdefault(key[0], _Job())
        job.dead.discard(key[1])
        since, gave_up_at = job.gave_up.pop(key[1], (now, now))
        if now - gave_up_at > self._config.heartbeat_timeout_s:
            since = now
        job.asking.setdefault(key[1], since)
        job.late.discard(key[1])
        job.evicted.discard(key[1])
        job.healing.discard(key[1])

    def does(self, key: Key, phase: Phase) -> None:
        """What a group tells."""
        healing = self._jobs.setdefault(key[0], _Job()).healing
        if phase is Phase.HEALING:
            healing.add(key[1])
        else:
            healing.discard(key[1])

    def withdrew(self, key: Key, now: float) -> None:
        job = self._jobs.setdefault(key[0], _Job())
        since = job.asking.pop(key[1], None)
        if since is not None:
            job.gave_up[key[1]] = (since, now)

    def gone(self, key: Key) -> None:
        job = self._jobs.setdefault(key[0], _Job())
        job.asking.pop(key[1], None)
        job.gave_up.pop(key[1], None)
        job.late.discard(key[1])
        job.evicted.discard(key[1])
        job.healing.discard(key[1])
        job.dead.add(key[1])

    def evicted(self, key: Key) -> None:
        """It hangs, and nobody waits for it from here on."""
        job = self._jobs.setdefault(key[0], _Job())
        job.evicted.add(key[1])
        if key[1] in job.previous:  # or that was published by an earlier lighthouse
            others = job.previous - job.evicted - job.late - job.dead
            must(bool(others), "I5", f"{key[1]} is left out, though nobody is left to go on")

    def published(self, name: str, quorum: Quorum, now: float) -> None:
        job = self._jobs.setdefault(name, _Job())
        self._check_history(name, job, quorum)
        self._check_heals(job, quorum, now)
        job.previous = frozenset(member.replica_id for member in quorum.participants)
        job.due_since = None
        for replica_id in job.previous:
            job.asking.pop(replica_id, None)

    def look(self, core: Lighthouse, alive: Collection[Key], now: float) -> None:
        """At what each job waits for: a straggler costs the others its time once, the dead none."""
        for name, job in self._jobs.items():
            why = core.why(name, now)
            self._check_due(name, job, why, now)
            found = _AWAITED.search(why)
            awaited = set(found[1].split(", ")) if found else set()
            if job.previous - job.evicted - job.late - job.dead:
                held = awaited & job.evicted
                must(not held, "I5", f"{name} waits for {held}, which hang and were left out")
            for each in awaited:
                must((name, each) in alive, "I5", f"{name} waits for {each}, which is dead")
                must(each not in job.late, "I5", f"{name} waits for the straggler {each} again")
            back = [since for each, since in job.asking.items() if each in job.previous]
            if back and now - min(back) > self._longest_s + SLACK_S:
                must(not awaited, "I5", f"{name} waits for {awaited} since {min(back):.2f} s")
                job.late |= job.previous - job.asking.keys() - job.dead

    def _check_history(self, name: str, job: _Job, quorum: Quorum) -> None:
        """Newcomers do not go on without a member of the last quorum while some of it hang."""
        members = {member.replica_id for member in quorum.participants}
        hung = job.evicted - job.dead
        must(
            not (hung & job.previous) or bool(members & job.previous),
            "I4",
            f"{name} begins anew with {sorted(members)[:4]} while {sorted(hung)[:4]} hang",
        )
        late, job.evicted = job.evicted, set()
        job.late |= late

    def _check_heals(self, job: _Job, quorum: Quorum, now: float) -> None:
        """Who heals is left out only when its time is up."""
        members = {member.replica_id for member in quorum.participants}
        left = (job.previous & job.healing) - members - job.dead - job.late
        back = [since for each, since in job.asking.items() if each in job.previous]
        if left and back:
            waited_s = now - min(back)
            is_over = waited_s + SLACK_S >= self._longest_s
            must(is_over, "I5", f"{sorted(left)[:4]} heal, and are left out after {waited_s:.2f} s")

    def _check_due(self, name: str, job: _Job, why: str, now: float) -> None:
        if _DUE not in why:
            job.due_since = None
        elif job.due_since is None:
            job.due_since = now
        else:
            is_new = now - job.due_since < SLACK_S
            must(is_new, "I5", f"a quorum of {name} is due since {job.due_since:.2f} s")

    def check_memory(self, core: Lighthouse, alive: Collection[Key]) -> None:
        """Nothing in the core names a group that is dead, but the last quorum."""
        known = {replica_id for _, replica_id in alive}
        for job in self._jobs.values():
            known |= job.previous
        for name in _names_of(core):
            must(name in known, "I7", f"the lighthouse still remembers {name}")


def _names_of(core: Lighthouse) -> Iterator[str]:
    for _, part in parts_of(core, "lighthouse"):
        for each in part:
            if isinstance(each, str) and _REPLICA_ID.fullmatch(each):
                yield each
