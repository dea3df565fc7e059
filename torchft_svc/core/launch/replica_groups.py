"""Decides what a launcher does when one of its replica groups ends: who is started again, as what.

A launcher runs ``num_groups`` groups of one job, and ``num_spares`` prepared spares beside them.
The lighthouse lets a spare take the place of a group that is lost; the launcher starts the lost one
again, as a spare (rule G5). A spare waits for a group that trains, so if there is none, it is
started as a group (rule G6). Groups are numbers from 0; the spares come last.

    launch.start_all(now)                   # StartReplicaGroup for all of them
    launch.group_ended(index, status, now)  # RequestJobStatus may follow
    launch.status_received(view, now)       # answers RequestJobStatus
    launch.tick(now)                        # at next_deadline()
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from torchft_svc.errors import ConfigError

# Each of them is a launcher with its workers on this machine.
MAX_LOCAL_GROUPS = 256
# The pause between two requests for the status of the job, while nobody answers, or nobody trains.
STATUS_INTERVAL_S = 2.0
# When nobody has trained for so long, a spare is ended: it becomes a group, or the job is over. A
# group that was started may need this long to import torch on a busy machine.
ALONE_S = 30.0
# A lighthouse that knows fewer places than before was restarted. Within this time it knows again
# who trains: groups that have lost it look for it every second.
SETTLE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsRules:
    """The groups of a launcher, and how often each of them is started again.

    ``final_status``: a group that ends with this exit status has an error that no restart mends.
    """

    num_groups: int
    num_spares: int = 0
    max_restarts: int = 0
    final_status: int = 93

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ConfigError("--replica-groups", self.num_groups, "use 1 or more")
        if self.num_spares < 0:
            raise ConfigError("--spares", self.num_spares, "use 0 or more")
        total = self.num_groups + self.num_spares
        if total > MAX_LOCAL_GROUPS:
            reason = f"with --replica-groups there are {total}; use {MAX_LOCAL_GROUPS} or less"
            raise ConfigError("--spares", self.num_spares, reason)
        if self.num_spares and not self.max_restarts:
            reason = "a killed group would not stand by again: give --max-restarts, too"
            raise ConfigError("--spares", self.num_spares, reason)


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """A group of this launcher that lives and is no prepared spare, as the lighthouse knows it."""

    replica_id: str
    in_quorum: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsView:
    """What the lighthouse knows of the job.

    ``others_train``: a living group of another launcher is in its last quorum. ``num_places``: how
    many groups the job has had at once; spares fill it up to that number. ``own_groups``: by the
    number of the group. ``is_finished``: all groups of its last quorum have ended on purpose.
    """

    others_train: bool = False
    num_places: int = 0
    own_groups: Mapping[int, SeenGroup] = field(default_factory=dict)
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class StartReplicaGroup:
    """Start group ``index``, as a prepared spare or as an ordinary group."""

    index: int
    is_spare: bool


@dataclass(frozen=True, slots=True)
class RequestJobStatus:
    """Call `ReplicaGroups.status_received` with what the lighthouse knows (None: no answer)."""


@dataclass(frozen=True, slots=True)
class EndReplicaGroups:
    """Signal the groups ``indices`` to end; each end is reported as any other."""

    indices: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUpReplicaGroup:
    """Log that group ``index`` is not started again: it has used up its restarts."""

    index: int
    status: int


@dataclass(frozen=True, slots=True)
class EndLaunch:
    """End the launcher with exit status ``status``: no group runs."""

    status: int


GroupsOrder = (
    StartReplicaGroup | RequestJobStatus | EndReplicaGroups | GiveUpReplicaGroup | EndLaunch
)
GroupsOrders = tuple[GroupsOrder, ...]


class _Stage(Enum):
    RUNNING = auto()
    CONVERTING = auto()  # a spare that was signalled, to be started as a group
    WAITING = auto()  # it has ended; the status of the job decides as what it is started again
    FINISHED = auto()  # with status 0
    GIVEN_UP = auto()


@dataclass(slots=True)
class _Slot:
    is_spare: bool
    stage: _Stage = _Stage.RUNNING
    num_restarts: int = 0
    is_member: bool = False  # of the job's quorum, by the last status
    ended_id: str = ""  # the replica id of a process that had ended, and was in the status still


class ReplicaGroups:
    """The groups of one launcher."""

    def __init__(self, rules: GroupsRules) -> None:
        self.rules = rules
        total = rules.num_groups + rules.num_spares
        self._slots = [_Slot(is_spare=index >= rules.num_groups) for index in range(total)]
        self._orders: list[GroupsOrder] = []
        self._end_status: int | None = None  # of the launcher, once all groups are to end
        self._status_at = math.inf
        self._awaits_status = False
        self._alone_since: float | None = None
        self._has_trained = False  # the job, while this launcher runs
        self._was_whole = False  # the job has had all places of this launcher's groups
        self._forgotten_since: float | None = None  # the lighthouse knows fewer places than then

    def start_all(self, now: float) -> GroupsOrders:
        """Start all groups."""
        for index, slot in enumerate(self._slots):
            self._orders.append(StartReplicaGroup(index, slot.is_spare))
        if self.rules.num_spares:
            self._status_at = now + STATUS_INTERVAL_S
        return self._pop_orders()

    def next_deadline(self) -> float:
        """The instant at which `tick` is due (infinity: none)."""
        return self._status_at

    def tick(self, now: float) -> GroupsOrders:
        """Request the status of the job again, if that is due."""
        if now >= self._status_at:
            self._request_status()
        return self._pop_orders()

    def group_ended(self, index: int, status: int, now: float) -> GroupsOrders:
        """Record that a group has ended with exit status ``status`` (negative: by a signal)."""
        slot, rules = self._slots[index], self.rules
        was_converting = slot.stage is _Stage.CONVERTING
        slot.is_member = False
        if self._end_status is not None:
            slot.stage = _Stage.FINISHED if status == 0 else _Stage.GIVEN_UP
        elif was_converting:
            self._start(index, is_spare=False)
        elif status == 0:
            slot.stage = _Stage.FINISHED
        elif status == rules.final_status:
            slot.stage = _Stage.GIVEN_UP
            self._end_all(status, f"group {index} has an error that no restart mends")
        elif slot.num_restarts >= rules.max_restarts:
            slot.stage = _Stage.GIVEN_UP
            self._orders.append(GiveUpReplicaGroup(index, status))
        else:
            slot.num_restarts += 1
            slot.stage = _Stage.WAITING
            if not rules.num_spares:
                self._start(index, is_spare=False)
        self._end_if_over()
        if rules.num_spares and not was_converting and self._end_status is None:
            # Also if this group is not started again: only spares may be left.
            self._request_status()
        return self._pop_orders()

    def status_received(self, view: GroupsView | None, now: float) -> GroupsOrders:
        """Start the groups that have ended, as what ``view`` of the job needs (None: no answer)."""
        self._awaits_status = False
        if self._end_status is not None:
            return self._pop_orders()
        if view is None:
            self._status_at = now + STATUS_INTERVAL_S
            return self._pop_orders()
        for index, slot in enumerate(self._slots):
            self._update_slot(slot, view.own_groups.get(index))
        trains_here = any(slot.is_member for slot in self._slots)
        trains = trains_here or view.others_train
        self._has_trained = self._has_trained or trains
        is_finished = view.is_finished and self._has_trained
        # Before the job had all of its groups, no spare would take the place of the missing one.
        has_place = trains and view.num_places >= self.rules.num_groups
        if not is_finished:
            self._record_places(view, trains, now)
        may_start = not is_finished and self._is_settled(now)
        for index, slot in enumerate(self._slots):
            if slot.stage is _Stage.WAITING and may_start:
                is_whole = self._num_groups() >= self.rules.num_groups
                self._start(index, is_spare=has_place or is_whole)
        is_known = trains_here and self._was_whole
        self._status_at = math.inf if is_known else now + STATUS_INTERVAL_S
        self._record_training(trains, now)
        if self._alone_since is not None and now >= self._alone_since + ALONE_S:
            if is_finished:
                self._end_all(0, "the job has finished")
                self._end_if_over()
            else:
                self._convert_spare()
        return self._pop_orders()

    def interrupt(self, reason: str) -> GroupsOrders:
        """End all groups, because the launcher was signalled."""
        self._end_all(1, reason)
        self._end_if_over()
        return self._pop_orders()

    # -- parts -------------------------------------------------------------------------------------

    def _request_status(self) -> None:
        self._status_at = math.inf
        if not self._awaits_status:
            self._awaits_status = True
            self._orders.append(RequestJobStatus())

    def _start(self, index: int, *, is_spare: bool) -> None:
        slot = self._slots[index]
        slot.stage, slot.is_spare, slot.is_member = _Stage.RUNNING, is_spare, False
        self._orders.append(StartReplicaGroup(index, is_spare))

    def _update_slot(self, slot: _Slot, seen: SeenGroup | None) -> None:
        """Record whether the group's process is in the quorum.

        The status may still show the process before, whose replica id is another one.
        """
        slot.is_member = False
        if seen is None or seen.replica_id == slot.ended_id:
            return
        if slot.stage is _Stage.RUNNING:
            slot.is_member = seen.in_quorum
            slot.is_spare = False  # it has taken a place
        else:
            slot.ended_id = seen.replica_id

    def _record_places(self, view: GroupsView, trains: bool, now: float) -> None:
        """Record since when the lighthouse knows fewer places than before: it was restarted."""
        num_finished = sum(slot.stage is _Stage.FINISHED for slot in self._slots)
        knows_all = view.num_places >= self.rules.num_groups - num_finished
        self._was_whole = self._was_whole or knows_all
        if trains or knows_all or not self._was_whole:
            self._forgotten_since = None
        elif self._forgotten_since is None:
            self._forgotten_since = now

    def _is_settled(self, now: float) -> bool:
        """Whether the lighthouse would know of groups that train."""
        return self._forgotten_since is None or now >= self._forgotten_since + SETTLE_S

    def _record_training(self, trains: bool, now: float) -> None:
        """Record since when nobody trains, and groups are missing here."""
        if trains or self._num_groups() >= self.rules.num_groups:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now

    def _num_groups(self) -> int:
        """The number of groups that run, with the spares that are ended to become groups."""
        return sum(
            slot.stage is _Stage.CONVERTING or (slot.stage is _Stage.RUNNING and not slot.is_spare)
            for slot in self._slots
        )

    def _convert_spare(self) -> None:
        """End a spare, which is then started as a group."""
        for index, slot in enumerate(self._slots):
            if slot.stage is _Stage.RUNNING and slot.is_spare:
                slot.stage = _Stage.CONVERTING
                reason = f"nobody has trained for {ALONE_S:g} s: this spare becomes a group"
                self._orders.append(EndReplicaGroups((index,), reason))
                return

    def _end_all(self, status: int, reason: str) -> None:
        """End all groups, and then the launcher with ``status``; the first call counts."""
        if self._end_status is None:
            self._end_status = status
            self._status_at = math.inf
            for slot in self._slots:
                if slot.stage is _Stage.WAITING:
                    slot.stage = _Stage.GIVEN_UP
            running = tuple(index for index, slot in enumerate(self._slots) if slot.stage in _RUNS)
            if running:
                self._orders.append(EndReplicaGroups(running, reason))

    def _end_if_over(self) -> None:
        """End the launcher if no group runs, or will be started."""
        if any(slot.stage in _RUNS or slot.stage is _Stage.WAITING for slot in self._slots):
            return
        self._status_at = math.inf
        num_finished = sum(slot.stage is _Stage.FINISHED for slot in self._slots)
        is_done = num_finished >= self.rules.num_groups
        status = self._end_status
        self._orders.append(EndLaunch((0 if is_done else 1) if status is None else status))

    def _pop_orders(self) -> GroupsOrders:
        orders, self._orders = tuple(self._orders), []
        return orders


_RUNS = (_Stage.RUNNING, _Stage.CONVERTING)
