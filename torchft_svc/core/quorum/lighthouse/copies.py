"""Decides which copies of a job's states are held outside of its groups (rules B1 to B6).

`HeldCopies` is what a lighthouse knows of them, and `CopySearch` decides whether a worker that
starts begins from one. What a holder keeps is decided in `holder_plan`.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from torchft_svc.core.limits import MAX_ADDRESS_LENGTH, MAX_INT64, check_name, check_text
from torchft_svc.errors import RequestRefused

# How often a holder reports, how long it waits for an answer, and when one that is silent is
# forgotten.
REPORT_S = 1.0
REPORT_TIMEOUT_S = 2.0
SILENT_S = 5.0
# By then each holder has reported to a lighthouse that has just started, also one that has waited
# for another lighthouse of its list.
ALL_REPORTED_S = 2 * REPORT_S + REPORT_TIMEOUT_S
# A job has about a holder for each group.
MAX_HOLDERS_PER_JOB = 4096
# Each may hold two copies of each worker of a large group.
MAX_COPIES_PER_HOLDER = 512
# How long a worker that looks for a copy waits for each answer, and how long it pauses before it
# looks again, for example until the lighthouse knows all copies.
LOOK_UP_S, LOOK_AGAIN_S = 2.0, 0.25
# Members that are asked whether they live; a lighthouse may know only later that they do not.
MAX_MEMBERS_ASKED = 3
# How long it waits for the answer after its first quorum has formed: the lighthouse, which has just
# answered a question, answers another one at once.
CHECK_S = 5.0
# A worker that cannot fetch a copy tries another holder of it, and then the state before.
MAX_HOLDERS_SHOWN = 3
MAX_STATES_SHOWN = 3


class StateKey(NamedTuple):
    """What the copies of one state have in common; a newer state has a higher key."""

    step: int
    step_quorum_id: int
    group_world_size: int


_NO_STATE = StateKey(0, 0, 0)


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
    def state_key(self) -> StateKey:
        """The state that this is a part of."""
        return StateKey(self.step, self.step_quorum_id, self.group_world_size)

    @property
    def holder(self) -> str:
        """The holder for messages, without the secret part of the address."""
        return f"the holder at {self.address.partition('//')[2].partition('/')[0] or '?'}"

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


def whole_states(
    copies: Iterable[HeldCopy], group_world_size: int
) -> dict[StateKey, dict[int, list[HeldCopy]]]:
    """Return the whole states, the newest first, each with its copies by group rank.

    A state of a group of ``group_world_size`` workers is whole if there is a copy of each of them.
    Several holders may have a copy of the same worker.
    """
    states: dict[StateKey, dict[int, list[HeldCopy]]] = {}
    for copy in copies:
        if copy.group_world_size == group_world_size:
            states.setdefault(copy.state_key, {}).setdefault(copy.group_rank, []).append(copy)
    whole = [key for key, workers in states.items() if len(workers) == group_world_size]
    return {key: states[key] for key in sorted(whole, reverse=True)}


# -- what a worker that starts decides -------------------------------------------------------------


class Start(enum.Enum):
    """How a worker that starts goes on, if it fetches no copy now (rule B5)."""

    WITHOUT_COPY = "no copy is whole and newer than what it has, or a group with a state lives"
    LOOK_AGAIN = "the lighthouse does not know all copies yet, or not any more"
    ASK_MEMBERS = "a member of the last quorum may live: then it heals from that one"


class CopySearch:
    """Decides how worker ``group_rank``, which is at ``own_step``, goes on, look by look (rule B5).

    It fetches the newest state, from each of its holders in turn. The states before that one count
    once it could not be fetched for half of ``quorum_s``. If the lighthouse forgets its holders
    meanwhile, because they are silent, the worker waits for them to come back.
    """

    def __init__(
        self, group_rank: int, group_world_size: int, own_step: int, quorum_s: float, now: float
    ) -> None:
        self._worker = group_rank, group_world_size, own_step
        self._quorum_s = quorum_s
        self._began_at = now
        self._asked_at: dict[str, float] = {}  # by the address of a copy
        self._found: list[HeldCopy] = []

    def choose_start(self, view: MembersAndCopies, now: float) -> Start | HeldCopy:
        """Decide how the worker goes on; a copy is to be fetched."""
        states = copies_of_worker(view, *self._worker)
        if not states:
            is_lost = bool(self._found) and view.committed_step == 0 and not view.is_finished
            return Start.WITHOUT_COPY if view.knows_copies and not is_lost else Start.LOOK_AGAIN
        # Groups of a quorum at step 0 have no state, nor has this one, which may be among them.
        if view.committed_step == 0:
            return self._choose_copy(states, now)
        # A job at a step, and no address of a member: the members have reported to a restarted
        # lighthouse, so they live.
        return Start.ASK_MEMBERS if view.members else Start.WITHOUT_COPY

    def is_over(self, now: float) -> bool:
        """Whether to give up; later if there is a copy that was not asked for yet."""
        has_untried = any(copy.address not in self._asked_at for copy in self._found)
        return now - self._began_at > self._quorum_s * (2 if has_untried else 1)

    def _choose_copy(self, states: list[list[HeldCopy]], now: float) -> HeldCopy:
        """Return first what was not asked for yet, and then what was not for longest."""
        if now - self._began_at <= self._quorum_s / 2:
            states = states[:1]
        self._found = [copy for copies in states for copy in copies]
        copy = min(self._found, key=lambda each: self._asked_at.get(each.address, -math.inf))
        self._asked_at[copy.address] = now
        return copy


def whole_copy(
    view: MembersAndCopies, group_rank: int, group_world_size: int, own_step: int
) -> HeldCopy | None:
    """Return the copy that this worker would begin from (None: none is whole and newer)."""
    states = copies_of_worker(view, group_rank, group_world_size, own_step)
    return states[0][0] if states else None


def copies_of_worker(
    view: MembersAndCopies, group_rank: int, group_world_size: int, own_step: int
) -> list[list[HeldCopy]]:
    """Return the copies of this worker that it may begin from (rule B4), by state and holder.

    The states are whole and newer than ``own_step``, the newest one first.
    """
    if view.is_finished:
        return []
    states = whole_states(view.copies, group_world_size)
    return [workers[group_rank] for key, workers in states.items() if key.step > own_step]


# -- what a lighthouse knows -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CopiesSummary:
    """What operators are shown of the copies of a job.

    ``newest_step``: of the newest whole state (0: none is whole). ``age_s``: how long ago the
    newest state so far became whole; before the first one, how long ago the first report came.
    """

    num_holders: int
    newest_step: int
    age_s: float


class HeldCopies:
    """The copies of all jobs, as their holders have reported them last.

    ``began_at``: the time at which holders could report first.
    """

    def __init__(self, max_jobs: int, began_at: float) -> None:
        self._max_jobs = max_jobs
        self._settled_at = began_at + ALL_REPORTED_S
        self._jobs: OrderedDict[str, _JobCopies] = OrderedDict()

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
        held = self._jobs.setdefault(job, _JobCopies(now))
        held.forget_silent(now)
        if holder not in held.holders and len(held.holders) >= MAX_HOLDERS_PER_JOB:
            raise RequestRefused(f"job {job!r} has {len(held.holders)} holders of copies already")
        held.record_report(holder, copies, now)
        self._jobs.move_to_end(job)
        while len(self._jobs) > self._max_jobs:
            self._jobs.popitem(last=False)

    def knows_all(self, now: float) -> bool:
        """Whether each holder has had the time to report to this lighthouse."""
        return now >= self._settled_at

    def whole_copies(self, job: str, now: float) -> list[HeldCopy]:
        """Return copies of the newest whole states of ``job``, the newest state first.

        Of each worker's copies of a state, those of `MAX_HOLDERS_SHOWN` holders at most.
        """
        held = self._jobs.get(job)
        if held is None:
            return []
        held.forget_silent(now)
        return held.whole_copies()

    def summarize(self, job: str, now: float) -> CopiesSummary | None:
        """Summarize the copies of ``job`` (None: no process has ever reported any)."""
        held = self._jobs.get(job)
        if held is None:
            return None
        held.forget_silent(now)
        newest = max(held.whole_states(), default=_NO_STATE)
        return CopiesSummary(len(held.holders), newest.step, now - held.newest_since)


class _JobCopies:
    """The copies of one job, by their holders and by their states.

    The cost of a report depends on its own copies alone: a job may have a holder for each group.
    """

    def __init__(self, now: float) -> None:
        # Each one's last report and its time; the holder that has been silent for longest is first.
        self.holders: OrderedDict[str, tuple[float, tuple[HeldCopy, ...]]] = OrderedDict()
        self.newest_since = now
        self._newest_step = 0
        # By state, group rank and holder.
        self._states: dict[StateKey, dict[int, dict[str, HeldCopy]]] = {}

    def record_report(self, holder: str, copies: tuple[HeldCopy, ...], now: float) -> None:
        """Put a report in the place of the one before."""
        _, before = self.holders.pop(holder, (0.0, ()))
        self.holders[holder] = now, copies
        if copies == before:
            return
        self._remove(holder, before)
        for copy in copies:
            workers = self._states.setdefault(copy.state_key, {})
            workers.setdefault(copy.group_rank, {})[holder] = copy
        if not self._states:  # the next copy is of another run, or of a holder that has started
            self._newest_step = 0
        newest = max(self.whole_states(), default=_NO_STATE).step
        if newest > self._newest_step:
            self._newest_step, self.newest_since = newest, now

    def forget_silent(self, now: float) -> None:
        """Forget the holders that have not reported for `SILENT_S`."""
        while self.holders:
            holder, (at, copies) = next(iter(self.holders.items()))
            if now - at <= SILENT_S:
                return
            del self.holders[holder]
            self._remove(holder, copies)

    def whole_states(self) -> list[StateKey]:
        """Return the states of which there is a copy of each worker."""
        items = self._states.items()
        return [key for key, workers in items if len(workers) == key.group_world_size]

    def whole_copies(self) -> list[HeldCopy]:
        """Return some copies of the newest whole states, for each size of a group."""
        found: list[HeldCopy] = []
        num_shown: Counter[int] = Counter()  # states, by the size of a group
        for key in sorted(self.whole_states(), reverse=True):
            num_shown[key.group_world_size] += 1
            if num_shown[key.group_world_size] <= MAX_STATES_SHOWN:
                for by_holder in self._states[key].values():
                    found += islice(by_holder.values(), MAX_HOLDERS_SHOWN)
        return found

    def _remove(self, holder: str, copies: tuple[HeldCopy, ...]) -> None:
        for copy in copies:
            workers = self._states.get(copy.state_key, {})
            by_holder = workers.get(copy.group_rank, {})
            by_holder.pop(holder, None)
            if not by_holder:
                workers.pop(copy.group_rank, None)
            if not workers:
                self._states.pop(copy.state_key, None)
