"""Who of one job is alive, who asks for a quorum, and which quorum was the last.

`Membership` keeps what `torchft_svc.core.quorum.decide` looks at, and keeps it cheap: while
somebody is waited for, an arrival costs the same for ten groups and ten thousand.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable

from torchft_svc.core.activity import Activity
from torchft_svc.core.names import Names, stable_name
from torchft_svc.core.outlook import Outlook
from torchft_svc.core.quorum import (
    NOBODY_IS_TO_COME,
    Formed,
    Heal,
    JobView,
    Waiter,
    Waiting,
    absent_deadlines,
    decide,
    first_asked_at,
    has_loss_to_accept,
    joining,
)
from torchft_svc.core.step import Phase
from torchft_svc.core.types import NO_QUORUM, LastQuorum, Member, Quorum, QuorumConfig

# Whoever trains wants to know that somebody waits, and about how many; and one loss makes it give
# up its step, the others are for those whose session broke just then. A thousand groups that come
# or die at once must not make a million pieces of news.
MAX_ANNOUNCED, MAX_ANNOUNCEMENTS = 100, 10_000
MAX_LOSSES_TOLD = 4


class Membership:
    """The groups of one job. ``now`` is monotonic seconds and never goes back."""

    def __init__(
        self, config: QuorumConfig, last: LastQuorum = NO_QUORUM, *, is_finished: bool = False
    ) -> None:
        """``is_finished``: the run that ``last`` was the last quorum of has ended on purpose."""
        self._config = config
        self.is_finished = is_finished
        self._seen_at: OrderedDict[str, float] = OrderedDict()  # the longest silent first
        self._waiting: dict[str, Waiter] = {}
        self._waiting_bytes = 0  # of their requests, in a quorum
        self._told_min_replicas: Counter[int] = Counter()  # by those who wait; few different ones
        self._gave_up: dict[str, tuple[float, float]] = {}  # since when it asked, until when
        self._callers: dict[str, int] = {}
        self._replica_of: dict[int, str] = {}
        self.names = Names()
        self._veterans: set[str] = set()
        self._straggling: set[str] = set()
        self._evicted: set[str] = set()  # of the stragglers, those that hang in the last quorum
        self._ahead: set[str] = set()  # living, tell of a newer quorum than the last one here
        self._awaited: set[str] = set()  # living, in the previous quorum, has not asked again
        self.heals = Heals()
        self._announcements = Announcements()  # to the last quorum
        self._outlook = Outlook(config.join_timeout_s)
        self.previous: Quorum | None = None  # published here
        self._previous_ids: set[str] = set()  # of its members, or who tells of the newest one
        self.last = last
        self._loss_accepted = False
        self._gathering = NOBODY_IS_TO_COME

    # -- what happened ---------------------------------------------------------------------------

    def seen(self, replica_id: str, now: float) -> None:
        """A sign of life."""
        if replica_id not in self._seen_at:
            self.names.came(replica_id)
            if self._config.newcomer_timeout_s < self._config.join_timeout_s:
                self._outlook.crowd_changed()
            if replica_id in self._previous_ids:  # it was silent for too long, but is back
                self._veterans.add(replica_id)
                self._awaited.add(replica_id)
                self._outlook.forget()
        self._seen_at[replica_id] = now
        self._seen_at.move_to_end(replica_id)

    def told(self, replica_id: str, last: LastQuorum) -> None:
        """A group that has been seen tells of the last quorum that it was in, maybe elsewhere.

        As long as none was published here, the newest that is told stands for it: newcomers do not
        go on without its members, nor anybody without its step.
        """
        if not last.quorum_id:
            return
        self._veterans.add(replica_id)
        self._outlook.crowd_changed()
        self._note_ahead(replica_id, last.quorum_id)
        if self.previous is not None or last.quorum_id < self.last.quorum_id:
            return
        if last.quorum_id > self.last.quorum_id:
            self._previous_ids.clear()
            self._awaited.clear()
            self._evicted.clear()
        if last > self.last:
            self.last = last
            self.is_finished = False
            self._loss_accepted = False  # it was about an earlier step
        self._previous_ids.add(replica_id)
        if replica_id not in self._waiting and replica_id not in self._straggling:
            self._awaited.add(replica_id)
        self._outlook.forget()

    def _note_ahead(self, replica_id: str, quorum_id: int) -> None:
        """It tells that it was in this quorum; if that is newer than the last one here, the job may
        have gone on there."""
        if self.previous is not None and quorum_id > self.last.quorum_id:
            self._ahead.add(replica_id)

    def _believed_ahead(self) -> set[str]:
        """Who tells that the job went on elsewhere, and had a name in the last quorum here.

        Everybody may tell that. So it counts only if more groups of the last quorum, by their
        names, say so than live that do not: the others have been here all the time.
        """
        names = {stable_name(replica_id) for replica_id in self._previous_ids}
        stay = {
            stable_name(key) for key in self._previous_ids - self._ahead if key in self._seen_at
        }
        went = {stable_name(key) for key in self._ahead} & names - stay
        if len(went) <= len(stay):
            return set()
        return {key for key in self._ahead if stable_name(key) in went}

    def asked(self, member: Member, caller: int, now: float) -> int | None:
        """``caller`` asks on behalf of ``member``, which has been seen; returns the caller that it
        replaces, if any. Whoever repeats a request has asked since the first of them, also if
        it gave up in between: with a patience shorter than ours it would never see a straggler left
        out."""
        replaced = self._callers.get(member.replica_id)
        asked_at, gave_up_at = self._gave_up.pop(member.replica_id, (now, now))
        if now - gave_up_at > self._config.heartbeat_timeout_s:
            asked_at = now
        if replaced is not None:
            del self._replica_of[replaced]
            asked_at = self._no_longer_waits(member.replica_id).asked_at
        self._waiting[member.replica_id] = Waiter(member, asked_at)
        self._waiting_bytes += member.num_bytes
        self._told_min_replicas[member.min_replicas] += 1
        if member.has_history:
            self._note_ahead(member.replica_id, member.seen_quorum_id)
        if member.has_history and member.replica_id not in self._veterans:
            self._veterans.add(member.replica_id)
            self._outlook.crowd_changed()
        self._callers[member.replica_id] = caller
        self._replica_of[caller] = member.replica_id
        self._straggling.discard(member.replica_id)
        self._evicted.discard(member.replica_id)
        if self.heals.over(member.replica_id):
            self._outlook.heal_is_over()
        self._awaited.discard(member.replica_id)
        if member.replica_id in self._previous_ids:
            self._outlook.member_asked(asked_at)
        elif asked_at < now:
            self._outlook.crowd_changed()
        if self.previous is None:
            self._gathering = self._gathering.heard(member, now, self._config.join_timeout_s)
        if member.step >= self.committed_step:
            self._loss_accepted = False  # the newer state is back, there is nothing to give up
        return replaced

    def withdrew(self, caller: int, now: float) -> None:
        """``caller`` waits no longer; the group itself is still alive."""
        replica_id = self._replica_of.pop(caller, None)
        if replica_id is None:
            return
        self._gave_up[replica_id] = (self._no_longer_waits(replica_id).asked_at, now)
        del self._callers[replica_id]
        if replica_id in self._previous_ids:
            self._awaited.add(replica_id)
            self._outlook.member_withdrew(now)

    def does(self, replica_id: str, activity: Activity, now: float) -> bool:
        """What a living group tells; whether it changes until when that is waited for."""
        heals = activity.phase is Phase.HEALING and replica_id not in self._waiting
        is_back = heals and self._is_back_to_heal(replica_id)
        has_ended = self.heals.told(replica_id, activity.since if heals else None, now)
        if is_back:
            self._straggling.discard(replica_id)
            self._awaited.add(replica_id)
        elif not has_ended:
            return False
        self._outlook.forget()
        return replica_id in self._awaited

    def _is_back_to_heal(self, replica_id: str) -> bool:
        """Whether it was taken for late because it had not told yet that it heals, or heals once
        more: with a session that breaks that is forgotten, and the next one does not begin with it.
        """
        is_late = replica_id in self._straggling and replica_id in self._previous_ids
        is_news = not self.heals.is_under_way(replica_id) and replica_id not in self._evicted
        return is_late and is_news and self._config.heal_timeout_s is not None

    def evicted(self, replica_ids: Iterable[str]) -> None:
        """These, which are awaited, hang: nobody waits for them until they ask."""
        self._evicted.update(replica_ids)
        self._straggling |= self._evicted
        self._awaited -= self._evicted
        self._outlook.forget()

    def recalled(self) -> list[str]:
        """Who is waited for again, because nobody else of the last quorum is left.

        To be called when somebody is gone: newcomers must not begin a second history while members
        of the first one hang.
        """
        if not self._evicted or any(self.is_expected(key) for key in self._previous_ids):
            return []
        recalled = sorted(self._evicted)
        self._straggling -= self._evicted
        self._awaited |= self._evicted
        self._evicted.clear()
        self._outlook.forget()
        return recalled

    def turned_away(self, replica_id: str, now: float) -> int | None:
        """A group that waits is refused; returns its caller. It may be alive."""
        caller = self._callers.get(replica_id)
        if caller is not None:
            self.withdrew(caller, now)
        return caller

    def gone(self, replica_id: str) -> int | None:
        """The group is dead or has left; returns the caller that waited for it, if any."""
        if self._seen_at.pop(replica_id, None) is None:
            return None
        self.names.went(replica_id)
        for ids in (self._veterans, self._straggling, self._evicted, self._ahead, self._awaited):
            ids.discard(replica_id)
        if replica_id in self._previous_ids:
            self._outlook.crowd_changed()
        if self.heals.gone(replica_id):
            self._outlook.heal_is_over()
        self._announcements.gone(replica_id)
        if self.previous is None:
            self._previous_ids.discard(replica_id)
        if replica_id in self._waiting:
            self._no_longer_waits(replica_id)
        self._gave_up.pop(replica_id, None)
        caller = self._callers.pop(replica_id, None)
        if caller is not None:
            del self._replica_of[caller]
        return caller

    def publish(self, quorum: Quorum) -> tuple[int, ...]:
        """``quorum`` is the answer to its members; returns their callers, in member order."""
        callers = []
        for member in quorum.participants:
            self._no_longer_waits(member.replica_id)
            caller = self._callers.pop(member.replica_id)
            del self._replica_of[caller]
            callers.append(caller)
        self.previous = quorum
        self._previous_ids = {member.replica_id for member in quorum.participants}
        self._awaited = set(self._previous_ids)
        self._evicted.clear()
        self._ahead.clear()
        self._veterans |= self._previous_ids
        self._announcements = Announcements()
        # Its step is lower than before only if that is accepted (rule Q7).
        self.last = LastQuorum(quorum.quorum_id, quorum.max_step)
        self.is_finished = False
        self._loss_accepted = False  # once
        self._gathering = NOBODY_IS_TO_COME
        return tuple(callers)

    def accept_loss(self, now: float) -> bool:
        """An operator gives up the steps that those who ask do not have; False: there are none."""
        if not has_loss_to_accept(self.view(), self._config, now):
            return False
        self._loss_accepted = True
        return True

    def _no_longer_waits(self, replica_id: str) -> Waiter:
        waiter = self._waiting.pop(replica_id)
        self._waiting_bytes -= waiter.member.num_bytes
        told = waiter.member.min_replicas
        self._told_min_replicas[told] -= 1
        if not self._told_min_replicas[told]:
            del self._told_min_replicas[told]
        return waiter

    # -- what follows ----------------------------------------------------------------------------

    def decide(self, now: float) -> Formed | Waiting:
        """Is there a quorum now? Groups whose time is up count as stragglers from here on."""
        view = self.view()
        deadlines = absent_deadlines(view, self._config) if self._waiting else {}
        late = {key for key, at in deadlines.items() if at <= now}
        self.heals.left_out(sorted(late))
        self._straggling |= late
        self._awaited -= late
        decision = decide(view, self._config, now)
        self._outlook.decided(decision.until if isinstance(decision, Waiting) else None)
        if isinstance(decision, Waiting) and len(late) < len(deadlines):
            until = min(at for at in deadlines.values() if at > now)
            if decision.until == (None if until == math.inf else until):
                self._outlook.awaits(until, first_asked_at(view))
        return decision

    def why(self, now: float) -> str:
        """Why there is no quorum; unlike `decide`, a question changes nothing."""
        decision = decide(self.view(), self._config, now)
        return decision.why if isinstance(decision, Waiting) else "a quorum is being published"

    def is_settled(self, now: float) -> bool:
        """True if the last decision still holds whoever else has asked meanwhile (cheap)."""
        num_absent = len(self._seen_at) - len(self._waiting) - len(self._straggling)
        return self._outlook.holds(now, len(self._awaited), num_absent)

    def look_at(self) -> float | None:
        """When to decide again although nothing happened."""
        at = self._outlook.look_at
        return None if at == math.inf else at

    def dead(self, now: float) -> list[str]:
        """The groups that were silent for the heartbeat timeout."""
        dead = []
        for replica_id, seen_at in self._seen_at.items():
            if now < seen_at + self._config.heartbeat_timeout_s:  # as in next_death, to the bit
                break
            dead.append(replica_id)
        return dead

    def next_death(self) -> float | None:
        """When the longest silent group dies, if it stays silent."""
        for seen_at in self._seen_at.values():
            return seen_at + self._config.heartbeat_timeout_s
        return None

    def called(self, name: str) -> list[str]:
        """The living groups with this replica id or, if there is none, with this stable name."""
        return [name] if name in self._seen_at else self.names.of(name)

    def announce(self, asked: Iterable[str]) -> list[str]:
        """Those of ``asked`` that still wait to join the last quorum, and were not announced to it.

        Each is named once in a quorum's life, and of a crowd only the first ones.
        """
        if self.previous is None:
            return []
        new = [key for key in asked if key in self._waiting and key not in self._previous_ids]
        return self._announcements.of_newcomers(new, len(self._previous_ids))

    def quorum_left(self) -> list[str]:
        """The living groups of the last quorum."""
        return [key for key in self._previous_ids if key in self._seen_at]

    def last_members(self) -> Iterable[str]:
        """The groups of the last quorum, also the dead ones."""
        return self._previous_ids

    def is_awaited(self, replica_id: str) -> bool:
        """Whether a group is a living member of the last quorum, and neither asks nor is late."""
        return replica_id in self._awaited

    def is_expected(self, replica_id: str) -> bool:
        """The same of one that may ask already."""
        asks = replica_id in self._waiting and replica_id in self._previous_ids
        return asks or replica_id in self._awaited

    def is_left_out(self, replica_id: str) -> bool:
        """Whether a living group is not waited for until it asks."""
        return replica_id in self._straggling

    @property
    def committed_step(self) -> int:
        """The highest that a quorum of this job has shown, less what was given up since."""
        return self.last.max_step

    @property
    def min_replicas(self) -> int:
        """Of the lighthouse; what the groups tell goes before it."""
        return self._config.min_replicas

    def asking(self) -> list[Member]:
        """The requests that wait for an answer."""
        return [waiter.member for waiter in self._waiting.values()]

    def num_bytes_of_others(self, replica_id: str) -> int:
        """Of a quorum of all who ask, without this group."""
        own = self._waiting.get(replica_id)
        return self._waiting_bytes - (own.member.num_bytes if own else 0)

    def silences(self, now: float) -> list[tuple[str, float]]:
        """The living groups, and for how many seconds each has been silent."""
        return [(replica_id, now - seen_at) for replica_id, seen_at in self._seen_at.items()]

    def waiting(self) -> list[str]:
        """The groups that ask."""
        return list(self._waiting)

    def mourners(self, replica_id: str) -> tuple[str, ...]:
        """Who is to be told that this group is lost, if it was in the last quorum: it and, unless
        they were told of enough others, its living fellows there."""
        if replica_id not in self._previous_ids:
            return ()
        if not self._announcements.of_a_loss():
            return (replica_id,)
        others = (key for key in self._previous_ids if key in self._seen_at and key != replica_id)
        return (replica_id, *others)

    def joining(self, members: tuple[Member, ...]) -> frozenset[str]:
        """Those of ``members`` that were not in the last quorum, or have not healed since."""
        return joining(members, None if self.previous is None else self._previous_ids)

    def is_past(self, replica_id: str, last: LastQuorum) -> bool:
        """Whether the others go on without this group, which was in quorum ``last`` and is back."""
        newest = self.previous.quorum_id if self.previous is not None else 0
        return not self.knows(replica_id) and 0 < last.quorum_id <= newest

    def is_member(self, replica_id: str) -> bool:
        """Of the last quorum that was published here."""
        return self.previous is not None and replica_id in self._previous_ids

    def knows(self, replica_id: str) -> bool:
        return replica_id in self._seen_at

    def __len__(self) -> int:
        return len(self._seen_at)

    def view(self) -> JobView:
        return JobView(
            waiting=self._waiting,
            living=self._seen_at.keys(),
            veterans=self._veterans,
            straggling=self._straggling,
            previous=self._previous_ids,
            committed_step=self.committed_step,
            told_min_replicas=max(self._told_min_replicas, default=0),
            loss_accepted=self._loss_accepted,
            is_finished=self.is_finished,
            ahead=self._believed_ahead() if self._ahead else self._ahead,
            gathering=self._gathering,
            heals=self.heals.known,
        )


class Heals:
    """Which groups heal, and who was left out for that (rule Q16).

    Those of one job's living groups that have not asked since; ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self.known: dict[str, Heal] = {}
        self._left_out: dict[str, Heal] = {}  # to be reported
        self._reported: set[str] = set()

    def told(self, replica_id: str, since: float | None, now: float) -> bool:
        """A group heals since ``since``, or (None) does something else; whether a heal has ended
        with this."""
        heal = self.known.get(replica_id)
        if since is not None:
            self.known[replica_id] = Heal(min(since, heal.since) if heal else since)
            return False
        if heal is None or heal.ended_at is not None:
            return False
        self.known[replica_id] = Heal(heal.since, now)
        return True

    def is_under_way(self, replica_id: str) -> bool:
        """As far as it has told."""
        heal = self.known.get(replica_id)
        return heal is not None and heal.ended_at is None

    def over(self, replica_id: str) -> bool:
        """The group asks; whether it has healed since the last time."""
        return self.known.pop(replica_id, None) is not None

    def gone(self, replica_id: str) -> bool:
        """Whether it healed, or had healed and not asked yet."""
        self._left_out.pop(replica_id, None)
        self._reported.discard(replica_id)
        return self.known.pop(replica_id, None) is not None

    def left_out(self, replica_ids: Iterable[str]) -> None:
        """Nobody waits for these any longer."""
        for key in replica_ids:
            heal = self.known.get(key)
            if heal is not None and heal.ended_at is None and key not in self._reported:
                self._left_out[key] = heal

    def take_left_out(self) -> list[tuple[str, float]]:
        """Who was left out while it healed, and since when it did; each group is told once."""
        taken = [(key, heal.since) for key, heal in self._left_out.items()]
        self._reported.update(self._left_out)
        self._left_out.clear()
        return taken


class Announcements:
    """How much the members of one quorum are told of who comes and who is lost (rule Q22)."""

    def __init__(self) -> None:
        self._newcomers: set[str] = set()
        self._num_losses = 0

    def of_newcomers(self, waiting: Iterable[str], num_members: int) -> list[str]:
        """Those of ``waiting`` to tell ``num_members`` of: each once, of a crowd the first ones."""
        fresh = [key for key in waiting if key not in self._newcomers]
        limit = min(MAX_ANNOUNCED, max(1, MAX_ANNOUNCEMENTS // num_members))
        del fresh[max(0, limit - len(self._newcomers)) :]
        self._newcomers.update(fresh)
        return fresh

    def of_a_loss(self) -> bool:
        """Whether to tell of another one."""
        self._num_losses += 1
        return self._num_losses <= MAX_LOSSES_TOLD

    def gone(self, replica_id: str) -> None:
        self._newcomers.discard(replica_id)
