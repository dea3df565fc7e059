"""Decides which copies of a job's states are held outside of its groups (rules B1 to B6).

`HeldCopies` is what a lighthouse knows of them; `find_start` decides whether a worker begins from
one, `choose_buddy`, `places_to_keep` and `HistoryWatch` what a holder copies, keeps and frees.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchft_svc.core.limits import MAX_ADDRESS_LENGTH, MAX_INT64, check_name, check_text
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.errors import RequestRefused

# How often a holder reports, how long it waits for an answer, and when one that is silent is
# forgotten.
REPORT_S = 1.0
REPORT_TIMEOUT_S = 2.0
SILENT_S = 5.0
# By then each holder has reported to a lighthouse that has just started, also one that has waited
# for another lighthouse of its list.
ALL_REPORTED_S = 2 * REPORT_S + REPORT_TIMEOUT_S
# The committed step that a lighthouse knows may lag behind that of the groups for a moment.
BEHIND_S = 10.0
# A worker's copy has one holder, or a few.
MAX_HOLDERS_PER_JOB = 4096
# Each may hold two copies of each worker of a large group.
MAX_COPIES_PER_HOLDER = 512


# What the copies of one state have in common: step, id of its quorum, and group world size.
Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCopy:
    """A copy of the state of worker ``group_rank`` of a group, served at ``address``.

    Two groups at one ``step`` that was committed in one quorum (``step_quorum_id``) have one state.
    """

    step: int = 0
    step_quorum_id: int = 0
    group_rank: int = 0
    group_world_size: int = 1
    address: str = ""

    @property
    def place(self) -> Place:
        """What the copies of one state have in common; a newer state has a higher one."""
        return self.step, self.step_quorum_id, self.group_world_size

    def check(self) -> None:
        """Raise `RequestRefused` if a field is out of bounds."""
        check_text("address", self.address, MAX_ADDRESS_LENGTH)
        numbers = (self.step, self.step_quorum_id, self.group_rank)
        if not (
            all(0 <= number <= MAX_INT64 for number in numbers)
            and self.group_rank < self.group_world_size
        ):
            raise RequestRefused(f"a copy of no worker's state: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersAndCopies:
    """What a lighthouse answers to a worker that starts, and to a holder of copies.

    ``members``: the manager addresses of the groups of the last quorum that live, by replica id, as
    far as they are known; ``committed_step``: of the job, 0 if none of these groups lives;
    ``knows_copies``: each holder has had the time to report to this lighthouse; ``is_finished``:
    the job has ended, and all groups of its last quorum ended on purpose.
    """

    members: Mapping[str, str] = field(default_factory=dict)
    committed_step: int = 0
    copies: tuple[HeldCopy, ...] = ()
    knows_copies: bool = False
    is_finished: bool = False


def newest_whole(copies: Iterable[HeldCopy], group_world_size: int | None = None) -> list[HeldCopy]:
    """Return the newest state that is there as a whole, one copy of each worker, by rank.

    Copies of different states do not fit together. Empty: no state is whole. ``group_world_size``:
    look at the states of groups of so many workers only.
    """
    by_place: dict[Place, dict[int, HeldCopy]] = {}
    for copy in copies:
        if group_world_size not in (None, copy.group_world_size):
            continue
        by_place.setdefault(copy.place, {}).setdefault(copy.group_rank, copy)
    whole = [place for place, found in by_place.items() if len(found) == place[2]]
    if not whole:
        return []
    found = by_place[max(whole)]
    return [found[rank] for rank in sorted(found)]


# -- what a worker that starts decides -------------------------------------------------------------


class Start(enum.Enum):
    """How a worker that starts goes on (rule B5)."""

    WITHOUT_COPY = "no copy is whole and newer than what it has"
    LOOK_AGAIN = "the lighthouse does not know all copies yet"
    ASK_MEMBERS = "a member of the last quorum may live: then it heals from that one"
    FETCH_COPY = "no group with a state lives"


def find_start(
    view: MembersAndCopies, group_rank: int, group_world_size: int, own_step: int
) -> tuple[Start, HeldCopy | None]:
    """Decide how worker ``group_rank``, which is at ``own_step``, goes on, and with which copy."""
    copy = whole_copy(view, group_rank, group_world_size, own_step)
    if copy is None:
        return Start.WITHOUT_COPY if view.knows_copies else Start.LOOK_AGAIN, None
    # Groups of a quorum at step 0 have no state, nor has this one, which may be among them.
    if view.committed_step == 0:
        return Start.FETCH_COPY, copy
    # Members without addresses have reported to a restarted lighthouse: they live.
    return (Start.ASK_MEMBERS, copy) if view.members else (Start.WITHOUT_COPY, None)


def whole_copy(
    view: MembersAndCopies, group_rank: int, group_world_size: int, own_step: int
) -> HeldCopy | None:
    """The copy that this worker would begin from (rule B4); None: none is whole and newer."""
    if view.is_finished:
        return None
    whole = newest_whole(view.copies, group_world_size)
    return whole[group_rank] if whole and whole[0].step > own_step else None


# -- what a holder decides -------------------------------------------------------------------------


def choose_buddy(members: Mapping[str, str], beside: str) -> str:
    """Return the member that the holder beside a group copies; its own group, if it is alone.

    It is the next one in the order of names, and the first one after the last.
    """
    names = sorted(members, key=lambda each: (stable_name(each), each))
    others = [each for each in names if stable_name(each) != beside]
    after = [each for each in others if stable_name(each) > beside]
    return (after or others or names)[0]


def places_to_keep(held: Sequence[Place], whole: Place | None, *, room: bool) -> set[Place]:
    """Return which of the copies ``held`` of one worker, the newest last, a holder keeps (rule B4).

    ``whole``: the newest state that is there as a whole; what is older is freed, and for ``room``,
    before another copy arrives, also what is newer.
    """
    kept = {*held[-1:]}
    if whole in held and whole is not None:
        kept = {whole} if room else {*kept, whole}
    return kept


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


# -- what a lighthouse knows -----------------------------------------------------------------------


class HeldCopies:
    """The copies of all jobs, as their holders have reported them last.

    ``began_at``: the time at which holders could report first.
    """

    def __init__(self, max_jobs: int, began_at: float) -> None:
        self._max_jobs = max_jobs
        self._settled_at = began_at + ALL_REPORTED_S
        self._jobs: OrderedDict[str, dict[str, tuple[float, tuple[HeldCopy, ...]]]] = OrderedDict()

    def record_report(
        self, job: str, holder: str, copies: tuple[HeldCopy, ...], now: float
    ) -> None:
        """Record all that ``holder`` holds of ``job``.

        Raises:
            RequestRefused: the report, or the number of holders, is out of bounds.
        """
        check_name("holder", holder)
        if len(copies) > MAX_COPIES_PER_HOLDER:
            raise RequestRefused(f"{len(copies)} copies, at most {MAX_COPIES_PER_HOLDER} are held")
        holders = self._jobs.setdefault(job, {})
        self._forget_silent(holders, now)
        if holder not in holders and len(holders) >= MAX_HOLDERS_PER_JOB:
            raise RequestRefused(f"job {job!r} has {len(holders)} holders of copies already")
        holders[holder] = now, copies
        self._jobs.move_to_end(job)
        while len(self._jobs) > self._max_jobs:
            self._jobs.popitem(last=False)

    def knows_all(self, now: float) -> bool:
        """Whether each holder has had the time to report to this lighthouse."""
        return now >= self._settled_at

    def held(self, job: str, now: float) -> list[HeldCopy]:
        """Return all copies of ``job`` whose holders live."""
        holders = self._jobs.get(job, {})
        self._forget_silent(holders, now)
        return [copy for _, copies in holders.values() for copy in copies]

    def num_holders(self, job: str, now: float) -> int:
        """Return how many processes hold copies of ``job``, or would like to."""
        holders = self._jobs.get(job, {})
        self._forget_silent(holders, now)
        return len(holders)

    def _forget_silent(
        self, holders: dict[str, tuple[float, tuple[HeldCopy, ...]]], now: float
    ) -> None:
        for holder in [name for name, (at, _) in holders.items() if now - at > SILENT_S]:
            del holders[holder]
