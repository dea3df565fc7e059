"""Decides about all jobs of a lighthouse: what it keeps of each, who gets which answer and news.

Inputs are method calls with ``now`` (monotonic seconds). A caller is a number of the owner's
choice, unique among the requests that wait. What follows from an input goes to `Outputs`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from torchft_svc.core.limits import MAX_NAME_LENGTH, check_name
from torchft_svc.core.pieces import Pieces, finish
from torchft_svc.core.quorum.activity import Activity, HangWatch, Phase
from torchft_svc.core.quorum.layout import layouts_differ, why_unlike
from torchft_svc.core.quorum.lighthouse.goodput import TimeAccounts
from torchft_svc.core.quorum.lighthouse.incidents import (
    Goodput,
    Incident,
    IncidentKind,
    JobLedger,
    Ledgers,
    Moment,
)
from torchft_svc.core.quorum.lighthouse.membership import (
    AWAITED_MEMBERS,
    GATHER_S,
    GroupState,
    Membership,
)
from torchft_svc.core.quorum.lighthouse.overview import (
    GoneGroup,
    History,
    JobSample,
    JobStatus,
    Pause,
    describe_in_pieces,
    name_some,
)
from torchft_svc.core.quorum.lighthouse.pace import Pace, PaceWatch
from torchft_svc.core.quorum.lighthouse.prepared_spares import (
    MAX_PREPARED_SPARES,
    PreparedSpares,
)
from torchft_svc.core.quorum.lighthouse.quorum import (
    Formed,
    Waiting,
    Why,
    absent_deadlines,
    can_lose_a_group,
    decide,
    has_loss_to_accept,
    joining,
    look_at,
    to_evict,
)
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.session_messages import (
    Departure,
    Drain,
    Kill,
    Leave,
    Lost,
    NewcomerWaits,
    News,
)
from torchft_svc.core.quorum.tally import GroupEvent, Tally
from torchft_svc.core.quorum.term import RunningTerm, TermEnds
from torchft_svc.core.quorum.types import (
    NO_QUORUM,
    DifferenceReport,
    LastQuorum,
    Member,
    Quorum,
    QuorumConfig,
)
from torchft_svc.errors import GroupDiffers, QuorumFailed, RequestRefused, TorchFTError

# Heartbeats per second from all groups of a job, 0.1 to 0.2 ms each, which is gRPC's. Above that,
# groups beat less often, but at least twice per heartbeat timeout.
MAX_BEATS_PER_SECOND = 400.0
MIN_BEATS_PER_TIMEOUT = 2.0
# How many jobs that have ended a status shows if none is named.
MAX_ENDED_SHOWN = 20
# A member needs to know that groups wait, and about how many. One loss makes it discard its step;
# the further ones are for members whose session broke just then. A thousand groups that come or die
# at once must not cause a million messages.
MAX_ANNOUNCED, MAX_ANNOUNCEMENTS = 100, 10_000
MAX_LOSSES_SENT = 4
# How long a member may wait inside a step before members without a session are dropped (rule E7).
# If their worker is dead, too, most backends notice that by themselves, and then the others ask.
MISSING_AFTER_S = 0.2
# Ids follow the clock. A reported id that nobody can have issued yet is refused: otherwise the job
# would run out of ids, and the next lighthouse would refuse its groups. Clocks differ, by up to 14
# hours with another time zone; a job that is new here may come from a lighthouse that was already
# ahead.
MAX_AHEAD_S, MAX_AHEAD_OF_NEW_JOB_S = 15 * 3600.0, 30 * 3600.0

# The reason of a loss if the group's last session ends, and no message has explained why.
_SESSION_ENDED = "its session ended"
# The command by which the prepared spares of a job end with it (rule G4).
_JOB_FINISHED = Drain("the job has finished")


# -- outputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportLoss:
    """Report that ``replica_id`` is no longer alive, because of ``reason``.

    ``between_steps``: it had finished its step, so its peers lose nothing. ``is_orderly``: it left
    on purpose. ``quorum_id``: the job's last quorum (0: none yet); the group may be in a later one
    again. ``recipients``: its peers in that quorum that are informed, and the group itself: if it
    was frozen and moves again, what it does is in vain.
    """

    job: str
    replica_id: str
    reason: str
    between_steps: bool = False
    is_orderly: bool = False
    quorum_id: int = field(default=0, compare=False)
    recipients: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class ReportHang:
    """Report once that ``replica_id`` has stayed in ``phase`` of ``step`` for ``for_s`` seconds.

    ``kill``: its processes are to be ended.
    """

    job: str
    replica_id: str
    phase: Phase
    step: int
    for_s: float
    kill: bool


@dataclass(frozen=True, slots=True)
class ReportPace:
    """Report once that ``replica_id`` has become slow, or is usual again after that, as ``cause``
    says. ``evict``: it is drained because of that."""

    job: str
    replica_id: str
    is_slow: bool
    cause: str
    evict: bool = False


@dataclass(frozen=True, slots=True)
class ReportEviction:
    """Report that quorum ``quorum_id`` continues without ``replica_id``, which lives, but hangs.

    ``recipients`` are informed, the group itself among them.
    """

    job: str
    replica_id: str
    reason: str
    quorum_id: int = field(default=0, compare=False)
    recipients: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class ReportStraggler:
    """Report that the next quorum is formed without ``replica_id``, which has not asked in time.

    ``quorum_id``: of its quorum, in which it may wait for others. ``recipients``: itself.
    """

    job: str
    replica_id: str
    quorum_id: int
    recipients: tuple[str, ...]
    reason: str = "it did not ask for the next quorum in time"


@dataclass(frozen=True, slots=True)
class ReportLeftHealing:
    """Report once that ``replica_id`` was left out after it has healed for ``for_s`` seconds."""

    job: str
    replica_id: str
    for_s: float


@dataclass(frozen=True, slots=True)
class ReportPlaceTaken:
    """Report that prepared spare ``replica_id`` takes a free place of ``num_places``."""

    job: str
    replica_id: str
    num_places: int


@dataclass(frozen=True, slots=True)
class ReportPlaceReturned:
    """Report that former spare ``replica_id`` stands by again: all members of the last quorum are
    lost, and it has not got their state."""

    job: str
    replica_id: str


JobReport = (
    ReportLoss
    | ReportHang
    | ReportPace
    | ReportEviction
    | ReportStraggler
    | ReportLeftHealing
    | ReportPlaceTaken
    | ReportPlaceReturned
)


class Outputs(Protocol):
    """The receiver of what follows from an input of `Jobs`, in the order of these calls."""

    def send(self, job: str, replica_ids: Iterable[str], news: News, /) -> None:
        """Send ``news`` to these groups, as far as they have a session."""

    def publish(
        self,
        job: str,
        callers: tuple[int, ...],
        quorum: Quorum,
        lost_from: int | None,
        begins_anew: bool,
        /,
    ) -> None:
        """Answer ``callers``, one for each member, in member order; see `lighthouse.Publish`."""

    def refuse(self, caller: int, error: TorchFTError, /) -> None:
        """Answer ``caller`` with an error."""

    def await_quorum(self, caller: int, now: float, /) -> None:
        """Count ``caller``, which has waited for a place, among those that wait for a quorum."""

    def await_place(self, caller: int, /) -> None:
        """Count ``caller``, which has waited for a quorum, among those that wait for a place."""

    def report(self, report: JobReport, /) -> None:
        """Log ``report``."""


# -- what is kept of a job -------------------------------------------------------------------------


class Announcements:
    """Counts the news of newcomers and losses that the members of one quorum receive (rule Q22)."""

    def __init__(self) -> None:
        self._newcomers: set[str] = set()
        self._num_losses = 0

    def add_newcomers(self, waiting: Iterable[str], num_members: int) -> list[str]:
        """The newcomers to announce to ``num_members`` members: each once, and only the first
        ones of a crowd."""
        fresh = [key for key in waiting if key not in self._newcomers]
        limit = min(MAX_ANNOUNCED, max(1, MAX_ANNOUNCEMENTS // num_members))
        del fresh[max(0, limit - len(self._newcomers)) :]
        self._newcomers.update(fresh)
        return fresh

    def add_loss(self) -> bool:
        """Count another loss; whether it is announced."""
        self._num_losses += 1
        return self._num_losses <= MAX_LOSSES_SENT

    def forget_group(self, replica_id: str) -> None:
        """Forget a group that is gone."""
        self._newcomers.discard(replica_id)


class Likeness:
    """Decides whether a group is like the others of its job (rule Q21).

    The workers of one rank reduce together, so all groups need as many workers, and equal layouts.
    A group that reports nothing (the public release) is not compared. A group that trains may
    change its layout, as all do in the same step of their program; so it is compared only with
    groups that ask for the same step, and a newcomer with all.
    """

    def __init__(self) -> None:
        self._accepted = (0, "")  # of the last group that was compared; most report the same

    def check(self, asker: Member, members: Membership) -> list[Member]:
        """The waiting newcomers that must not continue, because ``asker``, which trains, differs
        from them.

        A group with the name of ``asker`` does not count: it is about to be replaced.

        Raises: GroupDiffers: ``asker`` differs from a group that trains; or from any that asks,
        and is a newcomer itself.
        """
        reported = (asker.world_size, asker.layout)
        if reported == self._accepted:
            return []
        trains = members.is_member(asker.replica_id)
        asking = {other.replica_id for other in members.asking()}
        misfits = []
        for other in _others(asker, members):
            _check_size(asker, other)
            if not layouts_differ(asker, other):
                continue
            if trains and not members.is_member(other.replica_id):
                misfits.append(other)
            elif not trains or other.replica_id in asking:
                raise GroupDiffers(why_unlike(asker, other))
        self._accepted = reported
        return misfits


def _others(asker: Member, members: Membership) -> Iterator[Member]:
    """The living groups that ask or train, without those that have the name of ``asker``."""
    last = members.previous.participants if members.previous else ()
    asking = members.asking()
    newer = {other.replica_id for other in asking}
    for other in (*asking, *(each for each in last if each.replica_id not in newer)):
        is_rival = stable_name(other.replica_id) != stable_name(asker.replica_id)
        if is_rival and members.knows(other.replica_id):
            yield other


def _check_size(asker: Member, other: Member) -> None:
    if 0 not in (asker.world_size, other.world_size) and asker.world_size != other.world_size:
        raise GroupDiffers(
            f"{asker.replica_id!r} has a group world size of {asker.world_size}, "
            f"{other.replica_id!r} of {other.world_size}: all groups of a job need the "
            "same; start this one with as many workers, or as another job"
        )


@dataclass(slots=True)
class Job:
    """A job with living groups, and the term of its last quorum."""

    name: str
    members: Membership
    hangs: HangWatch
    history: History
    ledger: JobLedger
    accounts: TimeAccounts
    paces: PaceWatch
    #: The id of the last quorum.
    last_id: int
    likeness: Likeness = field(default_factory=Likeness)
    #: The highest id that a group has reported, maybe of a quorum of another lighthouse.
    reported_id: int = 0
    #: The last quorum whose members were informed that they have to leave it.
    spent_id: int = 0
    #: Living groups that were ordered to end, by an operator or because they are slow, and when: an
    #: order may be lost with its session, so the next one begins with it (rule Q27).
    commands: dict[str, tuple[Kill | Drain, float]] = field(default_factory=dict)
    #: Requests of groups whose name an earlier incarnation, which lives, still holds.
    held: dict[str, tuple[Member, int]] = field(default_factory=dict)
    announcements: Announcements = field(default_factory=Announcements)
    term: RunningTerm = field(default_factory=RunningTerm)
    #: Members whose session has ended without a `Leave`, and since when (rule E7).
    silent: dict[str, float] = field(default_factory=dict)
    #: Members that have left in good order: no heartbeat without a session, which may be late,
    #: brings them back before this time (rule Q8).
    left: dict[str, float] = field(default_factory=dict)
    #: A slow group that is being drained (rule Q26).
    evicting: str | None = None
    #: No other one is before this time: the others need it to show how fast they are now.
    next_eviction_at: float = -math.inf
    #: Living groups that were prepared spares.
    former_spares: set[str] = field(default_factory=set)
    #: Prepared spares whose session has ended without a `Leave`, and until when: if the job has
    #: finished before, they have to end when they are back (rule G4).
    away_spares: dict[str, float] = field(default_factory=dict)

    def num_free_places(self) -> int:
        """How many prepared spares may join now (rule G2).

        A living group that has asked once keeps its place, also while it is left out. Spares alone
        begin nothing: they may have no state.
        """
        members = self.members
        if not any(map(members.knows, members.previous_ids)):
            return 0
        return max(0, self.history.num_places - members.num_have_asked)

    def is_for_spares_alone(self, formed: Formed) -> bool:
        """Whether former spares would take the job back to what they have (rule G2).

        Those that have healed are at the job's step. Nobody who trained lives.
        """
        if formed.lost_from is None or not self.former_spares:
            return False
        ids = {each.replica_id for each in formed.members}
        living = filter(self.members.knows, self.members.previous_ids)
        return self.former_spares.issuperset(ids) and ids.issuperset(living)

    def record_places(self, quorum: Quorum) -> None:
        """Record how many places the job has, by a quorum that is published."""
        former = self.former_spares
        num_former = sum(each.replica_id in former for each in quorum.participants) if former else 0
        self.history.record_places(len(quorum.participants) - num_former)

    def record_quorum_id(self, reported_id: int) -> None:
        """Record an id that a group reports: the next quorum has a higher one."""
        self.reported_id = max(self.reported_id, reported_id)

    @property
    def highest_id(self) -> int:
        """The highest id that is known, published here or reported."""
        return max(self.last_id, self.reported_id)

    @property
    def is_id_spent(self) -> bool:
        """Whether members have to leave the last quorum, so that the next one has another id."""
        return self.last_id == self.spent_id

    def may_keep_id(self, members: Sequence[Member]) -> bool:
        """Whether the next quorum, of ``members``, has the id of the last one (rule Q6)."""
        previous = self.members.previous
        return (
            previous is not None
            and self.reported_id <= self.last_id
            and not self.is_id_spent
            and [each.place for each in members] == [each.place for each in previous.participants]
            and not any(each.commit_failures for each in members)
        )

    def record_last_quorum(
        self, replica_id: str, last: LastQuorum, num_groups: int, now: float
    ) -> None:
        """Record the ``last`` quorum that a group was in, of ``num_groups`` (0: not known)."""
        known_id = self.members.last.quorum_id
        self.members.reported(replica_id, last)
        if self.members.last.quorum_id != known_id:
            # What was known, and announced, is about an earlier quorum.
            self.term, self.announcements = RunningTerm(), Announcements()
        if last.quorum_id == self.members.last.quorum_id:
            self.term.reported_at = min(self.term.reported_at, now)
            self.term.num_groups = max(self.term.num_groups, num_groups)
            if self.members.previous is None:
                self.history.record_places(num_groups)

    def rivals(self) -> Set[str]:
        """The living groups that may train on beside the last quorum (rule Q12): in a newer one of
        elsewhere or, before the first quorum here, in an older one, and these do not ask."""
        if self.members.previous is not None:
            return self.members.ahead
        return set(self.members.stragglers()) - self.members.previous_ids

    def end_for_rivals(self) -> TermEnds:
        """The news that ends a term whose members have to ask, because there are `rivals`: both
        cannot train on beside each other."""
        is_first = self.members.previous is None
        where = "an older quorum" if is_first else "a newer quorum elsewhere"
        why = f"{name_some(sorted(self.rivals()))} trained on in {where}"
        return TermEnds(self.members.last.quorum_id, None, why)

    def record_reached(self, replica_id: str, activity: Activity) -> None:
        """A member of the last quorum reports how far it is; one that waited for the quorum is not
        in it yet. What it has reached it has committed, also if it goes back to a checkpoint."""
        reached = self.term.reached
        if activity.phase is not Phase.QUORUM or self._waits_in_step(activity):
            reached[replica_id] = max(reached.get(replica_id, 0), activity.reached)

    def record_progress(self) -> None:
        """Record the step that all members of the last quorum have reached in it (rule E5).

        Called before a member that asks, or is gone, is recorded as such. At a new lighthouse the
        members that are not back yet may be a step behind the others.
        """
        if self.term.may_go_on and not self.term.is_recorded:
            reached = [self.term.reached.get(each, 0) for each in self.members.previous_ids]
            may_be_ahead = self.members.previous is None
            step = min(reached, default=0) - may_be_ahead
            self.members.last = self.members.last.reached(step)

    def end_progress(self) -> None:
        """Record the progress for the last time: a member asks, or is gone, and commits no more."""
        self.record_progress()
        self.term.is_recorded = True

    def end_term_for_request(self, member: Member, *, agreed: bool) -> tuple[str, ...]:
        """A member of the last quorum asks; returns the others that do not know yet that they have
        to ask, too."""
        is_asking = self.members.state(member.replica_id) is GroupState.ASKING
        if not (is_asking and member.steady) or not self.term.ends_with(member.step, agreed=agreed):
            return ()
        self.spent_id = self.last_id
        return tuple(key for key in self.members.quorum_left() if key != member.replica_id)

    def may_return(self, replica_id: str) -> bool:
        """Whether a group whose session has ended without a `Leave` stays a member (rule E7): its
        steps need no manager, and nobody waits for it."""
        members = self.members
        return (
            self.term.may_go_on
            and self.term.over_from is None
            and replica_id in members.previous_ids
            and not self.is_killed(replica_id)
            and members.state(replica_id) is GroupState.AWAITED
            and not members.groups[GroupState.ASKING]
            and len(members.quorum_left()) > 1
        )

    def waits_for_silent(self, activity: Activity, now: float) -> bool:
        """Whether a member that waits for others in a step, as it reports now, may wait for one
        whose session has ended."""
        if not self.silent or not self._waits_in_step(activity):
            return False
        return now - max(activity.since, *self.silent.values()) >= MISSING_AFTER_S

    def waits_for_unreported(
        self, activity: Activity, heartbeat_timeout_s: float, now: float
    ) -> bool:
        """Whether a member that waits for others in a step, as it reports now, may wait for one
        that has not reported the quorum to this lighthouse in time (rule E8)."""
        members, term = self.members, self.term
        if members.previous is not None or term.num_groups <= members.num_reported:
            return False
        if term.over_from is not None or not self._waits_in_step(activity):
            return False
        # One that asks may be that member: it has not received the answer.
        patience_s = GATHER_S if members.groups[GroupState.JOINING] else heartbeat_timeout_s
        return now - activity.since >= MISSING_AFTER_S and now - term.reported_at >= patience_s

    def _waits_in_step(self, activity: Activity) -> bool:
        """Whether a member waits for others in a step; before its quorum was formed it waited for
        that."""
        return activity.phase is Phase.QUORUM and activity.since > self.term.formed_at

    def record_wait(self, member: Member, join_timeout_s: float) -> None:
        """A member asks: how long it has waited in this step already, for example until its sum
        timed out, counts for those that have not begun it (rule E6)."""
        doing, term = self.hangs.activity(member.replica_id), self.term
        if doing is not None and doing.step == member.step and self._waits_in_step(doing):
            term.last_look_at = min(term.last_look_at, doing.since + join_timeout_s)

    def stalled_step(self, join_timeout_s: float, now: float) -> tuple[int | None, float]:
        """The step in which members have waited for the others for too long (None: there is none),
        and since when that is so (-inf: some have asked, and the term is over anyway)."""
        term = self.term
        if not term.is_due(now):
            return None, math.inf
        if term.over_from is not None:
            return term.over_from, -math.inf
        doing = [self.hangs.activity(each) for each in self.members.quorum_left()]
        waiting = [each for each in doing if each is not None and self._waits_in_step(each)]
        overdue = [each for each in waiting if now - each.since >= join_timeout_s]
        if overdue:
            step = max(each.step for each in overdue)
            since = min(each.since for each in overdue if each.step == step)
            return step, since + join_timeout_s
        term.look_at = math.inf
        first = min((each.since for each in waiting), default=math.inf)
        term.record_wait(first, join_timeout_s, now)
        return None, math.inf

    def late_in_term(self, step: int, due_at: float) -> list[str]:
        """The members that keep others from ``step`` of the term, because they have not begun it
        (rule E6).

        What a member does is not known if it is silent, or has reported nothing since ``due_at``:
        at short timeouts it may have gone on since, and so may the others.
        """
        left, hangs = self.members.quorum_left(), self.hangs
        known = [
            each for each in left if each not in self.silent and hangs.reported_at(each) >= due_at
        ]
        doing = {each: self.hangs.activity(each) for each in known}
        late = sorted(
            key for key, each in doing.items() if each is not None and not each.has_begun(step)
        )
        return [key for key in late if self.members.state(key) in AWAITED_MEMBERS]

    def leave_out_late(self, late: Sequence[str]) -> None:
        """These members have not begun a step of the term in time: nobody waits for them."""
        self.members.left_out(late)

    def left_behind(self) -> list[ReportStraggler]:
        """The stragglers of the last quorum, without which the next one is formed (rule Q4).

        A straggler that has reported no activity is informed only before the first quorum here, or
        if it reports a newer quorum.
        """
        members, is_first = self.members, self.members.previous is None
        quorum_id = max(members.last.quorum_id, self.reported_id if members.ahead else 0)
        behind = []
        for key in members.stragglers():
            doing = self.hangs.activity(key)
            # One that heals is not in a collective, and joins with what it has by then.
            heals = doing is not None and doing.phase is Phase.HEALING
            if not heals and (doing or is_first or key in members.ahead):
                behind.append(ReportStraggler(self.name, key, quorum_id, recipients=(key,)))
        return behind

    def record_leave(self, replica_id: str, leave: Leave, until: float) -> None:
        """Record that a member has left in good order, to ignore its late heartbeats ``until``."""
        if leave.is_orderly and self.members.is_member(replica_id):
            self.left[replica_id] = until

    def record_spare_away(self, replica_id: str, until: float, now: float) -> None:
        """Record that the session of a prepared spare has ended without a `Leave`."""
        away = [(each, at) for each, at in self.away_spares.items() if at > now]
        self.away_spares = dict([*away, (replica_id, until)][-MAX_PREPARED_SPARES:])

    def how_it_ended(self, replica_id: str, how: Leave) -> Leave:
        """How a group has ended: ``how``, or on purpose if an operator has killed it."""
        if not self.is_killed(replica_id):
            return how
        command, _ = self.commands[replica_id]
        reason, killed = f"killed: {command.reason}", Departure.KILLED
        return Leave(reason, how.between_steps, ends=True, departure=killed)

    def is_killed(self, replica_id: str) -> bool:
        """Whether an operator has killed a group, which is not gone yet."""
        command, _ = self.commands.get(replica_id, (None, 0.0))
        return isinstance(command, Kill)

    def forget_group(self, replica_id: str) -> int | None:
        """Forget a group that is gone; returns the caller that waited for it, if any."""
        self.commands.pop(replica_id, None)
        self.hangs.forget_group(replica_id)
        self.paces.forget_group(replica_id)
        if replica_id == self.evicting:
            self.evicting = None
        self.announcements.forget_group(replica_id)
        self.former_spares.discard(replica_id)
        self.silent.pop(replica_id, None)
        self.term.reached.pop(replica_id, None)
        return self.members.gone(replica_id)

    def loss_recipients(self, replica_id: str, reason: str) -> tuple[str, ...]:
        """The groups to inform of this loss, if it was in the last quorum: itself and, unless
        they were informed of enough others, its living peers there."""
        if replica_id not in self.members.previous_ids:
            return ()
        if not self.announcements.add_loss():
            return (replica_id,)
        others = [key for key in self.members.quorum_left() if key != replica_id]
        if others:
            self.term.over_from = 0  # they are informed: no question of theirs is news for others
            self.term.lost[replica_id] = reason
            self.spent_id = self.last_id
        return (replica_id, *others)

    def newcomers_to_announce(self, asked: Iterable[str]) -> list[str]:
        """The groups of ``asked`` that still wait to join the last quorum, and were not
        announced to it."""
        if not self.members.previous_ids:
            return []
        waiting = [key for key in asked if self.members.state(key) is GroupState.JOINING]
        return self.announcements.add_newcomers(waiting, len(self.members.previous_ids))


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job without a living group, since ``at``: so a restart is not taken for a start.

    ``last_id``: the highest id that was issued, or reported. ``is_finished``: every group of its
    last quorum ended on purpose, so the next run is another one; ``spares`` stood by then, and have
    to end, too. ``left``: see `Job.left`.
    """

    last: LastQuorum
    last_id: int
    history: History
    accounts: TimeAccounts
    at: float
    is_finished: bool = False
    spares: frozenset[str] = frozenset()
    left: dict[str, float] = field(default_factory=dict)


