"""Finds the groups of a job that are slow, by the own work of each in a step (rules N9 and N10).

Training is synchronous, so a step takes every group as long as the slowest one. What differs is how
much of it a group works, and how much it waits for others: see `StepTimes`.

Groups may be dealt unequal numbers of samples. A group that was dealt more works longer, and one
whose time hardly grows with its samples works longer for each of them; neither is slow. So a group
counts as slower than another by the smaller of two ratios: that of their times, and that of their
times at an even share of the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from operator import truediv
from typing import NamedTuple

from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.tally import STEP_PHASES, StepTimes

# Beside the phases, all of them together.
STEP = "step"
_PHASES = (STEP, *STEP_PHASES)
# A mean of fewer steps says little; nor does a group become slow, or usual again, in fewer.
MIN_STEPS = 10
# A look costs a comparison for each group.
LOOK_EACH_S = 1.0
# What costs the others less of a step is not worth a word; and shorter times are noise.
LEAST_LOSS, RESOLUTION_S = 0.05, 0.001


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a group's own work takes in one phase of a step.

    ``phase``: ``step`` for all of them, or ``training``, ``updating``, ``between``. ``to_best``:
    relative to the best group of the quorum in force; ``to_own_best``: relative to the best that
    this group has reached; both at most as at an even share of the samples.
    """

    phase: str
    seconds: float
    to_best: float = 1.0
    to_own_best: float = 1.0


@dataclass(frozen=True, slots=True)
class PaceChange:
    """A group has become slow, or is usual again, as ``cause`` says."""

    replica_id: str
    is_slow: bool
    cause: str
    for_s: float


@dataclass(slots=True)
class _Group:
    """The last times of a group; ``row``: see `_row`, and ``best``: the least of each so far.

    ``turned``: since when, and since how many steps, it is on the other side of the limit than
    ``is_slow`` says (None: it is not).
    """

    times: StepTimes
    row: tuple[float, ...]
    best: tuple[float, ...]
    is_slow: bool = False
    turned: tuple[float, int] | None = None

    @property
    def even_s(self) -> float:
        """Return its own work in a step with an even share of the samples."""
        return self.row[len(_PHASES)]


class _Best(NamedTuple):
    """Ids of the members whose own work is the shortest: as it is, and at an even share of the
    samples (None: nothing is known of any)."""

    as_it_is: str | None
    when_even: str | None


