"""Keeps the ledger of a job: one record for each fault, join and change, with what it has cost.

A record begins when something is detected, and is completed while the job recovers: by the quorum
that follows, by the first step that is committed in it, and by the return of the group (rules N1 to
N5). Times are unix seconds, which `Jobs` derives from its clock.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.session_messages import Departure, Leave
from torchft_svc.core.quorum.tally import EventKind, GroupEvent
from torchft_svc.core.quorum.types import Quorum

# A job whose groups come and go for months keeps its last records; all jobs together keep so many
# that they need about 50 MB.
MAX_INCIDENTS, MAX_INCIDENTS_OF_ALL = 1000, 50_000
# Of groups that one record is about, as the groups of a cold start.
MAX_GROUPS_NAMED = 64
# How many of the last records a group's first commit in a quorum may complete.
MAX_COMPLETED = 64
# More groups than this that join with one quorum share one record.
MAX_JOINED_ONE_BY_ONE = 16
MAX_CAUSE_LENGTH = 400
# Reporters whose last event is known, so that a repeated one is recognised; and discarded steps
# whose cause is not known yet.
MAX_SOURCES, MAX_UNEXPLAINED = 20_000, 64
# A group whose manager has died may be recorded as lost so much earlier or later.
SAME_FAULT_S = 60.0
# A manager's death is noticed by its group so long after the others may have discarded a step.
NOTICED_WITHIN_S = 1.0
# Absences of the lighthouse that groups report are one if no more time than this is between them.
SAME_ABSENCE_S = 0.5
# Numbers begin with the seconds since then, so that they also grow over a lighthouse's restart.
NUMBER_EPOCH_S = 1_735_689_600


class IncidentKind(enum.Enum):
    """What has happened to a job."""

    LOST = "lost"
    JOINED = "joined"
    LEFT = "left"
    DRAINED = "drained"
    KILLED = "killed"
    HUNG = "hung"
    EVICTED = "evicted"
    STRAGGLED = "straggled"
    SLOW = "slow"
    HEAL_FAILED = "heal_failed"
    DISCARDED = "discarded"
    STATE_DIFFERS = "state_differs"
    MANAGER_DIED = "manager_died"
    LIGHTHOUSE_AWAY = "lighthouse_away"
    LOSS_ACCEPTED = "loss_accepted"
    RUN_CHANGED = "run_changed"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One record of a job's ledger.

    ``number`` grows within a job. ``cause`` is one sentence; ``groups`` are the replica ids that
    it is about. ``at``: when it was detected, in unix seconds; ``quorum_id`` (0: none) and
    ``step``: the quorum in force and the job's committed step then. ``is_open``: something of it is
    still under way, such as the recovery, a heal, or the absence of a lost group.

    The anatomy, in seconds (None: not known, or it did not happen): ``detected_after_s`` from the
    last sign of life to ``at``; ``decided_after_s`` from ``at`` to the quorum that follows;
    ``paused_s``: how long the other groups stood still because of it; ``reconfigured_s``: the
    rebuilding of the process groups; ``healed_s`` and ``healed_bytes``; ``first_commit_after_s``
    from ``at`` to the first step that was committed in the quorum that follows.
    ``steps_discarded``: the steps that it has cost.
    """

    number: int
    job: str
    kind: IncidentKind
    cause: str
    groups: tuple[str, ...]
    at: float
    quorum_id: int = 0
    step: int = 0
    is_open: bool = False
    detected_after_s: float | None = None
    decided_after_s: float | None = None
    paused_s: float | None = None
    reconfigured_s: float | None = None
    healed_s: float | None = None
    healed_bytes: int | None = None
    first_commit_after_s: float | None = None
    steps_discarded: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON has them."""
        return {**dataclasses.asdict(self), "kind": self.kind.value, "groups": list(self.groups)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """How much of a job's time ended in committed steps; durations in seconds.

    ``wall_s``: since the job's first group was seen. ``lost_s``: the rest, by cause; its values and
    ``committed_s`` sum to ``wall_s``. ``ratio``: ``committed_s`` of ``wall_s`` (0: no time yet).
    """

    wall_s: float = 0.0
    committed_s: float = 0.0
    lost_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ratio: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON has them."""
        return {**dataclasses.asdict(self), "lost_s": dict(self.lost_s)}


