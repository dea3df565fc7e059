"""Which copies of a job's states are held in memory outside of its groups (rules B1 to B6)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchft_svc.core.limits import MAX_ADDRESS_LENGTH, MAX_INT64, check_name, check_text
from torchft_svc.errors import RequestRefused

# How often a holder reports, and when one that is silent is forgotten.
REPORT_S = 1.0
SILENT_S = 5.0
# A worker's copy has one holder, or a few.
MAX_HOLDERS_PER_JOB = 4096
# Each may hold two copies of each worker of a large group.
MAX_COPIES_PER_HOLDER = 512


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
    def place(self) -> tuple[int, int, int]:
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

    ``members``: the manager addresses of the groups of the last quorum that live, by replica id;
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
    by_place: dict[tuple[int, int, int], dict[int, HeldCopy]] = {}
    for copy in copies:
        if group_world_size not in (None, copy.group_world_size):
            continue
        by_place.setdefault(copy.place, {}).setdefault(copy.group_rank, copy)
    whole = [place for place, found in by_place.items() if len(found) == place[2]]
    if not whole:
        return []
    found = by_place[max(whole)]
    return [found[rank] for rank in sorted(found)]


class HeldCopies:
    """The copies of all jobs, as their holders have reported them last.

    ``began_at``: the time at which holders could report first.
    """

    def __init__(self, max_jobs: int, began_at: float) -> None:
        self._max_jobs = max_jobs
        self._settled_at = began_at + 2 * REPORT_S
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
