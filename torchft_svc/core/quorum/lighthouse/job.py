"""What a lighthouse keeps of a job: its groups, its history, the term of its last quorum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from torchft_svc.core.quorum.activity import Activity, HangWatch, Phase
from torchft_svc.core.quorum.lighthouse.gathering import GATHER_S
from torchft_svc.core.quorum.lighthouse.lighthouse_orders import ReportStraggler
from torchft_svc.core.quorum.lighthouse.likeness import Likeness
from torchft_svc.core.quorum.lighthouse.membership import AWAITED_MEMBERS, GroupState, Membership
from torchft_svc.core.quorum.lighthouse.overview import History, name_some
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.core.quorum.term import RunningTerm, TermEnds
from torchft_svc.core.quorum.types import LastQuorum, Member

# A member needs to know that groups wait, and about how many. One loss makes it discard its step;
# the further ones are for members whose session broke just then. A thousand groups that come or die
# at once must not cause a million messages.
MAX_ANNOUNCED, MAX_ANNOUNCEMENTS = 100, 10_000
MAX_LOSSES_TOLD = 4
# So long another one waits in a step before members without a session are given up (rule E7). If
# their worker is dead, too, most backends notice that by themselves, and then the others ask.
MISSED_AFTER_S = 0.2


class Announcements:
    """How much the members of one quorum are told about newcomers and losses (rule Q22)."""

    def __init__(self) -> None:
        self._newcomers: set[str] = set()
        self._num_losses = 0

    def of_newcomers(self, waiting: Iterable[str], num_members: int) -> list[str]:
        """The newcomers to announce to ``num_members`` members: each once, and only the first
        ones of a crowd."""
        fresh = [key for key in waiting if key not in self._newcomers]
        limit = min(MAX_ANNOUNCED, max(1, MAX_ANNOUNCEMENTS // num_members))
        del fresh[max(0, limit - len(self._newcomers)) :]
        self._newcomers.update(fresh)
        return fresh

    def of_a_loss(self) -> bool:
        """Whether another loss is announced."""
        self._num_losses += 1
        return self._num_losses <= MAX_LOSSES_TOLD

    def gone(self, replica_id: str) -> None:
        self._newcomers.discard(replica_id)


@dataclass(slots=True)
class Job:
    members: Membership
    hangs: HangWatch
    history: History
    last_id: int
    likeness: Likeness = field(default_factory=Likeness)
    heard_id: int = 0  # the highest that a group reported, maybe from another lighthouse
    spent_id: int = 0  # a quorum that members were told to leave
    killed: dict[str, str] = field(default_factory=dict)  # living groups, and why they end
    # Requests of groups whose name is still held by an earlier incarnation.
    held: dict[str, tuple[Member, int]] = field(default_factory=dict)
    announcements: Announcements = field(default_factory=Announcements)
    term: RunningTerm = field(default_factory=RunningTerm)
    # Members whose session has ended without a word, and since when (rule E7).
    silent: dict[str, float] = field(default_factory=dict)
    # Members that have left in good order: no heartbeat without a session, which may be late,
    # brings them back before this time (rule Q8).
    left: dict[str, float] = field(default_factory=dict)

    def reported(self, replica_id: str, last: LastQuorum, num_groups: int, now: float) -> None:
        """A group reports the ``last`` quorum that it was in, of ``num_groups`` (0: not known)."""
        known_id = self.members.last.quorum_id
        self.members.reported(replica_id, last)
        if self.members.last.quorum_id != known_id:
            # What was known, and told, is about an earlier quorum.
            self.term, self.announcements = RunningTerm(), Announcements()
        if last.quorum_id == self.members.last.quorum_id:
            self.term.reported_at = min(self.term.reported_at, now)
            self.term.num_groups = max(self.term.num_groups, num_groups)

    def rivals(self) -> Set[str]:
        """The living groups that may train on beside the last quorum (rule Q12): in a newer one of
        elsewhere or, before the first quorum here, in an older one, and these do not ask."""
        if self.members.previous is not None:
            return self.members.ahead
        return set(self.members.stragglers()) - self.members.previous_ids

    def contested(self) -> TermEnds:
        """What ends a term whose members have to ask, because there are `rivals`: both cannot train
        on beside each other."""
        is_first = self.members.previous is None
        where = "an older quorum" if is_first else "a newer quorum elsewhere"
        why = f"{name_some(sorted(self.rivals()))} trained on in {where}"
        return TermEnds(self.members.last.quorum_id, None, why)

    def heard(self, replica_id: str, activity: Activity) -> None:
        """A member of the last quorum reports how far it is; one that waited for the quorum is not
        in it yet. What it has reached it has committed, also if it goes back to a checkpoint."""
        reached = self.term.reached
        if activity.phase is not Phase.QUORUM or self._waits_in_step(activity):
            reached[replica_id] = max(reached.get(replica_id, 0), activity.reached)

    def note_progress(self) -> None:
        """Note how far all members of the last quorum have come in it (rule E5); before one of them
        asks, or is gone. Those that are not back at a new lighthouse may be a step behind."""
        if self.term.may_go_on and not self.term.is_noted:
            reached = [self.term.reached.get(each, 0) for each in self.members.previous_ids]
            may_be_ahead = self.members.previous is None
            step = min(reached, default=0) - may_be_ahead
            self.members.last = self.members.last.reached(step)

    def end_progress(self) -> None:
        """Note it for the last time: a member asks, or is gone, and commits no further step."""
        self.note_progress()
        self.term.is_noted = True

    def break_off(self, member: Member, *, agreed: bool) -> tuple[str, ...]:
        """A member of the last quorum asks: the others, if they may not know that they have to ask,
        too."""
        is_asking = self.members.state(member.replica_id) is GroupState.ASKING
        if not (is_asking and member.steady) or not self.term.ends_with(member.step, agreed=agreed):
            return ()
        self.spent_id = self.last_id
        return tuple(key for key in self.members.quorum_left() if key != member.replica_id)

    def may_be_back(self, replica_id: str) -> bool:
        """Whether a group whose session has ended without a word stays a member (rule E7): its
        steps need no manager, and nobody misses it."""
        members = self.members
        return (
            self.term.may_go_on
            and self.term.over_from is None
            and replica_id in members.previous_ids
            and replica_id not in self.killed
            and members.state(replica_id) is GroupState.AWAITED
            and not members.groups[GroupState.ASKING]
            and len(members.quorum_left()) > 1
        )

    def is_missed(self, activity: Activity, now: float) -> bool:
        """Whether a member that waits for others in a step, as it reports now, may wait for one
        whose session has ended."""
        if not self.silent or not self._waits_in_step(activity):
            return False
        return now - max(activity.since, *self.silent.values()) >= MISSED_AFTER_S

    def waits_for_unheard(self, activity: Activity, heartbeat_timeout_s: float, now: float) -> bool:
        """Whether a member that waits for others in a step, as it reports now, may wait for one
        that has not reported the quorum to this lighthouse in time (rule E8)."""
        members, term = self.members, self.term
        if members.previous is not None or term.num_groups <= members.num_reported:
            return False
        if term.over_from is not None or not self._waits_in_step(activity):
            return False
        # One that asks may be that member: it has not received the answer.
        patience_s = GATHER_S if members.groups[GroupState.JOINING] else heartbeat_timeout_s
        return now - activity.since >= MISSED_AFTER_S and now - term.reported_at >= patience_s

    def _waits_in_step(self, activity: Activity) -> bool:
        """Before its quorum was formed it waited for that."""
        return activity.phase is Phase.QUORUM and activity.since > self.term.formed_at

    def note_wait(self, member: Member, join_timeout_s: float) -> None:
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
        term.waits(min((each.since for each in waiting), default=math.inf), join_timeout_s, now)
        return None, math.inf

    def late_in_term(self, step: int, due_at: float) -> list[str]:
        """The members that keep others from ``step`` of the term, because they have not begun it
        (rule E6). What silent ones do is not known, nor what those do that have reported nothing
        since ``due_at``: at short timeouts they may have gone on since, and the others, too."""
        left, hangs = self.members.quorum_left(), self.hangs
        known = [each for each in left if each not in self.silent and hangs.told_at(each) >= due_at]
        doing = {each: self.hangs.activity(each) for each in known}
        late = sorted(
            key for key, each in doing.items() if each is not None and not each.has_begun(step)
        )
        return [key for key in late if self.members.state(key) in AWAITED_MEMBERS]

    def leave_behind(self, job: str) -> list[ReportStraggler]:
        """Tell the stragglers of the last quorum that the next one is formed without them (rule
        Q4). Some have to know even if they have reported no activity: before the first quorum here
        all, and later those that report a newer quorum."""
        members, is_first = self.members, self.members.previous is None
        quorum_id = max(members.last.quorum_id, self.heard_id if members.ahead else 0)
        told = []
        for key in members.stragglers():
            doing = self.hangs.activity(key)
            # One that heals is not in a collective, and joins with what it has by then.
            heals = doing is not None and doing.phase is Phase.HEALING
            if not heals and (doing or is_first or key in members.ahead):
                told.append(ReportStraggler(job, key, quorum_id, recipients=(key,)))
        return told

    def note_left(self, replica_id: str, leave: Leave, until: float) -> None:
        if leave.is_orderly and self.members.is_member(replica_id):
            self.left[replica_id] = until

    def forget(self, replica_id: str) -> int | None:
        """The group is gone; returns the caller that waited for it, if any."""
        self.hangs.gone(replica_id)
        self.announcements.gone(replica_id)
        self.silent.pop(replica_id, None)
        self.term.reached.pop(replica_id, None)
        return self.members.gone(replica_id)

    def loss_recipients(self, replica_id: str, reason: str) -> tuple[str, ...]:
        """The groups to inform of this loss, if it was in the last quorum: itself and, unless
        they were told of enough others, its living peers there."""
        if replica_id not in self.members.previous_ids:
            return ()
        if not self.announcements.of_a_loss():
            return (replica_id,)
        others = [key for key in self.members.quorum_left() if key != replica_id]
        if others:
            self.term.over_from = 0  # they know: no question of theirs is news for the others
            self.term.lost[replica_id] = reason
            self.spent_id = self.last_id
        return (replica_id, *others)

    def announce(self, asked: Iterable[str]) -> list[str]:
        """The groups of ``asked`` that still wait to join the last quorum, and were not
        announced to it."""
        if not self.members.previous_ids:
            return []
        waiting = [key for key in asked if self.members.state(key) is GroupState.JOINING]
        return self.announcements.of_newcomers(waiting, len(self.members.previous_ids))


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job without a living group, since ``at``: so a restart is told from a start.

    ``is_finished``: every group of its last quorum ended on purpose, so the next run is another
    one.
    """

    last: LastQuorum
    last_id: int  # the highest that was issued, or reported
    history: History
    at: float
    is_finished: bool = False