@dataclass(frozen=True, slots=True)
class Moment:
    """The time of a detection, with the quorum in force and the committed step then."""

    at: float
    quorum_id: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class _Report:
    """A discarded step, as a group reports it."""

    replica_id: str
    event: GroupEvent
    at: float

    @property
    def step(self) -> tuple[int, int]:
        """The quorum id and the step that was discarded; all members report the same."""
        return self.event.quorum_id, self.event.step

    @property
    def cause(self) -> str:
        return self.event.cause[:MAX_CAUSE_LENGTH]

    def merged(self, other: _Report) -> _Report:
        """This report or ``other``, of the same step: the one that knows more."""
        is_better = other.event.is_own and not self.event.is_own
        return other if is_better or (other.event.lost and not self.event.is_own) else self


@dataclass(slots=True)
class _Entry:
    """A record, and what completes it.

    ``awaits_quorum``: the quorum that follows. ``awaits_step``: a commit above this step (None:
    none is awaited). ``awaits_return``: the stable names of lost groups. ``awaits_heal``: groups
    that are behind. ``followed_by``: the quorum that follows, and ``returned_in``: with the group
    again, formed at ``returned_at`` (0, 0 and infinite: there is none yet). ``discarded``: quorum
    id and step of each step that it has cost.
    """

    incident: Incident
    awaits_quorum: bool = False
    awaits_step: int | None = None
    awaits_return: set[str] = dataclasses.field(default_factory=set)
    awaits_heal: set[str] = dataclasses.field(default_factory=set)
    followed_by: int = 0
    returned_in: int = 0
    returned_at: float = math.inf
    discarded: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    blamed: bool = False  # the groups are the cause, as they report themselves
    is_of_member: bool = False  # the step of its quorum cannot be committed
    awaits_world: bool = False  # the next one of the launched run
    is_slow: bool = False  # the group is, and lives
    is_evicted: bool = False  # because of that
    is_history: bool = False  # from before this lighthouse knew the job, as groups report it
    until: float = 0.0  # the end of an absence

    @property
    def is_open(self) -> bool:
        awaits_decision = self.awaits_quorum or self.awaits_world
        awaits_groups = bool(self.awaits_return or self.awaits_heal)
        return self.is_slow or awaits_decision or self.awaits_step is not None or awaits_groups

    @property
    def is_of_run(self) -> bool:
        """Whether this is about the launched run, and not about groups."""
        return self.incident.kind is IncidentKind.RUN_CHANGED

    def concerns(self, name: str) -> bool:
        """Whether this is about the group with that stable name."""
        return any(stable_name(each) == name for each in self.incident.groups)

    def explains(self, report: _Report) -> bool:
        """Whether this is why a step was discarded."""
        incident = self.incident
        if report.step in self.discarded:
            return True
        if incident.kind is IncidentKind.STATE_DIFFERS:
            return (incident.quorum_id, incident.step) == report.step
        is_of_quorum = incident.quorum_id == report.event.quorum_id  # which ends with a discard
        return (self.is_of_member or self.is_history) and is_of_quorum

    def only_seemed_to_hang(self, silent_since: float) -> bool:
        """Whether the silence of a group since then is why it seemed to hang: for most of that time
        nobody knew what it did."""
        incident = self.incident
        seemed_s = incident.detected_after_s
        if incident.kind not in _HANGS or seemed_s is None:
            return False
        return silent_since < incident.at - seemed_s / 2

    def is_repeated_by(self, report: _Report) -> bool:
        """Whether the same step was discarded for the same reason, again."""
        incident, (quorum_id, step) = self.incident, report.step
        return (
            incident.kind is IncidentKind.DISCARDED
            and incident.quorum_id < quorum_id
            and incident.step == step
            and incident.cause == report.cause
        )


_HANGS = (IncidentKind.HUNG, IncidentKind.EVICTED)
# A group that is gone, or left out, after one of these: that was the beginning of the same fault.
_BEGINNINGS = (*_HANGS, IncidentKind.STRAGGLED)
_LASTING = (IncidentKind.LOST, IncidentKind.MANAGER_DIED, *_BEGINNINGS)  # it is expected back


