"""Checks the rules of terms: what members of a quorum agree on, and who may go on (E1 to E6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tools.sim.invariants import MAX_STEPS_WITH_NEWCOMER, SLACK_S, must
from torchft_svc.core.quorum.term import LOOK_S

# A worker that asks ends the waits of the others in its quorum; the news needs a few messages.
MAX_WAIT_FOR_ASKER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """Group ``me`` of ``job`` has committed ``step``, which it began at ``began_at``, as its worker
    ``group_rank`` reports; ``goes_on``: it had asked nobody."""

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
class _Doing:
    """The step that a worker has begun, and since when it asks (None: it does not, or not any
    more: ``has_asked``)."""

    step: int = -1
    asks_since: float | None = None
    has_asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TermStep:
    """A step of worker ``group_rank`` of ``group``, which asked nobody; its quorum was asked for at
    ``asked_at``, and has ``members``; it waits for the sum since ``waits_since``, if it does."""

    group: str
    group_rank: int
    members: Collection[str]
    step: int
    waits_since: float
    asked_at: float

    def groups(self) -> set[str]:
        return {each.partition(":")[0] for each in self.members}


@dataclass(slots=True)
class Companions:
    """What the members of a term may cost one another: waits, and steps that are given up (E4 to
    E6).

    A newcomer that connects within a moment after a lighthouse began, at its first attempt, may ask
    it first, and begin another history (rule F8), which the others follow. So may one in a list,
    while the lighthouse of the others is silent, until ``split_until`` (rule F4).
    """

    join_timeout_s: float
    lighthouse_began_at: Callable[[], float] = float
    split_until: Callable[[], float] = float
    _splits_at: float = -math.inf  # a newcomer may be the first to ask a lighthouse
    _doing: dict[tuple[str, int], _Doing] = field(default_factory=dict)
    _troubled_until: dict[str, float] = field(default_factory=dict)
    _unwell_until: dict[str, float] = field(default_factory=dict)  # also if it is reachable
    _costly_until: dict[str, float] = field(default_factory=dict)  # and the others lose a step
    _misses: dict[str, tuple[float, int]] = field(default_factory=dict)
    _lighthouse_until: float = -math.inf  # it is away, or something else happens to all

    def trouble(
        self, group: str, until: float, *, is_reachable: bool = False, is_costly: bool = True
    ) -> None:
        """Something happens to ``group``; ``is_reachable``: to its program alone, which receives
        all that its lighthouse sends; not ``is_costly``: the others lose no step by it."""
        _extend(self._unwell_until, group, until)
        if is_costly:
            _extend(self._costly_until, group, until)
        if not is_reachable:
            _extend(self._troubled_until, group, until)

    def tries_first(self, now: float) -> None:
        """A manager whose workers cannot report a quorum tries a lighthouse for the first time."""
        if now - self.lighthouse_began_at() < SLACK_S:
            self._splits_at = now

    def may_split(self, since: float) -> bool:
        """Whether a job may be in two histories because of what happened by ``since``."""
        return 0.0 <= since - self._splits_at < SLACK_S or since < self.split_until()

    def misses(self, group: str, step: int, now: float) -> None:
        """``group`` takes part in no step from ``step`` on until it has healed."""
        self.trouble(group, now, is_reachable=True, is_costly=False)
        self._misses[group] = now, step

    def trouble_line(self, group: str, until: float) -> None:
        """The manager of ``group`` is gone until then: that costs nobody a step (E7), but news may
        be late."""
        _extend(self._troubled_until, group, until)

    def trouble_lighthouse(self, until: float) -> None:
        self._lighthouse_until = max(self._lighthouse_until, until)

    def began(self, group: str, group_rank: int, step: int, asks_since: float | None) -> None:
        self._doing[group, group_rank] = _Doing(step, asks_since, asks_since is not None)

    def answered(self, group: str, group_rank: int) -> None:
        self._doing[group, group_rank].asks_since = None

    def discarded(self, it: TermStep, now: float) -> None:
        """A step that asked nobody is given up only if something happens to a member, or one of its
        processes dies; not because a group joins or drains, or a lighthouse is away."""
        since = it.asked_at - SLACK_S
        has_reason = any(self._has_reason(each, it.step, since) for each in it.groups())
        has_reason |= self.may_split(now) or self._is_given_up(it, since)
        must(has_reason, "I5", f"{it.group} discards step {it.step} of a term, for no reason")

    def _is_given_up(self, it: TermStep, since: float) -> bool:
        """Whether the group's manager was away when another member asked for the next quorum (E7).

        The others have committed the step then, and the group heals.
        """
        is_away = self._troubled_until.get(it.group, -math.inf) >= since
        groups = {*it.groups()} - {it.group}
        others = [doing for (each, _), doing in self._doing.items() if each in groups]
        return is_away and any(each.has_asked and each.step >= it.step for each in others)

    def _has_reason(self, group: str, step: int, since: float) -> bool:
        at, first = self._misses.get(group, (-math.inf, 0))
        is_missed = at >= since and step >= first
        return is_missed or self._costly_until.get(group, -math.inf) >= since

    def check_wait(self, it: TermStep, now: float) -> None:
        """The worker waits for the sum of this step."""
        for group in sorted(it.groups() - {it.group}):
            other = self._doing.get((group, it.group_rank))
            if other is None:
                continue
            since = max(it.waits_since, self.calm_since([group, it.group]))
            if other.asks_since is not None and self.is_well_since(group, since):
                waited_s = now - max(since, other.asks_since)
                longest_s, what = MAX_WAIT_FOR_ASKER_S, "which asks"
            else:
                waited_s = now - since if other.step < it.step else 0.0
                longest_s, what = self.longest_wait_s, f"which is at {other.step}"
            text = f"{it.group} waits in step {it.step} of a term for {group}, {what}"
            must(waited_s <= longest_s, "I5", text)

    @property
    def longest_wait_s(self) -> float:
        """The longest wait for a member that does not begin the step."""
        return self.join_timeout_s + LOOK_S + SLACK_S

    def calm_since(self, groups: Collection[str]) -> float:
        """Time since which these groups and the lighthouses reach one another, and may connect."""
        untils = [self._troubled_until.get(each, -math.inf) for each in groups]
        return max(self._lighthouse_until, *untils) + SLACK_S

    def is_well_since(self, group: str, since: float) -> bool:
        return self._unwell_until.get(group, -math.inf) < since

    def settled_since(self, groups: Collection[str]) -> float:
        """The same, and nothing else happens to these groups."""
        untils = [self._unwell_until.get(each, -math.inf) + SLACK_S for each in groups]
        return max(self.calm_since(groups), *untils)


# A group that has committed within this time still trains; a step takes a second at most.
TRAINS_S = 3.0


@dataclass(slots=True)
class Histories:
    """A job has one history (I4): no group begins another one beside groups that train, also not at
    a lighthouse that was restarted and knows none of them yet."""

    companions: Companions
    is_checked: bool  # all groups have a session with one lighthouse, and ids grow
    went_back: Mapping[str, int]  # by job: the last quorum that gave up steps, and reported it
    _last: dict[str, dict[str, tuple[int, int, float]]] = field(default_factory=dict)

    def committed(self, it: CommittedStep, now: float) -> None:
        if not self.is_checked:
            return
        groups = self._last.setdefault(it.job, {})
        me = it.me.partition(":")[0]
        groups[me] = it.quorum_id, it.step, now
        for group, (quorum_id, step, at) in groups.items():
            trains = now - at < TRAINS_S and self.companions.is_well_since(group, at - SLACK_S)
            what = (
                f"{me} commits step {it.step} in another history than {group}, which is at {step}"
            )
            is_behind = it.quorum_id > quorum_id and it.step + 1 < step
            is_first = it.began_at - self.companions.lighthouse_began_at() < SLACK_S
            if is_first and it.quorum_id > quorum_id:  # the other gives its step up, and follows
                self.companions.trouble(group, now, is_reachable=True)
            is_reported = quorum_id < self.went_back.get(it.job, 0)
            must(not (trains and is_behind) or is_first or is_reported, "I4", what)

    def ended(self, job: str, group: str) -> None:
        """Forget a group whose workers are gone."""
        self._last.get(job, {}).pop(group, None)


@dataclass(slots=True)
class NewcomerPatience:
    """How many steps a worker has begun without a question since it knows that groups wait."""

    _waiting: set[str] = field(default_factory=set)
    _num_steps: int = 0

    def announced(self, replica_id: str) -> None:
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


def _extend(until: dict[str, float], group: str, at: float) -> None:
    until[group] = max(until.get(group, -math.inf), at)
