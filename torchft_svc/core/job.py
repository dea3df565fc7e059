"""What a lighthouse keeps of a job: its groups, its history, the term of its last quorum."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchft_svc.core.activity import HangWatch
from torchft_svc.core.likeness import Likeness
from torchft_svc.core.membership import AWAITED_MEMBERS, GroupState, Membership
from torchft_svc.core.overview import History
from torchft_svc.core.step import Phase
from torchft_svc.core.term import RunningTerm
from torchft_svc.core.types import LastQuorum, Member

# A member needs to know that groups wait, and about how many. One loss makes it discard its step;
# the further ones are for members whose session broke just then. A thousand groups that come or die
# at once must not cause a million messages.
MAX_ANNOUNCED, MAX_ANNOUNCEMENTS = 100, 10_000
MAX_LOSSES_TOLD = 4


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

    def note_progress(self) -> None:
        """Note how far all members of the last quorum have come in it (rule E5); before one of them
        asks, or is gone."""
        if self.term.may_go_on and not self.term.is_noted:
            doing = [self.hangs.activity(each) for each in self.members.previous_ids]
            reached = [0 if each is None else each.reached for each in doing]
            self.members.last = self.members.last.reached(min(reached, default=0))

    def break_off(self, member: Member, *, agreed: bool) -> tuple[str, ...]:
        """A member of the last quorum asks: the others, if they may not know that they have to ask,
        too."""
        is_asking = self.members.state(member.replica_id) is GroupState.ASKING
        if not (is_asking and member.steady) or not self.term.ends_with(member.step, agreed=agreed):
            return ()
        self.spent_id = self.last_id
        return tuple(key for key in self.members.quorum_left() if key != member.replica_id)

    def late_in_term(self, now: float, patience_s: float) -> tuple[int, list[str]]:
        """The members that keep others from a step of the term, because they have not begun it, and
        its number (rule E6): others wait for their sums in it for ``patience_s`` or longer."""
        term, members = self.term, self.members
        if not term.is_due(now):
            return 0, []
        doing = {each: self.hangs.activity(each) for each in members.quorum_left()}
        waiting = [each for each in doing.values() if each and each.phase is Phase.QUORUM]
        for_long = [each.step for each in waiting if now - each.since >= patience_s]
        if not for_long:
            term.look_at = math.inf
            term.waits(min((each.since for each in waiting), default=math.inf), patience_s, now)
            return 0, []
        step = max(for_long)
        late = sorted(
            key for key, each in doing.items() if each is not None and not each.has_begun(step)
        )
        return step, [key for key in late if members.state(key) in AWAITED_MEMBERS]

    def forget(self, replica_id: str) -> int | None:
        """The group is gone; returns the caller that waited for it, if any."""
        self.hangs.gone(replica_id)
        self.announcements.gone(replica_id)
        return self.members.gone(replica_id)

    def loss_recipients(self, replica_id: str) -> tuple[str, ...]:
        """The groups to inform of this loss, if it was in the last quorum: itself and, unless
        they were told of enough others, its living peers there."""
        if replica_id not in self.members.previous_ids:
            return ()
        others = [key for key in self.members.quorum_left() if key != replica_id]
        if not self.announcements.of_a_loss():
            return (replica_id,)
        if others:
            self.term.over_from = 0  # they know: no question of theirs is news for the others
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