class QuorumIds:
    """Which quorum ids a lighthouse issues, and which reported ids it believes (rule Q6).

    ``first`` must be above any id of an earlier lighthouse. Ids grow by ``stride``; lighthouses
    with other remainders issue other ids. ``per_s``: by how much the first id of a lighthouse is
    higher for each second that it starts after ``now``.
    """

    def __init__(self, first: int, stride: int, per_s: float, now: float) -> None:
        self.first = first  # of jobs that nothing is known of
        self._base, self._per_s, self._began_at = first, per_s, now
        self._stride, self._remainder = stride, first % stride

    def next_id(self, known: int) -> int:
        """The lowest id of this lighthouse above ``known``."""
        return known + self._stride - (known - self._remainder) % self._stride

    def check_reported(self, reported: int, known: int, now: float, *, is_running: bool) -> None:
        """Refuse an id that cannot have been issued.

        ``known``: the highest id of its job; ``is_running``: the job has a quorum here.
        """
        is_clock_unset = self._base < self._stride  # it shows a time before all ids
        if reported <= max(self._base, known) or is_clock_unset:
            return
        ahead_s = (reported - self._base) / self._per_s - (now - self._began_at)
        if ahead_s > (MAX_AHEAD_S if is_running else MAX_AHEAD_OF_NEW_JOB_S):
            raise RequestRefused(
                f"quorum {reported}, which a group reported, was never issued: it is "
                f"{ahead_s / 3600:.0f} h ahead of this lighthouse's clock; set the clocks, and "
                "restart that group"
            )

    def forget_job(self, last: int, now: float) -> None:
        """Forget a job whose last id was ``last``, and which may start again.

        Issued ids are below the clock; a reported one may not be, and must not move the ids of
        other jobs.
        """
        clock_id = self._base + int(self._per_s * (now - self._began_at))
        self.first = max(self.first, min(last, clock_id))