class PaceWatch:
    """The step times of one job's groups.

    A group is slow if its own work has taken ``factor`` times that of the best group, for
    ``after_s`` and at least `MIN_STEPS` steps.
    """

    def __init__(self, factor: float, after_s: float) -> None:
        self._factor, self._after_s = factor, after_s
        self._groups: dict[str, _Group] = {}
        self._look_at = 0.0

    # -- inputs ----------------------------------------------------------------------------------

    def record_times(self, replica_id: str, times: StepTimes) -> None:
        """Record what a group reports."""
        if times.num_steps < MIN_STEPS:
            return
        row = _row(times)
        group = self._groups.get(replica_id)
        if group is None:
            self._groups[replica_id] = _Group(times, row, row)
        else:
            group.times, group.row = times, row
            group.best = tuple(map(min, row, group.best))

    def forget_group(self, replica_id: str) -> None:
        """Forget a group that is gone."""
        self._groups.pop(replica_id, None)

    def is_due(self, now: float) -> bool:
        """Whether `LOOK_EACH_S` have passed since the last call of `find_changes`."""
        return now >= self._look_at

    def find_changes(self, members: Set[str], now: float) -> list[PaceChange]:
        """Return which of the ``members`` have become slow, or are usual again, since the last
        call; compares all groups."""
        self._look_at = now + LOOK_EACH_S
        found = []
        bests = self._best_of(members)
        for replica_id in self._may_change(members, bests):
            group = self._groups[replica_id]
            best_id, best = self._best_for(group, bests)
            if self._is_above(group.times, best) is group.is_slow:
                group.turned = None
                continue
            if group.turned is None:
                group.turned = now, group.times.num_steps
            since, num_steps = group.turned
            if now - since >= self._after_s and group.times.num_steps - num_steps >= MIN_STEPS:
                group.is_slow, group.turned = not group.is_slow, None
                cause = _describe(group.times, best_id, best)
                found.append(PaceChange(replica_id, group.is_slow, cause, now - since))
        return found

    # -- questions -------------------------------------------------------------------------------

    def is_slow(self, replica_id: str) -> bool:
        """Whether the group is slow."""
        group = self._groups.get(replica_id)
        return group is not None and group.is_slow

    def slowest(self, members: Set[str]) -> str | None:
        """The slowest of the slow ``members``, if it is slow beside more than half of the others,
        too: where most are slow, the best one is the exception (None: there is none)."""
        known = {each: self._groups[each].times for each in members & self._groups.keys()}
        slow = [each for each in known if self._groups[each].is_slow]
        slowest = max(slow, key=lambda each: (known[each].own_s, each), default=None)
        if slowest is None:
            return None
        limit_s, load = known[slowest].own_s / self._factor, known[slowest].load
        num_better = sum(
            each.own_s <= limit_s and each.at_load(load).own_s <= limit_s for each in known.values()
        )
        return slowest if num_better > (len(members) - 1) / 2 else None

    def why(self, replica_id: str, members: Set[str]) -> str:
        """How a group compares with the best of ``members``, for people."""
        group = self._groups[replica_id]
        return _describe(group.times, *self._best_for(group, self._best_of(members)))

    def slowest_rank(self, replica_id: str) -> int:
        """The group rank of the worker that a group's paces are of."""
        group = self._groups.get(replica_id)
        return group.times.group_rank if group else 0

    def paces(
        self, members: Set[str], of: Iterable[str] | None = None
    ) -> dict[str, tuple[Pace, ...]]:
        """How long the own work of each known group takes, compared with the best of ``members``;
        of these groups only (None: of all)."""
        return self.compare(self.best_row(members), self._groups if of is None else of)

    def best_row(self, members: Set[str]) -> tuple[float, ...]:
        """The best times of ``members``, for `compare`; empty: nothing is known of them."""
        compared = [self._groups[each].row for each in members & self._groups.keys()]
        return tuple(map(min, zip(*compared, strict=True)))

    def compare(self, best: tuple[float, ...], of: Iterable[str]) -> dict[str, tuple[Pace, ...]]:
        """How long the own work of each of these groups takes, if it is known, compared with the
        ``best``, or else with its own."""
        known = {each: self._groups[each] for each in of if each in self._groups}
        return {each: _compare(group, best or group.row) for each, group in known.items()}

    def _best_of(self, members: Iterable[str]) -> _Best:
        known = [(each, self._groups[each]) for each in members if each in self._groups]
        if not known:
            return _Best(None, None)
        _, as_it_is = min((group.row[0], each) for each, group in known)
        _, when_even = min((group.even_s, each) for each, group in known)
        return _Best(as_it_is, when_even)

    def _may_change(self, members: Set[str], bests: _Best) -> list[str]:
        """The few ``members`` that may be on the other side of the limit now, or were before: each
        is compared with a group whose own work takes at least as long as that of the best one."""
        if bests.as_it_is is None:
            return []
        limit_s = self._factor * self._groups[bests.as_it_is].times.own_s
        known = ((each, self._groups[each]) for each in members & self._groups.keys())
        return sorted(
            replica_id
            for replica_id, group in known
            if group.times.own_s >= limit_s or group.is_slow or group.turned is not None
        )

    def _best_for(self, group: _Group, bests: _Best) -> tuple[str | None, StepTimes]:
        """The one of the best groups that ``group`` is compared with, and what a step would take
        that with the samples of ``group``; itself if nothing is known of any."""
        if bests.as_it_is is None or bests.when_even is None:
            return None, group.times
        best = self._groups[bests.as_it_is].times
        at_load = self._groups[bests.when_even].times.at_load(group.times.load)
        if at_load.own_s > best.own_s:
            return bests.when_even, at_load
        return bests.as_it_is, best

    def _is_above(self, times: StepTimes, best: StepTimes) -> bool:
        """Whether a group is slower than the limit, and that costs the others something."""
        excess_s = times.own_s - best.own_s
        is_worth_it = excess_s >= max(RESOLUTION_S, LEAST_LOSS * times.step_s)
        return is_worth_it and times.own_s >= self._factor * best.own_s


def _row(times: StepTimes) -> tuple[float, ...]:
    """The own work of a step in all `_PHASES`, as it is; and then at an even share of the
    samples. None is below the resolution."""
    row = _seconds(times) + _seconds(times.at_load(1.0))
    return tuple([max(each, RESOLUTION_S) for each in row])


def _seconds(times: StepTimes) -> tuple[float, ...]:
    return times.own_s, times.training_s, times.updating_s, times.between_s


def _compare(group: _Group, best: tuple[float, ...]) -> tuple[Pace, ...]:
    to_best = list(map(truediv, group.row, best))
    to_own_best = list(map(truediv, group.row, group.best))
    num = len(_PHASES)
    # The smaller ratio of each phase: that of the times, and that at an even share.
    return tuple(
        map(
            Pace,
            _PHASES,
            _seconds(group.times),
            map(min, to_best, to_best[num:]),
            map(min, to_own_best, to_own_best[num:]),
        )
    )


def _ratio(seconds: float, best_s: float) -> float:
    return max(seconds, RESOLUTION_S) / max(best_s, RESOLUTION_S)


def _describe(times: StepTimes, best_id: str | None, best: StepTimes) -> str:
    """The sentence on a group, compared with the best one."""
    phase = max(STEP_PHASES, key=lambda each: times.of_phase(each) - best.of_phase(each))
    named = f"group {stable_name(best_id)}" if best_id else "the best group"
    ratio = _ratio(times.own_s, best.own_s)
    share = " for as many samples" if best.load == times.load not in (0.0, 1.0) else ""
    return (
        f"its own work takes {times.own_s:.3f} s a step, {ratio:.1f} times that of {named} "
        f"({best.own_s:.3f} s{share}); the most of it in phase {phase}, by group rank "
        f"{times.group_rank}: {times.of_phase(phase):.3f} s, there {best.of_phase(phase):.3f} s"
    )
