"""Checks the rules of terms: what members of a quorum agree on, and who may go on (E1 to E6)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torchft_svc.sim.invariants import must

# One may have been under way when the news came; in the next one all learn of it.
MAX_STEPS_WITH_NEWCOMER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """Group ``me`` of ``job`` has committed ``step``, which it began at ``began_at``, as its worker
    ``group_rank`` tells; ``goes_on``: it had asked nobody."""

    job: str
    me: str
    group_rank: int
    quorum_id: int
    members: Collection[str]
    step: int
    began_at: float
    goes_on: bool


@dataclass(slots=True)
class _Newest:
    quorum_id: int = 0
    members: frozenset[str] = frozenset()
    since: float = 0.0  # its first commit


@dataclass(slots=True)
class Terms:
    """``are_ids_ordered``: a later quorum of a job has a higher id, wherever it was published."""

    are_ids_ordered: bool
    num_went_on: int = 0
    _how: dict[tuple[object, ...], tuple[str, bool]] = field(default_factory=dict)
    _newest: dict[str, _Newest] = field(default_factory=dict)

    MAX_REMEMBERED = 4096

    def committed(self, it: CommittedStep, now: float) -> None:
        self.num_went_on += it.goes_on
        key = (it.job, it.group_rank, it.quorum_id, tuple(it.members), it.step)
        other, theirs = self._how.setdefault(key, (it.me, it.goes_on))
        how = f"step {it.step} of quorum {it.quorum_id}: {other} {theirs}, {it.me} {it.goes_on}"
        must(theirs is it.goes_on, "I2", f"members differ on whether they had to ask, {how}")
        if len(self._how) > self.MAX_REMEMBERED:
            del self._how[next(iter(self._how))]
        self._check_fence(it, now)

    def _check_fence(self, it: CommittedStep, now: float) -> None:
        """A group that the others have left behind commits no step that it begins after that."""
        if not self.are_ids_ordered:
            return
        newest = self._newest.setdefault(it.job, _Newest())
        members = frozenset(it.members)
        if it.quorum_id > newest.quorum_id:
            self._newest[it.job] = _Newest(it.quorum_id, members, now)
            return
        is_old = it.quorum_id < newest.quorum_id and it.me not in newest.members
        is_known = len(members) == 1 or bool(members & newest.members)
        runs_beside = is_old and is_known and newest.since < it.began_at
        what = f"{it.me} trains on in quorum {it.quorum_id}, the others in {newest.quorum_id}"
        must(not runs_beside, "I4", what)


@dataclass(slots=True)
class NewcomerPatience:
    """How many steps a worker has begun without a question since it knows that groups wait."""

    _waiting: set[str] = field(default_factory=set)
    _num_steps: int = 0

    def heard(self, replica_id: str) -> None:
        self._waiting.add(replica_id)

    def met(self, members: Collection[str]) -> None:
        """The worker has a quorum of these, after a question."""
        self._waiting.difference_update(members)
        self._num_steps = 0

    def began(self, who: str, *, goes_on: bool) -> None:
        if not goes_on:  # groups that still wait then are announced again
            self._waiting.clear()
        elif self._waiting:
            self._num_steps += 1
            is_soon = self._num_steps <= MAX_STEPS_WITH_NEWCOMER
            must(is_soon, "I5", f"{who} knows of a newcomer, and has begun {self._num_steps} steps")
