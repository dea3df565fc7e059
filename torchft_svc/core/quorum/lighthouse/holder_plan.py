"""Decides what a holder copies, keeps and frees (rules B1, B4 and B6)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchft_svc.core.quorum.lighthouse.common_steps import CopiedSteps, StepRate
from torchft_svc.core.quorum.lighthouse.copies import (
    REPORT_S,
    MembersAndCopies,
    StateKey,
    whole_states,
)
from torchft_svc.core.quorum.names import stable_name

# How long a worker may be silent before it offers a copy, and while it sends one.
SILENCE_S = 60.0
# How often a holder looks whether a group trains, or a state is whole.
LOOK_S = REPORT_S / 4
# The committed step that a lighthouse knows may lag behind that of the groups for a moment.
BEHIND_S = 10.0


@dataclass(frozen=True, slots=True)
class NextCopy:
    """The copy to wait for: the first one above a step that a worker of ``buddy`` offers."""

    buddy: str
    manager_address: str
    above: int


class HolderPlan:
    """Decides for one holder, which frees after each call all copies that are not in `kept`.

    ``beside``: the group that it stands beside; ``ranks``: the workers whose states it copies.
    """

    def __init__(self, beside: str, ranks: Collection[int], group_world_size: int) -> None:
        self._beside = beside
        self._group_world_size = group_world_size
        self._views: dict[str, MembersAndCopies] = {}  # the last answer of each lighthouse
        self._followed = ""
        self._view = MembersAndCopies()
        self._history = HistoryWatch()
        self._rate = StepRate()
        self._steps = {rank: CopiedSteps() for rank in ranks}
        self._kept: dict[int, list[StateKey]] = {rank: [] for rank in ranks}  # the newest last
        self._patient_until: dict[int, float] = {}

    def kept(self, group_rank: int) -> Sequence[StateKey]:
        """Return the states of which the copies of a worker are kept, the newest last."""
        return self._kept[group_rank]

    def record_view(self, lighthouse: str, view: MembersAndCopies, now: float) -> int | None:
        """Record the answer of a lighthouse, and follow the one at which the job trains.

        Returns the earlier step that the job goes on from, if copies are freed because of that.
        """
        self._views[lighthouse] = view
        self._follow_views()
        self._rate.record_step(self._view.committed_step, now)
        newest = max((keys[-1].step for keys in self._kept.values() if keys), default=0)
        is_over = self._history.is_over(self._view, newest, now)
        for rank in self._kept:
            if is_over:
                self._kept[rank] = []
            else:
                self._keep(rank, is_next_coming=False)
        is_left_behind = is_over and newest > 0 and not self._view.is_finished
        return self._view.committed_step if is_left_behind else None

    def record_silence(self, lighthouse: str) -> None:
        """Record that a lighthouse does not answer any more; its last answer does not count."""
        self._views.pop(lighthouse, None)
        self._follow_views()

    def begin_copy(self, group_rank: int) -> NextCopy | None:
        """Make room for the next copy of a worker; None: no group is known that trains."""
        if not self._view.members:
            return None
        buddy = choose_buddy(self._view.members, self._beside)
        self._keep(group_rank, is_next_coming=True)
        kept = self._kept[group_rank]
        above = kept[-1].step if kept else 0
        if self._group_world_size > 1:
            step, rate = self._view.committed_step, self._rate.per_second()
            above = self._steps[group_rank].step_to_wait_above(above, step, rate)
        return NextCopy(buddy, self._view.members[buddy], above)

    def record_copy(
        self, group_rank: int, key: StateKey, above: int, fetched_in_s: float, now: float
    ) -> None:
        """Keep the copy that has arrived; without other workers it is whole at once."""
        steps = self._steps[group_rank]
        steps.record_copy(key.step, above, fetched_in_s)
        self._patient_until[group_rank] = now + steps.patience_s()
        if self._group_world_size == 1:
            self._kept[group_rank] = []
        self._kept[group_rank].append(key)

    def awaits_other_workers(self, group_rank: int, now: float) -> bool:
        """Whether the newest copy is kept until it is part of a whole state: not for long.

        Before, the next one would take the place of it.
        """
        kept = self._kept[group_rank]
        is_part = self._group_world_size > 1 and kept and kept[-1] not in self._whole()
        return bool(is_part) and now < self._patient_until[group_rank]

    def _follow_views(self) -> None:
        """Follow the lighthouse that knows most members, and still when all of them have ended.

        In a list without election, the others do not learn that the job has finished there.
        """
        if self._views:
            self._followed = max(
                self._views,
                key=lambda each: (
                    len(self._views[each].members),
                    each == self._followed,
                    self._views[each].knows_copies,
                ),
            )
            self._view = self._views[self._followed]

    def _keep(self, group_rank: int, *, is_next_coming: bool) -> None:
        held, whole = self._kept[group_rank], self._whole()
        newest = next((key for key in reversed(held) if key in whole), None)
        self._kept[group_rank] = states_to_keep(held, newest, is_next_coming=is_next_coming)

    def _whole(self) -> Collection[StateKey]:
        """The states of which there is a copy of each worker."""
        return whole_states(self._view.copies, self._group_world_size)


def choose_buddy(members: Mapping[str, str], beside: str) -> str:
    """Return the member that the holder beside a group copies; its own group, if it is alone.

    It is the next one in the order of names, and the first one after the last.
    """
    names = sorted(members, key=lambda each: (stable_name(each), each))
    others = [each for each in names if stable_name(each) != beside]
    after = [each for each in others if stable_name(each) > beside]
    return (after or others or names)[0]


def states_to_keep(
    held: Sequence[StateKey], whole: StateKey | None, *, is_next_coming: bool
) -> list[StateKey]:
    """Return which of the copies ``held`` of one worker, the newest last, a holder keeps (rule B4).

    ``whole``: the newest of them whose state is there as a whole; what is older is freed, and once
    the next copy ``is_next_coming`` also what is newer, so that there are never more than two.
    """
    newest = held[-1:]
    if whole is None or whole in newest:
        return list(newest)
    return [whole] if is_next_coming else [whole, *newest]


@dataclass(slots=True)
class HistoryWatch:
    """Notices that the copies of a holder are of another history than the job's (rule B6)."""

    _behind_since: float | None = None

    def is_over(self, view: MembersAndCopies, newest_step: int, now: float) -> bool:
        """Whether the run has ended, or living groups are at a step before the newest copy for
        longer than a lighthouse may lag behind."""
        if view.is_finished:
            return True
        if not view.members or newest_step <= view.committed_step + 1:
            self._behind_since = None
            return False
        if self._behind_since is None:
            self._behind_since = now
        return now - self._behind_since > BEHIND_S