class JobLedger:
    """The records of one job."""

    def __init__(self, job: str, at: float, dirty: set[str]) -> None:
        """``dirty``: the names of jobs whose records have changed, to which this adds its own."""
        self._job = job
        self._dirty = dirty
        self._last_number = max(0, int(at - NUMBER_EPOCH_S))
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._open: dict[int, _Entry] = {}
        self._open_about: dict[str, dict[int, _Entry]] = {}  # by replica id
        self._awaiting_step: dict[int, _Entry] = {}
        self._changed: dict[int, None] = {}
        self._here_since = at
        self._seen: OrderedDict[str, int] = OrderedDict()  # the last event of each source
        # Discarded steps that no record explains yet, by quorum id and step.
        self._unexplained: OrderedDict[tuple[int, int], _Report] = OrderedDict()
        #: Groups that hang, or heal, as recorded, each with the number of its record.
        self.hung: dict[str, int] = {}
        self.healing: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    # -- questions -------------------------------------------------------------------------------

    def incidents(self, after: int = 0) -> list[Incident]:
        """The records with numbers above ``after``, the oldest first."""
        return [each.incident for number, each in self._entries.items() if number > after]

    def pop_changed(self) -> list[Incident]:
        """The records that are new or have changed since the last call, the oldest first."""
        if not self._changed:
            return []
        changed, self._changed = self._changed, {}
        return [self._entries[each].incident for each in sorted(changed) if each in self._entries]

    @property
    def awaits_step(self) -> bool:
        """Whether a committed step completes a record."""
        return bool(self._awaiting_step)

    # -- groups that go --------------------------------------------------------------------------

    def record_gone(
        self, replica_id: str, how: Leave, moment: Moment, *, silent_s: float, was_member: bool
    ) -> bool:
        """Record that a group is gone, ``silent_s`` after its last sign of life.

        Returns whether it had a record of a hang, which was only the silence before this loss.
        ``was_member``: of the quorum in force, or of one before.
        """
        self.hung.pop(replica_id, None)
        self._end_joining(replica_id)
        slow = self._find_open(replica_id, (IncidentKind.SLOW,))
        if slow is not None:
            slow.is_slow = False
            slow.awaits_quorum = slow.is_of_member = slow.is_evicted and was_member
            if slow.is_evicted:
                self._change(slow, kind=IncidentKind.EVICTED)
            self._update(slow)
            if slow.is_evicted:
                return False
        began = self._find_open(replica_id, _BEGINNINGS)
        if began is not None:
            cause = f"{began.incident.cause}; {how.reason}"
            kind, last_sign_at = began.incident.kind, moment.at - silent_s
            only_seemed = began.only_seemed_to_hang(last_sign_at)
            if kind is IncidentKind.STRAGGLED:  # as it turns out, it was dead or frozen
                kind, cause = _kind_of(how), how.reason
            elif only_seemed:
                kind, cause = _kind_of(how), how.reason
                self._change(began, detected_after_s=began.incident.at - last_sign_at)
            began.awaits_return = {stable_name(replica_id)}
            self._change(began, kind=kind, cause=cause[:MAX_CAUSE_LENGTH])
            return only_seemed
        kind = _kind_of(how)
        if kind is IncidentKind.LEFT and not was_member:
            return False  # it has never trained
        entry = self._add(kind, how.reason, (replica_id,), moment, detected_after_s=silent_s)
        entry.awaits_quorum = entry.is_of_member = was_member
        if kind is IncidentKind.LOST:
            entry.awaits_return = {stable_name(replica_id)}
        self._update(entry)
        return False

    def record_hang(self, replica_id: str, cause: str, moment: Moment, *, for_s: float) -> None:
        """Record that a group has stood still for ``for_s``."""
        if self._find_open(replica_id, _BEGINNINGS) is not None:
            return
        entry = self._add(IncidentKind.HUNG, cause, (replica_id,), moment, detected_after_s=for_s)
        entry.awaits_return, entry.is_of_member = {stable_name(replica_id)}, True
        self.hung[replica_id] = entry.incident.number
        self._update(entry)

    def record_moved(self, replica_id: str) -> None:
        """Record that a group that hung has gone on by itself."""
        number = self.hung.pop(replica_id, None)
        entry = self._open.get(number or 0)
        seemed = (IncidentKind.HUNG, IncidentKind.MANAGER_DIED)
        if entry is not None and entry.incident.kind in seemed:
            entry.awaits_return = set()
            self._update(entry)

    def record_slow(self, replica_id: str, cause: str, moment: Moment, *, for_s: float) -> None:
        """Record that a group has been slow for ``for_s``."""
        entry = self._add(IncidentKind.SLOW, cause, (replica_id,), moment, detected_after_s=for_s)
        entry.is_slow = True
        self._update(entry)

    def record_usual(self, replica_id: str) -> None:
        """Record that a slow group is no longer slow."""
        entry = self._find_open(replica_id, (IncidentKind.SLOW,))
        if entry is not None:
            entry.is_slow = False
            self._update(entry)

    def record_slow_eviction(self, replica_id: str, cause: str) -> None:
        """Record that a slow group is drained because of that: its record is that of its end."""
        entry = self._find_open(replica_id, (IncidentKind.SLOW,))
        if entry is not None:
            entry.is_evicted = True
            self._change(entry, cause=cause[:MAX_CAUSE_LENGTH])

    def record_left_out(
        self, kind: IncidentKind, replica_id: str, cause: str, moment: Moment
    ) -> None:
        """Record that the others continue without a living group, which is evicted, or late."""
        began = self._find_open(replica_id, _BEGINNINGS)
        if began is None:
            began = self._add(kind, cause, (replica_id,), moment)
        elif kind is IncidentKind.EVICTED:
            self._change(began, kind=kind, cause=cause[:MAX_CAUSE_LENGTH])
        began.awaits_quorum = began.incident.decided_after_s is None
        began.awaits_return, began.is_of_member = {stable_name(replica_id)}, True
        self._update(began)

    # -- groups that come ------------------------------------------------------------------------

    def record_quorum(
        self,
        quorum: Quorum,
        came: Mapping[str, float],
        moment: Moment,
        *,
        is_first: bool,
    ) -> None:
        """Record another quorum, with the groups that ``came``, each with the seconds since it has
        asked; ``is_first``: the job had none before."""
        step = quorum.max_step
        back = {each for each in came if self._find_open(each, _BEGINNINGS)}
        members = {stable_name(each.replica_id) for each in quorum.participants}
        for entry in list(self._open.values()):
            if entry.awaits_quorum:
                entry.awaits_quorum = False
                entry.awaits_step = step
                self._change(entry, decided_after_s=max(0.0, moment.at - entry.incident.at))
            if entry.awaits_step is not None:
                entry.awaits_step, entry.followed_by = step, quorum.quorum_id
            if entry.awaits_return & members and entry.incident.kind in _LASTING:
                entry.awaits_return -= members
                entry.returned_in, entry.returned_at = quorum.quorum_id, moment.at
            self._update(entry)
        if self.healing:
            self.record_healed(each.replica_id for each in quorum.up_to_date)
        self._explain_all(moment)
        # The return of a group that was left out, and its heal, belong to that record.
        joined = {each: asked_s for each, asked_s in came.items() if each not in back}
        if not joined:
            return
        if is_first or len(joined) > MAX_JOINED_ONE_BY_ONE:
            what = "the job begins" if is_first else "they join"
            num = f"{len(joined)} group{'s' * (len(joined) > 1)}"
            self._add_joined(f"{what} with {num}", joined, quorum, moment)
        else:
            for replica_id, asked_s in joined.items():
                cause = "it was restarted" if self._was_lost(replica_id) else "it is new to the job"
                self._add_joined(cause, {replica_id: asked_s}, quorum, moment)

    def _add_joined(
        self, cause: str, joined: Mapping[str, float], quorum: Quorum, moment: Moment
    ) -> None:
        waited_s = max(joined.values())
        asked = replace(moment, at=moment.at - waited_s)
        entry = self._add(
            IncidentKind.JOINED, cause, tuple(sorted(joined)), asked, decided_after_s=waited_s
        )
        entry.awaits_step, entry.followed_by = quorum.max_step, quorum.quorum_id
        if quorum.max_step > 0:  # at the first step all begin with the weights of one
            up_to_date = {each.replica_id for each in quorum.up_to_date}
            entry.awaits_heal = set(entry.incident.groups) - up_to_date
            self.healing |= dict.fromkeys(entry.awaits_heal, entry.incident.number)
        self._update(entry)

    def record_healed(self, replica_ids: Iterable[str]) -> None:
        """Record that these groups are up to date, or gone."""
        for replica_id in replica_ids:
            entry = self._open.get(self.healing.pop(replica_id, 0))
            if entry is not None:
                entry.awaits_heal.discard(replica_id)
                self._update(entry)

    def record_reached(self, replica_id: str, step: int) -> None:
        """Record that a group that heals has reached ``step``: that may be the end of its heal."""
        entry = self._open.get(self.healing.get(replica_id, 0))
        if entry is None or step >= entry.incident.step:
            self.record_healed((replica_id,))

    def _was_lost(self, replica_id: str) -> bool:
        name = stable_name(replica_id)
        return any(
            entry.incident.kind is not IncidentKind.JOINED and entry.concerns(name)
            for entry in self._entries.values()
        )

    def _end_joining(self, replica_id: str) -> None:
        """End the records of joins of a group that is gone: their commit will not come."""
        self.record_healed((replica_id,))
        for entry in list(self._open_about.get(replica_id, {}).values()):
            incident = entry.incident
            if incident.kind is IncidentKind.JOINED and incident.groups == (replica_id,):
                entry.awaits_step = None
                self._update(entry)

    # -- steps and the rest ----------------------------------------------------------------------

    def record_step(self, step: int, at: float) -> None:
        """Record that the job has reached ``step``."""
        for entry in list(self._awaiting_step.values()):
            if entry.awaits_step is not None and step > entry.awaits_step:
                entry.awaits_step = None
                if entry.incident.first_commit_after_s is None:
                    self._change(entry, first_commit_after_s=max(0.0, at - entry.incident.at))
                self._update(entry)

    # -- what groups report ----------------------------------------------------------------------

    def record_event(self, replica_id: str, event: GroupEvent, moment: Moment) -> tuple[str, ...]:
        """Record what a group reports, once; ``moment``: when it happened, and what is in force
        now. Returns the groups of which it explains that they had seemed to hang."""
        if event.number <= self._seen.get(event.source, 0):
            return ()
        self._seen[event.source] = event.number
        self._seen.move_to_end(event.source)
        if len(self._seen) > MAX_SOURCES:
            self._seen.popitem(last=False)
        if event.kind is EventKind.RECOVERED:
            self._complete(replica_id, event, moment)
        elif event.kind is EventKind.MANAGER_DIED:
            return self._record_dead_manager(replica_id, event, moment)
        elif event.kind is EventKind.LIGHTHOUSE_AWAY:
            return self._record_absence(replica_id, event, moment)
        else:
            self._record_discard(_Report(replica_id, event, moment.at), moment)
        return ()

    def _record_discard(self, report: _Report, moment: Moment) -> None:
        known = self._unexplained.get(report.step)
        if known is not None:
            self._unexplained[report.step] = known.merged(report)
        elif not self._explain(report):
            self._unexplained[report.step] = report
            is_past = report.event.quorum_id != moment.quorum_id
            if is_past or len(self._unexplained) > MAX_UNEXPLAINED:
                self._explain_all(moment)

    def _explain(self, report: _Report) -> bool:
        """Add a discarded step to the record that explains it, if there is one."""
        for entry in reversed(self._entries.values()):
            if entry.explains(report) or entry.is_repeated_by(report):
                entry.discarded.add(report.step)
                self._change(entry, steps_discarded=len(entry.discarded))
                is_discard = entry.incident.kind is IncidentKind.DISCARDED
                if is_discard and report.event.is_own:
                    self._blame(entry, report)
                elif is_discard and entry.is_history and report.event.lost:
                    groups = report.event.lost
                    self._change(entry, kind=IncidentKind.LOST, cause=report.cause, groups=groups)
                return True
        return False

    def _blame(self, entry: _Entry, report: _Report) -> None:
        """Let a group that is the cause itself be the cause, and not what the others noticed."""
        groups = (
            {*entry.incident.groups, report.replica_id} if entry.blamed else {report.replica_id}
        )
        entry.blamed = True
        self._close(entry)  # in the index, under the groups that it was about
        self._change(entry, cause=report.cause, groups=tuple(sorted(groups)))
        self._update(entry)

    def _explain_all(self, moment: Moment) -> None:
        """Add a record for each discarded step of an earlier quorum that nothing explains."""
        unexplained, self._unexplained = self._unexplained, OrderedDict()
        for which, report in unexplained.items():
            if report.event.quorum_id == moment.quorum_id and len(unexplained) <= MAX_UNEXPLAINED:
                self._unexplained[which] = report
            elif not self._explain(report):
                self._add_discarded(report, followed_by=moment.quorum_id)

    def _add_discarded(self, report: _Report, followed_by: int) -> None:
        event, (quorum_id, step) = report.event, report.step
        groups: tuple[str, ...] = (report.replica_id,)
        kind = IncidentKind.DISCARDED
        if event.kind is EventKind.HEAL_FAILED:
            kind = IncidentKind.HEAL_FAILED
        elif event.lost and not any(map(self._was_lost, event.lost)):
            kind, groups = IncidentKind.LOST, event.lost  # before this lighthouse knew the job
        moment = Moment(report.at, quorum_id, step)
        entry = self._add(kind, event.cause, groups, moment, paused_s=event.lasts_s)
        entry.discarded, entry.blamed = {report.step}, event.is_own
        entry.is_history = report.at < self._here_since
        if entry.is_history:  # it may have been back ever since
            entry.returned_at = report.at + NOTICED_WITHIN_S
        self._change(entry, steps_discarded=1)
        if report.at >= self._here_since:
            entry.awaits_step, entry.followed_by = step, followed_by
            self._update(entry)

    def _complete(self, replica_id: str, event: GroupEvent, moment: Moment) -> None:
        """Complete the records that the first commit in a quorum ends."""
        is_known = False
        for entry in islice(reversed(self._entries.values()), MAX_COMPLETED):
            incident = entry.incident
            is_about = replica_id in incident.groups
            if entry.followed_by == event.quorum_id:
                is_known = True
                after_s = max(0.0, moment.at - incident.at)
                anatomy: dict[str, Any] = {
                    "first_commit_after_s": min(after_s, incident.first_commit_after_s or after_s),
                    "reconfigured_s": _longest(incident.reconfigured_s, event.reconfigured_s),
                }
                if not is_about:
                    anatomy["paused_s"] = _longest(incident.paused_s, event.paused_s)
                entry.awaits_step = None
                self._change(entry, **anatomy)
            if is_about and event.quorum_id in (entry.followed_by, entry.returned_in):
                is_known = True
                is_of_return = incident.kind in (IncidentKind.LOST, IncidentKind.MANAGER_DIED)
                if event.healed_s is not None and not is_of_return:  # that has its own record
                    healed_s = _longest(incident.healed_s, event.healed_s)
                    healed_bytes = (incident.healed_bytes or 0) + (event.healed_bytes or 0)
                    self._change(entry, healed_s=healed_s, healed_bytes=healed_bytes)
            self._update(entry)
        self.record_healed((replica_id,))
        if not is_known and event.healed_s is not None and moment.at < self._here_since:
            self._add(
                IncidentKind.JOINED,
                "it joined when another lighthouse served the job",
                (replica_id,),
                Moment(moment.at, event.quorum_id, event.step),
                healed_s=event.healed_s,
                healed_bytes=event.healed_bytes,
                reconfigured_s=event.reconfigured_s,
            )

    def _record_dead_manager(
        self, replica_id: str, event: GroupEvent, moment: Moment
    ) -> tuple[str, ...]:
        name = stable_name(replica_id)
        for entry in reversed(self._entries.values()):
            incident = entry.incident
            has_returned = incident.kind is IncidentKind.JOINED and incident.at < moment.at
            if has_returned and entry.concerns(name):
                break  # what was recorded before is of another fault
            if incident.kind in (IncidentKind.LOST, *_BEGINNINGS) and entry.concerns(name):
                was_gone = moment.at <= entry.returned_at
                # Without a manager, the group seemed to stand still.
                is_why = incident.kind is IncidentKind.LOST or moment.at <= incident.at
                if was_gone and is_why and abs(incident.at - moment.at) <= SAME_FAULT_S:
                    self._change(entry, kind=IncidentKind.MANAGER_DIED, cause=event.cause)
                    self._begin_earlier(entry, moment.at)
                    return incident.groups if incident.kind in _HANGS else ()
                break
        self._add(IncidentKind.MANAGER_DIED, event.cause, (replica_id,), moment)
        return ()

    def _begin_earlier(self, entry: _Entry, at: float) -> None:
        """Let a record begin with its cause, which was at ``at``, and not with what followed."""
        incident = entry.incident
        earlier_s = incident.at - at
        if earlier_s > 0:
            after_s = {
                field: seconds + earlier_s
                for field in ("decided_after_s", "first_commit_after_s")
                if (seconds := getattr(incident, field)) is not None
            }
            self._change(entry, at=at, detected_after_s=None, **after_s)

    def _record_absence(
        self, replica_id: str, event: GroupEvent, moment: Moment
    ) -> tuple[str, ...]:
        began_at = moment.at - event.lasts_s
        name = stable_name(replica_id)
        for entry in reversed(self._entries.values()):
            incident = entry.incident
            is_away = incident.kind is IncidentKind.LIGHTHOUSE_AWAY
            overlap_s = min(entry.until, moment.at) - max(incident.at, began_at)
            if is_away and overlap_s >= -SAME_ABSENCE_S:
                groups = tuple(sorted({*incident.groups, replica_id}))
                entry.until = max(entry.until, moment.at)
                self._change(entry, groups=groups[:MAX_GROUPS_NAMED])
                return ()
            is_hang = incident.kind is IncidentKind.HUNG and incident.at <= moment.at
            if is_hang and entry.concerns(name) and entry.only_seemed_to_hang(began_at):
                self._explain_hang(entry, event, moment)
                return incident.groups
            # If the lighthouse was there, the group was cut off, or frozen.
            is_recorded = began_at <= incident.at <= moment.at or bool(entry.awaits_return)
            if incident.kind in _LASTING and is_recorded and entry.concerns(name):
                return ()
        entry = self._add(
            IncidentKind.LIGHTHOUSE_AWAY,
            _absence_cause(event),
            (replica_id,),
            replace(moment, at=began_at),
        )
        entry.until = moment.at
        return ()

    def _explain_hang(self, entry: _Entry, event: GroupEvent, moment: Moment) -> None:
        """Let a group that seemed to hang have been cut off, as it reports itself."""
        entry.until, entry.awaits_return = moment.at, set()
        self._change(entry, kind=IncidentKind.LIGHTHOUSE_AWAY, cause=_absence_cause(event))
        self._begin_earlier(entry, moment.at - event.lasts_s)
        self._update(entry)

    # -- the rest --------------------------------------------------------------------------------

    def record_failed_heal(self, replica_id: str, cause: str, moment: Moment) -> None:
        """Record that a heal has failed."""
        self._add(IncidentKind.HEAL_FAILED, cause, (replica_id,), moment)

    def record_difference(self, sentence: str, moment: Moment) -> None:
        """Record that a check has found the groups' states to differ."""
        self._add(IncidentKind.STATE_DIFFERS, sentence, (), moment)

    def record_accepted_loss(self, cause: str, moment: Moment) -> None:
        """Record that the job goes back behind its committed step."""
        self._add(IncidentKind.LOSS_ACCEPTED, cause, (), moment)

    def record_run_change(
        self, cause: str, nodes: tuple[str, ...], moment: Moment, *, is_over: bool
    ) -> None:
        """Record a change of the launched run with the job's name: a world, its end, or a pause,
        which is not over until the next world."""
        entry = next((each for each in self._open.values() if each.is_of_run), None)
        if entry is None:
            entry = self._add(IncidentKind.RUN_CHANGED, cause, nodes, moment)
        else:
            incident = entry.incident
            self._change(
                entry,
                cause=f"{incident.cause}; {cause}"[:MAX_CAUSE_LENGTH],
                groups=tuple(dict.fromkeys((*incident.groups, *nodes)))[:MAX_GROUPS_NAMED],
                decided_after_s=max(0.0, moment.at - incident.at),
            )
        entry.awaits_world = not is_over
        self._update(entry)

    def end(self, moment: Moment) -> None:
        """End all records: the last group of the job is gone."""
        self._explain_all(replace(moment, quorum_id=0))
        for entry in [each for each in self._open.values() if not each.is_of_run]:
            entry.awaits_quorum, entry.awaits_step, entry.is_slow = False, None, False
            entry.awaits_return, entry.awaits_heal = set(), set()
            self._update(entry)
        self.hung.clear()
        self.healing.clear()

    # -- the entries -----------------------------------------------------------------------------

    def _add(
        self,
        kind: IncidentKind,
        cause: str,
        groups: tuple[str, ...],
        moment: Moment,
        **anatomy: Any,
    ) -> _Entry:
        self._last_number += 1
        incident = Incident(
            number=self._last_number,
            job=self._job,
            kind=kind,
            cause=cause[:MAX_CAUSE_LENGTH],
            groups=groups[:MAX_GROUPS_NAMED],
            at=moment.at,
            quorum_id=moment.quorum_id,
            step=moment.step,
            **anatomy,
        )
        entry = self._entries[incident.number] = _Entry(incident)
        self._mark_changed(incident.number)
        if len(self._entries) > MAX_INCIDENTS:
            self.drop_oldest()
        return entry

    def drop_oldest(self) -> None:
        """Forget the oldest record."""
        number, entry = self._entries.popitem(last=False)
        self._close(entry)
        self._changed.pop(number, None)
        for replica_id in entry.incident.groups:
            for index in (self.hung, self.healing):
                if index.get(replica_id) == number:
                    del index[replica_id]

    def _update(self, entry: _Entry) -> None:
        """Make the record open or closed, as what it awaits says."""
        number = entry.incident.number
        if number not in self._entries:
            return
        if entry.is_open:
            self._open[number] = entry
            for replica_id in entry.incident.groups:
                self._open_about.setdefault(replica_id, {})[number] = entry
        else:
            self._close(entry)
        if entry.awaits_step is None:
            self._awaiting_step.pop(number, None)
        else:
            self._awaiting_step[number] = entry
        if entry.is_open is not entry.incident.is_open:
            self._change(entry, is_open=entry.is_open)

    def _close(self, entry: _Entry) -> None:
        """Remove the record from the indexes of those that are open."""
        number = entry.incident.number
        self._open.pop(number, None)
        self._awaiting_step.pop(number, None)
        for replica_id in entry.incident.groups:
            about = self._open_about.get(replica_id, {})
            about.pop(number, None)
            if not about:
                self._open_about.pop(replica_id, None)

    def _change(self, entry: _Entry, **fields: Any) -> None:
        entry.incident = replace(entry.incident, **fields)
        self._mark_changed(entry.incident.number)

    def _mark_changed(self, number: int) -> None:
        self._changed[number] = None
        self._dirty.add(self._job)

    def _find_open(self, replica_id: str, kinds: tuple[IncidentKind, ...]) -> _Entry | None:
        """The open record of one of these kinds about the group."""
        about = self._open_about.get(replica_id, {}).values()
        return next((each for each in about if each.incident.kind in kinds), None)