# -- the machine -----------------------------------------------------------------------------------


class Jobs:
    """All jobs of one lighthouse; for the ids of their quorums see `QuorumIds`."""

    def __init__(
        self,
        config: QuorumConfig,
        outputs: Outputs,
        first_id: int = 0,
        id_stride: int = 1,
        *,
        ids_per_s: float = 1000.0,
        now: float = 0.0,
        unix_s: Callable[[float], float] = float,
        ledgers: Ledgers | None = None,
    ) -> None:
        """``unix_s`` makes unix seconds of ``now``, for the ``ledgers``."""
        self._config = config
        self._unix_s = unix_s
        self.ledgers = ledgers or Ledgers(config.max_jobs)
        self._outputs = outputs
        self._ids = QuorumIds(first_id, id_stride, ids_per_s, now)
        self._began_at = now
        self._jobs: dict[str, Job] = {}
        self._ended: OrderedDict[str, EndedJob] = OrderedDict()
        self._spares: dict[str, PreparedSpares] = {}  # by job, also of one without living groups
        self._fills_places = False
        self._wake_at: float | None = None

    # -- inputs ----------------------------------------------------------------------------------

    def request(
        self, job_name: str, member: Member, caller: int, now: float, *, agreed: bool = False
    ) -> None:
        """Record that ``caller`` waits for a quorum with ``member``; ``agreed``: see `Question`.

        Raises: RequestRefused: this group cannot be in a quorum of the job; nobody waits.
        """
        member.check()
        self._check_weight(job_name, member)
        if self.holds_spare(job_name, member):
            self._hold_spare(job_name, member, caller, now)
            return
        if self._is_standing_by(job_name, member.replica_id):
            self._forget_spare(job_name, member.replica_id)  # it trains, and its manager is new
        job = self._job(job_name, member.replica_id, now, member.seen_quorum_id)
        misfits = job.likeness.check(member, job.members)
        self._refuse_later_owners(job, member.replica_id)
        self._refuse_unlike(job, misfits, member, now)
        job.members.seen(member.replica_id, now)
        if member.replica_id in job.members.previous_ids:
            job.end_progress()
            job.record_wait(member, self._config.join_timeout_s)
            self._remove_silent(job, now, agreed=agreed)
        job.hangs.record_activity(member.replica_id, Activity(Phase.QUORUM, member.step, now), now)
        if not job.members.names.is_free_for(member.replica_id):
            self._hold_request(job, member, caller)
        else:
            self._record_request(job, member, caller, now, agreed=agreed)
        self._handle_hangs(job, now, (member.replica_id,))
        self._settle_job(job, now, asked=[member.replica_id])

    def withdraw(self, job_name: str, caller: int, now: float) -> None:
        """Record that ``caller`` waits no longer (cancelled, or its deadline is over)."""
        spares = self._spares.get(job_name)
        if spares is not None and spares.withdraw(caller):
            return
        job = self._jobs.get(job_name)
        if job is None:
            return
        job.members.withdrew(caller, now)
        for key in [key for key, held in job.held.items() if held[1] == caller]:
            del job.held[key]
        self._settle_job(job, now)

    def opened(
        self, job_name: str, replica_id: str, last: LastQuorum, now: float, *, num_groups: int = 0
    ) -> None:
        """A session begins, with the ``last`` quorum that the group was in, of ``num_groups``.

        Raises: RequestRefused: there can be no such group, or quorum.
        """
        check_name("replica_id", replica_id)
        last.check()
        job = self._job(job_name, replica_id, now, last.quorum_id)
        self._refuse_later_owners(job, replica_id)
        if job.silent.keys() & set(job.members.names.earlier(replica_id)):
            self._remove_silent(job, now)  # it will not be back: this is the next incarnation
        job.members.seen(replica_id, now)
        job.record_last_quorum(replica_id, last, num_groups, now)
        if job.term.may_go_on and job.rivals() == {replica_id}:
            self._outputs.send(job_name, job.members.quorum_left(), job.end_for_rivals())
        self._settle_job(job, now)

    def opened_by_spare(self, job_name: str, replica_id: str, now: float) -> None:
        """The session of a prepared spare begins: it is in no quorum before a place is free.

        Raises: RequestRefused: there can be no such group, or there are too many.
        """
        check_name("replica_id", replica_id)
        check_name("job", job_name)
        spares = self._spares.get(job_name) or PreparedSpares(self._config.heartbeat_timeout_s)
        if not spares and len(self._spares) >= self._config.max_jobs:
            raise RequestRefused(
                f"this lighthouse already has prepared spares of {len(self._spares)} jobs, its "
                "limit (--max-jobs)"
            )
        if spares.is_full and replica_id not in spares:
            raise RequestRefused(
                f"job {job_name!r} has {MAX_PREPARED_SPARES} prepared spares, which is the limit"
            )
        spares.add(replica_id, now)
        self._spares[job_name] = spares
        if job_name in self._jobs:
            self._jobs[job_name].away_spares.pop(replica_id, None)

    def heartbeat(
        self, job_name: str, replica_id: str, now: float, activity: Activity | None = None
    ) -> None:
        """A sign of life without a request, with the group's ``activity`` if it reports that.

        Raises: RequestRefused: there can be no such group.
        """
        check_name("replica_id", replica_id)
        if self._is_standing_by(job_name, replica_id):
            if self._spares[job_name].record_sign(replica_id, now) and job_name in self._jobs:
                self._fill_places(self._jobs[job_name], now)
            return
        if self._has_left(job_name, replica_id, now):
            return
        job = self._job(job_name, replica_id, now)
        is_new = not job.members.knows(replica_id)
        has_changed = self._refuse_later_owners(job, replica_id)
        job.members.seen(replica_id, now)
        if activity is not None:
            has_changed |= self._record_activity(job, replica_id, activity, now)
        if is_new or has_changed:
            self._settle_job(job, now)

    def _has_left(self, job_name: str, replica_id: str, now: float) -> bool:
        """Whether a heartbeat is a late one, of a group that has left (rule Q8)."""
        job, ended = self._jobs.get(job_name), self._ended.get(job_name)
        left = job.left if job else ended.left if ended else {}
        is_known = job is not None and job.members.knows(replica_id)
        return not is_known and now < left.get(replica_id, -math.inf)

    def record_difference(
        self, job_name: str, replica_id: str, report: DifferenceReport, now: float
    ) -> None:
        """Count a check that has found a difference, if a living group reports it."""
        job = self._jobs.get(job_name)
        if job is None or not job.members.knows(replica_id):
            return
        if job.history.record_difference(report):
            moment = Moment(self._unix_s(now), report.quorum_id, report.step)
            job.ledger.record_difference(report.sentence, moment)

    def record_report(
        self,
        job_name: str,
        replica_id: str,
        tally: Tally | None,
        events: Iterable[GroupEvent],
        now: float,
    ) -> None:
        """Record what a living group's time was spent on, and what has happened to it."""
        job = self._jobs.get(job_name)
        if job is None or not job.members.knows(replica_id):
            return
        at = self._unix_s(now)
        if tally is not None:
            job.accounts.record_tally(replica_id, tally, at - tally.ago_s)
            if tally.step_times is not None:
                job.paces.record_times(replica_id, tally.step_times)
                if job.paces.is_due(now):
                    self._handle_paces(job, now)
        for event in events:
            moment = replace(self._moment(job, now), at=at - event.ago_s)
            for each in job.ledger.record_event(replica_id, event, moment):
                job.accounts.exonerate(each)

    def leave(self, job_name: str, replica_id: str, leave: Leave, now: float) -> None:
        """Remove a group that has left: its heartbeat timeout need not pass."""
        if self._is_standing_by(job_name, replica_id):
            caller = self._forget_spare(job_name, replica_id)
            if caller is not None:
                self._outputs.refuse(caller, QuorumFailed(f"{replica_id!r} is out: {leave.reason}"))
            return
        job = self._jobs.get(job_name)
        if job is None or not job.members.knows(replica_id):
            return
        job.record_leave(replica_id, leave, until=now + self._config.heartbeat_timeout_s)
        self._remove(job, replica_id, leave, now)
        self._settle_job(job, now)

    def went_silent(self, job_name: str, replica_id: str, now: float) -> None:
        """Record that a group's session has ended without a `Leave`: in a term it stays a member
        while nobody waits for it (rule E7), otherwise it is gone."""
        job = self._jobs.get(job_name)
        if job is not None and self._is_standing_by(job_name, replica_id):
            job.record_spare_away(replica_id, now + self._config.heartbeat_timeout_s, now)
        if job is None or not job.may_return(replica_id):
            self.leave(job_name, replica_id, Leave(_SESSION_ENDED), now)
        else:
            job.silent[replica_id] = now

    def commanded(self, job_name: str, replica_id: str, command: Kill | Drain, now: float) -> None:
        """Record that an operator ends a living group. One that is killed ends on purpose, however
        it ends.

        Raises: RequestRefused: another group is evicted just now, and too few would remain.
        """
        if self._is_standing_by(job_name, replica_id):
            return
        job = self._jobs[job_name]
        if isinstance(command, Drain) and job.evicting not in (None, replica_id):
            self._check_evicting(job, replica_id)
        if isinstance(command, Kill) or not job.is_killed(replica_id):
            job.commands[replica_id] = command, now

    def _check_evicting(self, job: Job, replica_id: str) -> None:
        """Refuse to drain a group if its job cannot lose it beside the one that it evicts (Q26)."""
        may_end = (job.commands.keys() | job.silent.keys()) - {replica_id}
        if not can_lose_a_group(job.members, may_end):
            raise RequestRefused(
                f"{job.evicting!r} is being evicted because it is slow, and without "
                f"{replica_id!r} too few groups would remain: drain it when that one is back"
            )

    def accept_loss(self, job_name: str, now: float) -> None:
        """Let the next quorum through although it loses committed steps, as an operator wants.

        Forgotten when a group with the newer state asks.

        Raises: RequestRefused: no quorum of this job is held back for that reason, or a group that
        may have those steps is still awaited.
        """
        check_name("job", job_name)
        job = self._jobs.get(job_name)
        if job is None or not has_loss_to_accept(job.members.view(now), self._config, now):
            raise RequestRefused(
                f"job {job_name!r} has no loss to accept: {self.why(job_name, now)}; only a quorum "
                "that is held back because it would lose committed steps can be let through"
            )
        job.members.accept_loss()
        self._settle_job(job, now)

    def tick(self, now: float) -> None:
        """Draw conclusions from the time; call it at `next_deadline`, or more often."""
        self._wake_at = None
        for job in list(self._jobs.values()):
            silent = Leave(f"no sign of life for {self._config.heartbeat_timeout_s:g} s")
            for replica_id in job.members.dead(now):
                self._remove(job, replica_id, silent, now)
            self._handle_hangs(job, now)
            self._end_stalled_term(job, now)
            self._settle_job(job, now)

    # -- questions -------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """The time at which `tick` has something to do; may be too early, never too late."""
        return self._wake_at

    def pause(self, job_name: str, now: float) -> Pause:
        """Why the groups of a job that ask have no quorum yet; changes nothing."""
        job = self._jobs.get(job_name)
        if job is None:
            return Pause(Waiting(Why.NOBODY_ASKS), now)
        held = {key: tuple(job.members.names.earlier(key)) for key in job.held}
        return Pause(decide(job.members.view(now), self._config, now), now, held)

    def why(self, job_name: str, now: float) -> str:
        """The sentence of `pause`."""
        return self.pause(job_name, now).sentence()

    def status(self, job_name: str, now: float, *, with_paces: bool = True) -> list[JobStatus]:
        """All jobs that have living groups, and the last that have ended; or the one that is named.

        Comparing the groups' paces is half of what it costs.

        Raises:
            RequestRefused: there is no such job.
        """
        return finish(self.status_in_pieces(job_name, now, with_paces=with_paces))

    def status_in_pieces(
        self, job_name: str, now: float, *, with_paces: bool = True
    ) -> Pieces[list[JobStatus]]:
        """See `status`, and `describe_in_pieces`; ``now`` is the instant of the first piece."""
        found = []
        for name in self._shown_names(job_name):
            if name in self._jobs or name in self._spares or name in self._ended:
                found.append((yield from self._describe(name, now, with_paces=with_paces)))
                yield
        return found

    def _shown_names(self, job_name: str = "") -> list[str]:
        """The jobs that `status` shows."""
        known = self._jobs.keys() | self._spares.keys()
        if job_name and not (job_name in known or job_name in self._ended):
            shown = job_name[:MAX_NAME_LENGTH]
            raise RequestRefused(f"this lighthouse serves no job {shown!r} now")
        ended = [name for name, each in self._ended.items() if each.last.quorum_id]
        shown_ended = [name for name in ended[-MAX_ENDED_SHOWN:][::-1] if name not in known]
        return [job_name] if job_name else [*sorted(known), *shown_ended]

    def samples_in_pieces(self, now: float) -> Pieces[dict[str, JobSample | None]]:
        """A sample of each job that `status` shows (None: it has ended), one at a time."""
        found = {}
        for name in self._shown_names():
            found[name] = self._sample(name, now)
            yield
        return found

    def _sample(self, job_name: str, now: float) -> JobSample | None:
        job = self._jobs.get(job_name)
        if job is None:
            stands_by = job_name in self._spares and job_name not in self._ended
            return JobSample() if stands_by else None
        job.record_progress()
        members = job.members
        return JobSample(
            committed_step=members.committed_step,
            num_groups=len(members),
            num_in_quorum=len(members.quorum_left()),
            num_heals=job.history.num_heals,
            num_discarded=job.history.num_discarded,
            goodput=self.goodput(job_name, now),
        )

    def paces(self, job_name: str, replica_ids: Iterable[str]) -> dict[str, tuple[Pace, ...]]:
        """The paces of those of these groups that are known; empty if there is no such job."""
        job = self._jobs.get(job_name)
        return job.paces.paces(job.members.previous_ids, replica_ids) if job else {}

    def incidents(self, job_name: str, after: int = 0) -> list[Incident]:
        """The records of a job, or of a launched run, with numbers above ``after``, the oldest
        first.

        Raises:
            RequestRefused: nothing is known of it.
        """
        ledger = self.ledgers.find(job_name)
        if ledger is None:
            shown = job_name[:MAX_NAME_LENGTH]
            raise RequestRefused(f"this lighthouse has no records of a job {shown!r}")
        return ledger.incidents(after)

    def goodput(self, job_name: str, now: float) -> Goodput:
        """How much of a job's time ended in committed steps.

        Raises:
            RequestRefused: there is no such job.
        """
        job = self._jobs.get(job_name)
        if job is None:
            if job_name not in self._ended:
                shown = job_name[:MAX_NAME_LENGTH]
                raise RequestRefused(f"this lighthouse serves no job {shown!r} now")
            return self._ended[job_name].accounts.goodput(self._unix_s(now))
        groups = job.members.groups
        joins = groups[GroupState.JOINING] and not job.members.quorum_left()
        waits = bool(groups[GroupState.ASKING] or joins)
        return job.accounts.goodput(self._unix_s(now), waits=waits, hangs=bool(job.ledger.hung))

    def _describe(self, job_name: str, now: float, *, with_paces: bool) -> Pieces[JobStatus]:
        """The status of a job that is living, or remembered."""
        spares = self._spares.get(job_name)
        standing_by = spares.describe(now) if spares else ()
        if job_name not in self._jobs and job_name not in self._ended:
            num_needed = self._config.min_replicas
            return JobStatus(job=job_name, min_replicas=num_needed, prepared_spares=standing_by)
        goodput = self.goodput(job_name, now)
        status = yield from self._describe_groups(job_name, now, with_paces=with_paces)
        return replace(status, goodput=goodput, prepared_spares=standing_by)

    def _describe_groups(self, job_name: str, now: float, *, with_paces: bool) -> Pieces[JobStatus]:
        if job_name in self._ended:
            ended = self._ended[job_name]
            status = JobStatus(
                job=job_name,
                quorum_id=ended.last.quorum_id,
                committed_step=ended.last.max_step,
                min_replicas=self._config.min_replicas,
                ended_s=now - ended.at,
                finished=ended.is_finished,
            )
            return ended.history.add_to(status, now)
        job, why = self._jobs[job_name], self.why(job_name, now)
        job.record_progress()
        held = [member for member, _ in job.held.values()]
        status = yield from describe_in_pieces(
            job_name, job.members, job.hangs, job.paces, held, why, now, with_paces=with_paces
        )
        return job.history.add_to(status, now)

    def is_group(self, job_name: str, replica_id: str) -> bool:
        """Whether the group lives, and is no prepared spare."""
        job = self._jobs.get(job_name)
        return job is not None and job.members.knows(replica_id)

    def holds_spare(self, job_name: str, member: Member) -> bool:
        """Whether a request of ``member`` waits for a place, and not for the other groups."""
        return self._is_standing_by(job_name, member.replica_id) and not member.seen_quorum_id

    def find_group(self, job_name: str, name: str) -> str:
        """The living group of a job with this replica id or name.

        Raises: RequestRefused: there is no such group, or more than one.
        """
        check_name("replica_id", name)
        job = self._jobs.get(job_name)
        called = job.members.called(name) if job else []
        if not called and job_name in self._spares:
            ids = self._spares[job_name].replica_ids
            called = [name] if name in ids else [each for each in ids if stable_name(each) == name]
        if not called:
            raise RequestRefused(f"job {job_name!r} has no living group {name!r}")
        if len(called) > 1:
            raise RequestRefused(
                f"job {job_name!r} has several groups {name!r}, say which: {', '.join(called)}"
            )
        return called[0]

    def check_room(self, job_name: str) -> None:
        """Raise `RequestRefused` if there is no room for another group of a job."""
        job = self._jobs.get(job_name)
        if job is None:
            check_name("job", job_name)
            if len(self._jobs) >= self._config.max_jobs:
                raise RequestRefused(
                    f"this lighthouse already serves {len(self._jobs)} jobs, its limit: "
                    f"job {job_name!r} has to go to another one"
                )
        elif len(job.members) >= self._config.max_members_per_job:
            raise RequestRefused(
                f"job {job_name!r} has {len(job.members)} groups, the limit of this lighthouse"
            )

    def missed_news(
        self, job_name: str, replica_id: str, last: LastQuorum, num_groups: int
    ) -> list[NewcomerWaits | TermEnds | Lost]:
        """The news that a member of the last quorum may not have received, because it had no
        session."""
        job = self._jobs.get(job_name)
        if job is None:  # it is a prepared spare
            return []
        members, quorum_id = job.members, job.members.last.quorum_id
        if replica_id not in members.previous_ids or last.quorum_id != quorum_id:
            return []
        newcomer = min(members.groups[GroupState.JOINING], default=None)
        news: list[NewcomerWaits | TermEnds | Lost] = [NewcomerWaits(newcomer)] if newcomer else []
        if 0 < num_groups < self._config.min_replicas:
            needed = f"this lighthouse needs {self._config.min_replicas} groups (--min-replicas)"
            news.append(TermEnds(quorum_id, None, needed))
        if job.rivals():
            news.append(job.end_for_rivals())
        news += [Lost(who, why, quorum_id) for who, why in job.term.lost.items()]
        if job.term.over_from:
            news.append(TermEnds(quorum_id, job.term.over_from, "not all members take part"))
        return news

    def missed_command(self, job_name: str, replica_id: str, now: float) -> Kill | Drain | None:
        """The command by which a group that begins a session has to end (rule Q27; None: there is
        none). It may not have received it, or may have lost the manager that had received it."""
        job, ended = self._jobs.get(job_name), self._ended.get(job_name)
        if ended is not None and replica_id in ended.spares:
            return _JOB_FINISHED
        command, at = job.commands.get(replica_id, (None, now)) if job else (None, now)
        if isinstance(command, Drain) and command.within_s is not None:
            return replace(command, within_s=max(0.0, command.within_s - (now - at)))
        return command

    def is_past(self, job_name: str, replica_id: str, last: LastQuorum) -> bool:
        """Whether the others continued without a group that is back, and was in quorum ``last``."""
        job = self._jobs.get(job_name)
        return job is not None and job.members.is_past(replica_id, last)

    def committed_step(self, job_name: str) -> int:
        """The highest step that a quorum of this job has shown, less steps given up since."""
        job = self._jobs.get(job_name)
        return job.members.committed_step if job else 0

    def members(self, job_name: str) -> tuple[list[Member], int]:
        """The members of a job that live and have a manager's address, and its committed step, if
        a member lives.

        A restarted lighthouse knows members that report their quorum, and their addresses only when
        they ask. Each group that starts may ask for this, and many may start at once.
        """
        job = self._jobs.get(job_name)
        if job is None or not job.members.quorum_left():
            return [], 0
        job.record_progress()
        previous = job.members.previous
        known = [
            each
            for each in (previous.participants if previous else ())
            if each.address and job.members.knows(each.replica_id)
        ]
        return known, job.members.committed_step

    def is_finished(self, job_name: str) -> bool:
        """Whether a job has ended, and all groups of its last quorum ended on purpose."""
        ended = self._ended.get(job_name)
        return ended is not None and ended.is_finished

    def beat_interval_s(self, job_name: str) -> float:
        """The shortest time between the heartbeats of a group."""
        job = self._jobs.get(job_name)
        groups = len(job.members) if job else 1
        rarest = self._config.heartbeat_timeout_s / MIN_BEATS_PER_TIMEOUT
        return min(groups / MAX_BEATS_PER_SECOND, rarest)

    # -- the rules -------------------------------------------------------------------------------

    def _job(self, name: str, replica_id: str, now: float, reported_id: int = 0) -> Job:
        job = self._jobs.get(name)
        self._check_reported(name, job, reported_id, now)
        if job is None or not job.members.knows(replica_id):
            self.check_room(name)
        if job is None:
            accounts = TimeAccounts(self._unix_s(now))
            new = EndedJob(NO_QUORUM, self._ids.first, History(now), accounts, now)
            ended = self._ended.pop(name, new)
            history = History(now) if ended.is_finished else ended.history
            accounts = accounts if ended.is_finished else ended.accounts
            accounts.begin_again(self._unix_s(now))
            last = ended.last if ended.last.max_step else NO_QUORUM  # there is nothing to lose
            members = Membership(
                self._config, last, is_finished=ended.is_finished, began_at=self._began_at
            )
            hangs = HangWatch(self._config.hang_timeout_s)
            ledger = self.ledgers.open_ledger(name, self._unix_s(now))
            last_id = max(self._ids.first, ended.last_id)
            paces = PaceWatch(self._config.slow_factor, self._config.slow_after_s)
            job = Job(name, members, hangs, history, ledger, accounts, paces, last_id)
            job.left = ended.left
            self._jobs[name] = job
        job.record_quorum_id(reported_id)
        return job

    def _check_weight(self, job_name: str, member: Member) -> None:
        """Refuse a member that makes the quorum too long: every member receives all of it, and for
        200 members with 64 KB each that is 2.5 GB."""
        num_bytes, job = member.num_bytes, self._jobs.get(job_name)
        if job is not None:
            num_bytes += job.members.num_bytes_of_others(member.replica_id)
            held = [each for each, _ in job.held.values()] if job.held else []
            others = (each for each in held if each.replica_id != member.replica_id)
            num_bytes += sum(each.num_bytes for each in others)
        if num_bytes > self._config.max_quorum_bytes:
            raise RequestRefused(
                f"with the {member.num_bytes} bytes of {member.replica_id!r} the quorum of job "
                f"{job_name!r} would have {num_bytes} bytes, and the limit of this lighthouse is "
                f"{self._config.max_quorum_bytes} (--max-quorum-bytes)"
            )

    def _check_reported(self, name: str, job: Job | None, reported_id: int, now: float) -> None:
        """Refuse an id that cannot have been given out."""
        known = job or self._ended.get(name)
        is_running = job is not None and job.members.previous is not None
        known_id = known.last_id if known else 0
        self._ids.check_reported(reported_id, known_id, now, is_running=is_running)

    def _refuse_later_owners(self, job: Job, replica_id: str) -> bool:
        """Refuse later incarnations that wait for the name of a group that gives a sign of life;
        whether there is one."""
        job.silent.pop(replica_id, None)
        has_refused = False
        for rival in job.members.names.later(replica_id) if job.held else ():
            if rival not in job.held:
                continue
            _, caller = job.held.pop(rival)
            job.forget_group(rival)
            reason = (
                f"the name of {rival!r} is taken: {replica_id!r} is alive; "
                "give every replica group a name of its own"
            )
            self._outputs.refuse(caller, RequestRefused(reason))
            has_refused = True
        return has_refused

    def _refuse_unlike(self, job: Job, misfits: list[Member], trains: Member, now: float) -> None:
        """Refuse waiting groups that are not like one that ``trains``."""
        for misfit in misfits:
            caller = job.members.turned_away(misfit.replica_id, now)
            if caller is not None:
                self._outputs.refuse(caller, GroupDiffers(why_unlike(misfit, trains)))

    def _refuse_replaced(self, caller: int, replica_id: str) -> None:
        reason = f"a newer request of {replica_id!r} has taken the place of this one"
        self._outputs.refuse(caller, QuorumFailed(reason))

    def _is_standing_by(self, job_name: str, replica_id: str) -> bool:
        spares = self._spares.get(job_name) if self._spares else None
        return spares is not None and replica_id in spares

    def _forget_spare(self, job_name: str, replica_id: str) -> int | None:
        """Forget a prepared spare; returns the caller that waited for its place, if any."""
        spares = self._spares[job_name]
        caller = spares.forget_group(replica_id)
        if not spares:
            del self._spares[job_name]
        return caller

    def _hold_spare(self, job_name: str, member: Member, caller: int, now: float) -> None:
        """Keep the request of a prepared spare until there is a place (rule G2)."""
        job = self._jobs.get(job_name)
        if job is not None:
            job.likeness.check(member, job.members)  # now rather than when it is needed
        replaced = self._spares[job_name].record_request(member, caller, now)
        if replaced is not None:
            self._refuse_replaced(replaced, member.replica_id)
        if job is not None:
            self._fill_places(job, now)

    def _fill_places(self, job: Job, now: float) -> None:
        """Let prepared spares take the free places, each one of them."""
        spares = self._spares.get(job.name)
        if spares is None or self._fills_places:
            return
        self._fills_places = True  # each of them settles the job
        try:
            while self._gives_place(job, now) and (request := spares.pop_next(now)):
                member, caller = request
                if not spares:
                    del self._spares[job.name]
                places = job.history.num_places
                self._outputs.report(ReportPlaceTaken(job.name, member.replica_id, places))
                self._outputs.await_quorum(caller, now)
                job.former_spares.add(member.replica_id)
                try:
                    self.request(job.name, member, caller, now)
                except RequestRefused as error:
                    job.former_spares.discard(member.replica_id)
                    self._outputs.refuse(caller, error)
        finally:
            self._fills_places = False

    def _gives_place(self, job: Job, now: float) -> bool:
        """Whether a prepared spare may join now.

        Groups that a restarted lighthouse has not seen yet have a place. It waits for them before
        its first quorum, and then gives one away only if those who ask are too few without.
        """
        if not job.num_free_places():
            return False
        if job.members.previous is not None:
            return True
        if look_at(job.members, self._config) > now:
            return False
        decision = decide(job.members.view(now), self._config, now)
        return isinstance(decision, Waiting) and decision.why is Why.TOO_FEW

    def _take_places_back(self, job: Job, members: Sequence[Member], now: float) -> None:
        """Let former spares stand by again: nobody is left whose state they could get."""
        spares = self._spares.setdefault(job.name, PreparedSpares(self._config.heartbeat_timeout_s))
        for member in members:
            caller = job.forget_group(member.replica_id)
            assert caller is not None, "it is in a quorum that is about to be formed"
            spares.add(member.replica_id, now)
            spares.record_request(member, caller, now)
            self._outputs.await_place(caller)
            self._outputs.report(ReportPlaceReturned(job.name, member.replica_id))

    def _end_spares(self, job: Job, now: float) -> frozenset[str]:
        """Let the prepared spares of a job that has finished end, too; returns all that have to.

        Among them are those whose session has broken a moment ago, and may begin again.
        """
        away = frozenset(each for each, until in job.away_spares.items() if until > now)
        spares = self._spares.get(job.name)
        if spares is None:
            return away
        self._outputs.send(job.name, spares.replica_ids, _JOB_FINISHED)
        return away.union(spares.replica_ids)

    def _hold_request(self, job: Job, member: Member, caller: int) -> None:
        """Keep a request until the earlier incarnation, which has the name, is gone (rule Q20)."""
        held_before = job.held.pop(member.replica_id, None)
        if held_before is not None:
            self._refuse_replaced(held_before[1], member.replica_id)
        job.held[member.replica_id] = (member, caller)

    def _record_request(
        self, job: Job, member: Member, caller: int, now: float, *, agreed: bool
    ) -> None:
        job.history.asked(member)
        replaced = job.members.asked(member, caller, now)
        if replaced is not None:
            self._refuse_replaced(replaced, member.replica_id)
        if uninformed := job.end_term_for_request(member, agreed=agreed):
            why = f"{member.replica_id} asks for a quorum at step {member.step}"
            ends = TermEnds(job.members.last.quorum_id, member.step, why)
            self._outputs.send(job.name, uninformed, ends)
        self._end_stalled_term(job, now)

    def _record_activity(self, job: Job, replica_id: str, activity: Activity, now: float) -> bool:
        """Record what a group does; whether there may be something to conclude."""
        job.hangs.record_activity(replica_id, activity, now)
        has_changed = job.members.record_activity(replica_id, activity, now)
        if replica_id in job.members.previous_ids:
            job.history.record_step(activity.reached, now)
            if job.ledger.awaits_step:
                job.ledger.record_step(activity.reached, self._unix_s(now))
            job.record_reached(replica_id, activity)
            if activity.phase is Phase.QUORUM:
                job.term.record_wait(activity.since, self._config.join_timeout_s, now)
                has_changed |= self._end_stalled_term(job, now)
                self._wake(job.term.due_at)
                if job.waits_for_silent(activity, now):
                    has_changed |= self._remove_silent(job, now)
                has_changed |= self._end_unreported_term(job, activity, now)
        if replica_id in job.ledger.healing:
            job.ledger.record_reached(replica_id, activity.reached)
        if replica_id in job.ledger.hung and not job.hangs.is_hung(replica_id):
            job.ledger.record_moved(replica_id)
            job.accounts.confirm_hang(replica_id)
        has_changed |= self._handle_hangs(job, now, (replica_id,))
        self._wake(job.hangs.look_at())
        return has_changed

    def _remove(self, job: Job, replica_id: str, how: Leave, now: float) -> None:
        """Remove a group that is gone, and inform its peers."""
        how = job.how_it_ended(replica_id, how)
        quorum_id = job.members.last.quorum_id
        was_member = replica_id in job.members.previous_ids
        silent_s = now - job.members.seen_at(replica_id)
        moment = self._moment(job, now)
        job.accounts.forget_group(replica_id)
        if job.ledger.record_gone(
            replica_id, how, moment, silent_s=silent_s, was_member=was_member
        ):
            job.accounts.exonerate(replica_id)
        if was_member:
            job.end_progress()
        # The news would make its peers give up a step that it has finished.
        informed = () if how.between_steps else job.loss_recipients(replica_id, how.reason)
        self._report_loss(
            ReportLoss(
                job.name,
                replica_id,
                how.reason,
                how.between_steps,
                how.is_orderly,
                quorum_id,
                informed,
            )
        )
        gone = GoneGroup(replica_id=replica_id, reason=how.reason, orderly=how.is_orderly)
        job.history.gone(gone, ends=how.ends, now=now)
        if was_member and how.ends and how.departure is Departure.OTHER:
            job.history.end_place()
        held = job.held.pop(replica_id, None)
        caller = job.forget_group(replica_id)
        for lost in (caller, held[1] if held else None):
            if lost is not None:
                error = QuorumFailed(f"{replica_id!r} is out: {how.reason}")
                self._outputs.refuse(lost, error)

    def _report_loss(self, report: ReportLoss | ReportEviction | ReportStraggler) -> None:
        """Log it, and inform its recipients."""
        self._outputs.report(report)
        if report.recipients:
            lost = Lost(report.replica_id, report.reason, report.quorum_id)
            self._outputs.send(report.job, report.recipients, lost)

    def _handle_hangs(self, job: Job, now: float, waiting: Sequence[str] = ()) -> bool:
        """Report hanging groups, and evict those that others wait for, maybe since ``waiting`` do;
        whether there are any."""
        kill = self._config.on_hang == "kill"
        newly_hung = job.hangs.newly_hung(now)
        for replica_id, hang in newly_hung:
            for_s = now - hang.since
            report = ReportHang(job.name, replica_id, hang.phase, hang.step, for_s, kill)
            self._outputs.report(report)
            why = job.hangs.why(replica_id, now)
            job.ledger.record_hang(replica_id, why, self._moment(job, now), for_s=for_s)
            if replica_id in job.members.previous_ids:
                job.accounts.blame_hang(replica_id)
            if kill:
                self._outputs.send(job.name, (replica_id,), Kill(why))
        if self._config.on_hang != "evict":
            return bool(newly_hung)
        candidates = job.members.previous_ids if newly_hung else waiting
        evicted = to_evict(job.members, job.hangs, candidates)
        if evicted:
            job.members.evicted(evicted)
            job.spent_id = job.last_id
        for each in evicted:
            why, quorum_id = job.hangs.why(each, now), job.members.last.quorum_id
            informed = job.loss_recipients(each, why)
            moment = self._moment(job, now)
            job.ledger.record_left_out(IncidentKind.EVICTED, each, why, moment)
            self._report_loss(ReportEviction(job.name, each, why, quorum_id, informed))
        return bool(newly_hung or evicted)

    def _handle_paces(self, job: Job, now: float) -> None:
        """Report groups that have become slow, or are usual again, and drain the slowest one if
        that is wanted and enough remain (rule Q26)."""
        members = job.members.previous_ids
        changes = job.paces.find_changes(members, now)
        for change in changes:
            self._outputs.report(
                ReportPace(job.name, change.replica_id, change.is_slow, change.cause)
            )
            if change.is_slow:
                moment = self._moment(job, now)
                job.ledger.record_slow(change.replica_id, change.cause, moment, for_s=change.for_s)
            else:
                job.ledger.record_usual(change.replica_id)
        if self._config.on_slow != "evict":
            return
        slowest = job.paces.slowest(members)
        is_early = job.evicting is not None or now < job.next_eviction_at
        if slowest is None or is_early or slowest in job.silent:
            return
        if not can_lose_a_group(job.members, job.commands.keys() | job.silent.keys()):
            return
        why = f"it is evicted because it is slow: {job.paces.why(slowest, members)}"
        job.evicting, job.next_eviction_at = slowest, now + self._config.slow_after_s
        job.ledger.record_slow_eviction(slowest, why)
        self._outputs.report(ReportPace(job.name, slowest, True, why, evict=True))
        drain = Drain(why)
        job.commands[slowest] = drain, now
        self._outputs.send(job.name, (slowest,), drain)

    def _remove_silent(self, job: Job, now: float, *, agreed: bool = False) -> bool:
        """Remove the members without a session (rule E7); whether there are any. ``agreed``: all
        members end their step, and ask, so nobody needs to be informed."""
        silent = Leave(_SESSION_ENDED, between_steps=agreed)
        replica_ids = list(job.silent)
        for replica_id in replica_ids:
            self._remove(job, replica_id, silent, now)
        return bool(replica_ids)

    def _moment(self, job: Job, now: float) -> Moment:
        step = max(job.members.committed_step, job.history.highest_step)
        return Moment(self._unix_s(now), job.members.last.quorum_id, step)

    def _record_late(self, job: Job, late: Iterable[str], cause: str, now: float) -> None:
        """Record that the others continue without groups that are late."""
        for replica_id in late:
            moment = self._moment(job, now)
            job.ledger.record_left_out(IncidentKind.STRAGGLED, replica_id, cause, moment)

    def _end_unreported_term(self, job: Job, activity: Activity, now: float) -> bool:
        """Let members that wait in a step for one that has not reported to this lighthouse wait no
        longer (rule E8); whether there are any."""
        if not job.waits_for_unreported(activity, self._config.heartbeat_timeout_s, now):
            return False
        job.term.over_from = activity.step
        num_missing = job.term.num_groups - job.members.num_reported
        why = f"{num_missing} of its {job.term.num_groups} groups have not come back"
        self._send_end(job, activity.step, why)
        return True

    def _end_stalled_term(self, job: Job, now: float) -> bool:
        """Leave out the groups that have not begun a step in time, so that the others do not wait
        in it any longer; whether there are any."""
        step, due_at = job.stalled_step(self._config.join_timeout_s, now)
        if step is None:
            return False
        late = job.late_in_term(step, due_at)
        if not late:
            return False
        job.leave_out_late(late)
        self._record_late(job, late, f"it did not begin step {step} in time", now)
        job.term.over_from, job.spent_id = step, job.last_id
        self._send_end(job, step, f"{name_some(late)} did not begin step {step} in time")
        return True

    def _send_end(self, job: Job, step: int, why: str) -> None:
        """Inform the members that no step of the term from ``step`` on can be committed."""
        ends = TermEnds(job.members.last.quorum_id, step, why)
        self._outputs.send(job.name, job.members.quorum_left(), ends)

    def _settle_job(self, job: Job, now: float, asked: Sequence[str] = ()) -> None:
        """Draw all conclusions for one job, after ``asked`` have asked."""
        newcomers = list(asked)
        for replica_id in job.members.names.pop_newly_unique():
            if replica_id in job.held:
                job.members.asked(*job.held.pop(replica_id), now)
                newcomers.append(replica_id)
        job.hangs.handle_again(job.members.recalled())
        look = look_at(job.members, self._config)
        if look <= now:
            decision = self._decide(job, now)
            if isinstance(decision, Formed) and job.is_for_spares_alone(decision):
                self._take_places_back(job, decision.members, now)
                newcomers = []
            elif isinstance(decision, Formed):
                for straggler in job.left_behind():
                    self._report_loss(straggler)
                    self._record_late(job, (straggler.replica_id,), straggler.reason, now)
                self._publish(job, decision, now)
                newcomers = job.members.waiting()
            look = look_at(job.members, self._config)
        for each in job.newcomers_to_announce(newcomers):
            self._outputs.send(job.name, job.members.quorum_left(), NewcomerWaits(each))
        if self._spares:
            self._fill_places(job, now)
        if len(job.members):
            self._wake_for(job, look, now)
        else:
            self._end_job(job, now)

    def _wake_for(self, job: Job, look: float, now: float) -> None:
        """Call `tick` when time alone changes something; ``look``: see `quorum.look_at`."""
        self._wake(job.members.next_death())
        self._wake(job.hangs.look_at())
        self._wake(job.term.due_at)
        if now < look < math.inf:
            self._wake(look)
        gathers_until = job.members.gathers_until
        if gathers_until is not None and now < gathers_until:
            self._wake(gathers_until)

    def _decide(self, job: Job, now: float) -> Formed | Waiting:
        """Whether there is a quorum now. Groups that are out of time are stragglers from here
        on."""
        view = job.members.view(now)
        job.members.sharpen(view)
        deadlines = absent_deadlines(view, self._config)
        late = sorted(key for key, at in deadlines.items() if at <= now)
        for replica_id, since in job.members.left_out(late):
            self._outputs.report(ReportLeftHealing(job.name, replica_id, now - since))
            cause = f"it was left out after it had healed for {now - since:.1f} s"
            job.ledger.record_failed_heal(replica_id, cause, self._moment(job, now))
        return decide(view, self._config, now)

    def _publish(self, job: Job, formed: Formed, now: float) -> None:
        previous = job.members.previous
        if not job.may_keep_id(formed.members):
            job.last_id = self._ids.next_id(job.highest_id)
        quorum = Quorum(
            quorum_id=job.last_id,
            participants=formed.members,
            joining=joining(formed.members, previous),
        )
        begins_anew = job.members.is_finished and formed.lost_from is not None
        self._record_quorum(job, quorum, now)
        if formed.lost_from is not None and not begins_anew:
            cause = f"the job went back from step {formed.lost_from} to step {quorum.max_step}"
            job.ledger.record_accepted_loss(cause, self._moment(job, now))
            job.accounts.give_up(formed.lost_from - quorum.max_step)
        job.record_places(quorum)
        callers = job.members.publish(quorum)
        job.announcements, job.left = Announcements(), {}
        job.term = RunningTerm(quorum.steady, quorum.max_step, formed_at=now)
        if formed.lost_from is not None:
            job.history.went_back()
        job.history.published(quorum, now)
        self._outputs.publish(job.name, callers, quorum, formed.lost_from, begins_anew)

    def _record_quorum(self, job: Job, quorum: Quorum, now: float) -> None:
        """Record ``quorum`` in the ledger, before it is the job's last one."""
        members, ledger = job.members, job.ledger
        if members.previous is not None and members.previous.quorum_id == quorum.quorum_id:
            if ledger.awaits_step:
                ledger.record_step(quorum.max_step, self._unix_s(now))
            if ledger.healing:
                ledger.record_healed(each.replica_id for each in quorum.up_to_date)
            return
        ids = [each.replica_id for each in quorum.participants]
        came = {
            each: now - members.asked_at(each) for each in ids if each not in members.previous_ids
        }
        moment = replace(self._moment(job, now), quorum_id=quorum.quorum_id)
        is_first = members.previous is None and members.last == NO_QUORUM
        ledger.record_quorum(quorum, came, moment, is_first=is_first)
        up_to_date = {each.replica_id for each in quorum.up_to_date}
        stay = up_to_date.difference(came)
        job.accounts.record_quorum(stay or up_to_date, moment.at)

    def _end_job(self, job: Job, now: float) -> None:
        """Remember the job as ended: its last group is gone."""
        del self._jobs[job.name]
        job.ledger.end(self._moment(job, now))
        job.accounts.end(self._unix_s(now))
        if job.members.last.quorum_id or job.highest_id > self._ids.first:
            has_finished = job.history.end()
            # A run without a quorum does not count: the last one is the run before it.
            is_finished = has_finished or job.members.is_finished
            spares = self._end_spares(job, now) if has_finished else frozenset()
            self._ended[job.name] = EndedJob(
                job.members.last,
                job.highest_id,
                job.history,
                job.accounts,
                now,
                is_finished,
                spares,
                job.left,
            )
        while len(self._ended) > self._config.max_jobs:
            _, forgotten = self._ended.popitem(last=False)
            self._ids.forget_job(forgotten.last_id, now)

    def _wake(self, at: float | None) -> None:
        """Call `tick` at this time at the latest."""
        if at is not None and at < (math.inf if self._wake_at is None else self._wake_at):
            self._wake_at = at