def _absence_cause(event: GroupEvent) -> str:
    cause = f"the lighthouse could not be reached for {event.lasts_s:.1f} s: {event.cause}"
    return cause[:MAX_CAUSE_LENGTH]


def _longest(known: float | None, reported: float | None) -> float | None:
    durations = [each for each in (known, reported) if each is not None]
    return max(durations, default=None)


def _kind_of(how: Leave) -> IncidentKind:
    if how.departure is Departure.KILLED:
        return IncidentKind.KILLED
    if how.departure is Departure.DRAINED:
        return IncidentKind.DRAINED
    return IncidentKind.LEFT if how.is_orderly else IncidentKind.LOST


class Ledgers:
    """The ledgers of all jobs of a lighthouse, of at most ``max_jobs``."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._ledgers: OrderedDict[str, JobLedger] = OrderedDict()  # the one used last at the end
        self._dirty: set[str] = set()

    def find(self, job: str) -> JobLedger | None:
        """The ledger of a job (None: nothing has happened to it)."""
        return self._ledgers.get(job)

    def all(self) -> list[JobLedger]:
        """The ledgers of all jobs, the one that was opened last at the end."""
        return list(self._ledgers.values())

    def open_ledger(self, job: str, at: float) -> JobLedger:
        """The ledger of a job that begins, or begins again."""
        ledger = self._ledgers.get(job)
        if ledger is None:
            ledger = self._ledgers[job] = JobLedger(job, at, self._dirty)
        self._ledgers.move_to_end(job)
        if len(self._ledgers) > self._max_jobs:
            self._ledgers.popitem(last=False)
        while sum(map(len, self._ledgers.values())) > MAX_INCIDENTS_OF_ALL:
            next(each for each in self._ledgers.values() if len(each)).drop_oldest()
        return ledger

    def pop_changed(self) -> list[Incident]:
        """The records of all jobs that are new or have changed since the last call."""
        if not self._dirty:
            return []
        dirty = sorted(self._dirty & self._ledgers.keys())
        self._dirty.clear()
        return [each for job in dirty for each in self._ledgers[job].pop_changed()]
