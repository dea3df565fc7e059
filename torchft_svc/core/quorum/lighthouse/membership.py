"""What each group of a job is: alive, asking for a quorum, a member of the last one.

`Membership` keeps the data for the rules of `torchft_svc.core.quorum.lighthouse.quorum`. While a
group is awaited, the cost of a request does not depend on the number of groups.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from torchft_svc.core.quorum.activity import Activity, Phase
from torchft_svc.core.quorum.names import Names, stable_name
from torchft_svc.core.quorum.types import NO_QUORUM, LastQuorum, Member, Quorum, QuorumConfig

# How long a lighthouse that is new to a job waits for groups of its quorum: managers that are at
# another lighthouse of their list look every second whether this one answers.
GATHER_S = 2.0
# Managers that know only this lighthouse try it at least every half second, so all of them are back
# so long after its start. Each new session takes it 1 to 2 ms.
ALL_BACK_S, EACH_BACK_S = 0.75, 0.002


class GroupState(enum.Enum):
    """What a living group of a job is."""

    __hash__ = object.__hash__  # by identity: quick

    ASKING = "a member of the last quorum, and asks for the next one"
    JOINING = "no member of the last quorum, and asks for the next one"
    AWAITED = "a member of the last quorum that has not asked again"
    HEALING = "the same, and reports that it heals"
    HEALED = "the same, and its heal is over"
    ABSENT = "was in a quorum of this job, but not in the last one, and has not asked"
    NEWCOMER = "was in no quorum of this job, and has not asked"
    STRAGGLING = "did not ask in time: nobody waits for it until it asks"
    EVICTED = "hangs while members of its quorum wait: nobody waits for it until it asks"


class Tenure(enum.Enum):
    """Which quorum of its job a group was in."""

    __hash__ = object.__hash__

    MEMBER = "the last one"
    VETERAN = "an earlier one"
    NEW = "none"


class Conduct(enum.Enum):
    """What a group does about the next quorum."""

    __hash__ = object.__hash__

    ASKS = "asks"
    SILENT = "has not asked"
    HEALS = "has not asked, and heals"
    HAS_HEALED = "has not asked since its heal"
    LATE = "has not asked in time"
    HANGS = "has not asked, and hangs"


# All that a living group can be. Whether and until when it is waited for follows from its state:
# see `torchft_svc.core.quorum.lighthouse.quorum.patience`.
_M, _V, _N = Tenure.MEMBER, Tenure.VETERAN, Tenure.NEW
STATES: dict[Conduct, dict[Tenure, GroupState]] = {
    Conduct.ASKS: {_M: GroupState.ASKING, _V: GroupState.JOINING, _N: GroupState.JOINING},
    Conduct.SILENT: {_M: GroupState.AWAITED, _V: GroupState.ABSENT, _N: GroupState.NEWCOMER},
    Conduct.HEALS: {_M: GroupState.HEALING, _V: GroupState.ABSENT, _N: GroupState.NEWCOMER},
    Conduct.HAS_HEALED: {_M: GroupState.HEALED, _V: GroupState.ABSENT, _N: GroupState.NEWCOMER},
    Conduct.LATE: {_M: GroupState.STRAGGLING, _V: GroupState.STRAGGLING, _N: GroupState.STRAGGLING},
    Conduct.HANGS: {_M: GroupState.EVICTED},
}
# Living members of the last quorum that have not asked, and may still be waited for.
AWAITED_MEMBERS = (GroupState.AWAITED, GroupState.HEALING, GroupState.HEALED)
SILENT = (*AWAITED_MEMBERS, GroupState.ABSENT, GroupState.NEWCOMER)


@dataclass(frozen=True, slots=True)
class Waiter:
    """A group whose request waits for an answer since ``asked_at``."""

    member: Member
    asked_at: float


@dataclass(frozen=True, slots=True)
class Heal:
    """A group heals since ``since``, until ``ended_at`` (None: it still does)."""

    since: float
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Gathering:
    """How long a lighthouse that is new to a job waits for groups not seen yet (rules Q11, Q25).

    Groups that ask report a last quorum of ``num_groups``; the others are waited for ``until`` then
    (None: nobody is). The lighthouse has published no quorum of the job. Otherwise the first group
    would train alone, and if the others are still at another lighthouse, both halves would commit
    the same steps.

    ``newest``: the newest quorum that those who ask know of, and how far it has come at least; they
    may have no session, or another manager, which could not report it (rule Q12).
    ``since``: the first of these requests. ``is_sole``: there is no other lighthouse.
    ``starts_at``: nobody that has asked was in a quorum of the job before, so this is a cold start:
    groups that are started together with the first one are waited for until then (None: it is not).
    """

    num_groups: int = 0
    until: float | None = None
    since: float = 0.0
    is_sole: bool = True
    newest: LastQuorum = NO_QUORUM
    starts_at: float | None = None

    def after_request(
        self, member: Member, now: float, config: QuorumConfig, began_at: float
    ) -> Gathering:
        """What is waited for after another request; ``began_at``: since when this lighthouse
        serves."""
        newest = max(self.newest, member.last_quorum) if member.has_history else self.newest
        if member.last_num_groups < 2:  # a newcomer, or one that was alone: there is nobody to come
            starts_at = now + config.startup_wait_s if self.starts_at is None else self.starts_at
            is_new = newest == NO_QUORUM and self.until is None
            return replace(self, newest=newest, starts_at=starts_at if is_new else None)
        num_groups = max(self.num_groups, member.last_num_groups)
        since = now if self.until is None else self.since
        is_sole = self.is_sole and member.sole_lighthouse
        until = since + min(GATHER_S, config.join_timeout_s)
        all_back_at = began_at + ALL_BACK_S + num_groups * EACH_BACK_S
        if is_sole and since <= all_back_at:
            until = min(until, all_back_at)
        return Gathering(num_groups, until, since, is_sole, newest)


NOBODY_IS_TO_COME = Gathering()


@dataclass(slots=True)
class GroupRecord:
    """A living group; its ``state`` follows from the other fields.

    ``caller`` waits for the answer to its request (None: it does not ask), which needs
    ``num_bytes`` in a quorum. ``gave_up``: since when it had asked, and until when. ``left_out``:
    LATE or HANGS, if it is not awaited. ``heal``: the last one since it asked. ``is_reported``: it
    was left out while it healed.
    """

    seen_at: float
    tenure: Tenure
    state: GroupState = GroupState.NEWCOMER
    caller: int | None = None
    num_bytes: int = 0
    gave_up: tuple[float, float] | None = None
    left_out: Conduct | None = None
    heal: Heal | None = None
    is_reported: bool = False

    @property
    def conduct(self) -> Conduct:
        if self.caller is not None:
            return Conduct.ASKS
        if self.left_out is not None:
            return self.left_out
        if self.heal is None:
            return Conduct.SILENT
        return Conduct.HEALS if self.heal.ended_at is None else Conduct.HAS_HEALED


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """All that a decision depends on; except for ``previous``, all ids are of groups in ``living``.

    ``groups``: the living groups by state. ``previous``: the members of the last quorum; before the
    first one, the groups that report the newest quorum; ``last_quorum_id`` is its id. ``first``:
    the time of the first request, and of the first heal that ended. ``heals``: of groups that have
    not asked since.
    ``num_veterans``: living groups that took part in a quorum of the job.
    ``requested_min_replicas``: the largest of the requests (0: none). ``loss_accepted``: an
    operator gave up the steps that the groups that ask do not have. ``is_finished``: the last run
    ended on purpose. ``ahead``: groups that report a newer quorum than the last one here, because
    the job went on elsewhere, and are believed. ``gathering`` matters until the first quorum here;
    ``num_gone`` groups had reported the last quorum here, and are gone. ``begun_anew``: the id of
    the first quorum here, while groups that were in an earlier one are believed (0: they are not).
    """

    waiting: Mapping[str, Waiter]
    groups: Mapping[GroupState, Set[str]]
    living: Set[str]
    previous: Set[str]
    first: Mapping[GroupState, float]
    heals: Mapping[str, Heal] = field(default_factory=dict)
    num_veterans: int = 0
    committed_step: int = 0
    requested_min_replicas: int = 0
    loss_accepted: bool = False
    is_finished: bool = False
    ahead: Set[str] = frozenset()
    last_quorum_id: int = 0
    gathering: Gathering = NOBODY_IS_TO_COME
    num_gone: int = 0
    begun_anew: int = 0


class Membership:
    """The groups of one job. ``now`` is monotonic seconds."""

    def __init__(
        self,
        config: QuorumConfig,
        last: LastQuorum = NO_QUORUM,
        *,
        is_finished: bool = False,
        began_at: float = -math.inf,
    ) -> None:
        """Begin with the ``last`` quorum that is known; ``is_finished``: its run has ended on
        purpose. ``began_at``: since when the lighthouse serves."""
        self._config = config
        self._began_at = began_at
        self.is_finished = is_finished
        self._known: OrderedDict[str, GroupRecord] = OrderedDict()  # the longest silent first
        self._waiting: dict[str, Waiter] = {}  # the requests of those that ask
        self._replica_of: dict[int, str] = {}  # by their callers
        # Derived from the records, or from the requests.
        self.groups: dict[GroupState, set[str]] = {state: set() for state in GroupState}
        self._num_veterans = 0
        self._waiting_bytes = 0  # in a quorum
        self._requested_min_replicas: Counter[int] = Counter()  # few different ones
        # Not later than the first request of those that ask, or the first heal that was over.
        self.first: dict[GroupState, float] = {}

        self.names = Names()
        self.ahead: set[str] = set()  # living, report a newer quorum than the last one here
        self.previous: Quorum | None = None  # published here
        self._previous_ids: set[str] = set()  # of its members, or those that report the newest
        self.last = last
        self._loss_accepted = False
        self._gathering = NOBODY_IS_TO_COME
        self._were_here: set[str] = set()  # names that have reported ``last`` as their last quorum
        self._begun_anew = 0  # the first quorum here, if nobody in it had been in one before (F8)

    # -- what happened ---------------------------------------------------------------------------

    def seen(self, replica_id: str, now: float) -> None:
        """Record a sign of life."""
        group = self._known.get(replica_id)
        if group is None:
            self.names.add(replica_id)
            group = self._known[replica_id] = GroupRecord(now, Tenure.NEW)
            # A member was silent for too long, but is back.
            was_member = replica_id in self._previous_ids
            self._set_tenure(replica_id, Tenure.MEMBER if was_member else Tenure.NEW)
        group.seen_at = now
        self._known.move_to_end(replica_id)

    def reported(self, replica_id: str, last: LastQuorum) -> None:
        """Record the ``last`` quorum that a group reports to have been in, maybe elsewhere.

        Until one is published here, the newest reported quorum stands for it: newcomers do not
        continue without its members, and no group continues without its step.
        """
        if not last.quorum_id:
            return
        self._was_in(replica_id, last.quorum_id)
        if self.previous is not None or last.quorum_id < self.last.quorum_id:
            return
        if last.quorum_id > self.last.quorum_id:
            self._end_quorum(self._previous_ids)
            self._previous_ids.clear()
            self._were_here.clear()
        if last > self.last:
            self.last = last
            self.is_finished = False
            self._loss_accepted = False  # it was about an earlier step
        self._previous_ids.add(replica_id)
        self._were_here.add(stable_name(replica_id))
        self._set_tenure(replica_id, Tenure.MEMBER)

    def _was_in(self, replica_id: str, quorum_id: int) -> None:
        """The group reports a quorum: if that is newer than the last here, the job may have gone
        on there."""
        if self._known[replica_id].tenure is Tenure.NEW:
            self._set_tenure(replica_id, Tenure.VETERAN)
        if self.previous is not None and quorum_id > self.last.quorum_id:
            self.ahead.add(replica_id)

    def asked(self, member: Member, caller: int, now: float) -> int | None:
        """Record that ``caller`` asks for ``member``, which has been seen; returns the caller that
        it replaces, if any.

        A repeated request counts from the first one, also if it was withdrawn in between: a client
        with a shorter timeout than ours would otherwise never see a straggler left out.
        """
        replica_id = member.replica_id
        group = self._known[replica_id]
        replaced = group.caller
        asked_at, gave_up_at = group.gave_up or (now, now)
        if now - gave_up_at > self._config.heartbeat_timeout_s:
            asked_at = now
        if replaced is not None:
            asked_at = self._remove_request(replica_id, group).asked_at
        self._waiting[replica_id] = Waiter(member, asked_at)
        group.num_bytes = member.num_bytes
        self._waiting_bytes += group.num_bytes
        self._requested_min_replicas[member.min_replicas] += 1
        self._replica_of[caller] = replica_id
        group.caller, group.gave_up, group.left_out, group.heal = caller, None, None, None
        self._place(replica_id, group)
        if member.has_history:
            self._was_in(replica_id, member.seen_quorum_id)
        if self.previous is None:
            self._gathering = self._gathering.after_request(
                member, now, self._config, self._began_at
            )
        if member.step >= self.committed_step:
            self._loss_accepted = False  # the newer state is back, there is nothing to give up
        return replaced

    def withdrew(self, caller: int, now: float) -> None:
        """Record that ``caller`` waits no longer; its group is still alive."""
        replica_id = self._replica_of.get(caller)
        if replica_id is None:
            return
        group = self._known[replica_id]
        group.gave_up = (self._remove_request(replica_id, group).asked_at, now)
        self._place(replica_id, group)

    def record_activity(self, replica_id: str, activity: Activity, now: float) -> bool:
        """Record what a living group reports to do; returns whether its state has changed."""
        group = self._known[replica_id]
        heal = group.heal
        if activity.phase is Phase.HEALING and group.caller is None:
            if self._is_back_to_heal(group):
                group.left_out = None
            group.heal = Heal(min(activity.since, heal.since) if heal else activity.since)
        elif heal is not None and heal.ended_at is None:
            group.heal = Heal(heal.since, now)
        else:
            return False
        before = group.state
        self._place(replica_id, group)
        return group.state is not before

    def _is_back_to_heal(self, group: GroupRecord) -> bool:
        """Whether the group was marked late only because its report that it heals, or heals again,
        was lost with a session that broke: the next session does not repeat it."""
        is_late = group.state is GroupState.STRAGGLING and group.tenure is Tenure.MEMBER
        is_news = group.heal is None or group.heal.ended_at is not None
        return is_late and is_news and self._config.heal_timeout_s is not None

    def evicted(self, replica_ids: Iterable[str]) -> None:
        """Leave out awaited groups that hang: they are not awaited until they ask."""
        for replica_id in replica_ids:
            self._leave_out(replica_id, Conduct.HANGS)

    def left_out(self, replica_ids: Iterable[str]) -> list[tuple[str, float]]:
        """Leave out groups that have not asked in time. Returns those that heal, and since when,
        each only once."""
        healing = []
        for replica_id in replica_ids:
            self._leave_out(replica_id, Conduct.LATE)
            group = self._known[replica_id]
            if group.heal and group.heal.ended_at is None and not group.is_reported:
                group.is_reported = True
                healing.append((replica_id, group.heal.since))
        return healing

    def recalled(self) -> list[str]:
        """Await evicted groups again if no other member of the last quorum is left; returns them.

        Newcomers must not start a second history while these hang. To be called when a group is
        gone."""
        evicted = self.groups[GroupState.EVICTED]
        if not evicted or self.groups[GroupState.ASKING] or self.num_awaited:
            return []
        recalled = sorted(evicted)
        for replica_id in recalled:
            self._leave_out(replica_id, None)
        return recalled

    def turned_away(self, replica_id: str, now: float) -> int | None:
        """Remove a request that is refused; returns its caller. The group may be alive."""
        group = self._known.get(replica_id)
        caller = group.caller if group else None
        if caller is not None:
            self.withdrew(caller, now)
        return caller

    def gone(self, replica_id: str) -> int | None:
        """Forget a group that is dead or has left; returns the caller that waited for it, if
        any."""
        group = self._known.pop(replica_id, None)
        if group is None:
            return None
        caller = group.caller
        if caller is not None:
            self._remove_request(replica_id, group)
        self._remove(replica_id, group.state)
        self._num_veterans -= group.tenure is not Tenure.NEW
        self.names.remove(replica_id)
        self.ahead.discard(replica_id)
        if self.previous is None:
            self._previous_ids.discard(replica_id)
        return caller

    def publish(self, quorum: Quorum) -> tuple[int, ...]:
        """Make ``quorum`` the last one; returns the callers of its members, in member order."""
        callers = []
        before = self._previous_ids
        self._previous_ids = {member.replica_id for member in quorum.participants}
        self._end_quorum(before - self._previous_ids)
        for member in quorum.participants:
            group = self._known[member.replica_id]
            assert group.caller is not None
            callers.append(group.caller)
            self._remove_request(member.replica_id, group)
            self._set_tenure(member.replica_id, Tenure.MEMBER)
        if self.previous is None and self.last == NO_QUORUM:
            knows_one = any(member.has_history for member in quorum.participants)
            self._begun_anew = 0 if knows_one else quorum.quorum_id
        self.previous = quorum
        self.ahead.clear()
        # Its step is lower than before only if that is accepted (rule Q7).
        self.last = LastQuorum(quorum.quorum_id, quorum.max_step)
        self.is_finished = False
        self._loss_accepted = False  # once
        self._gathering = NOBODY_IS_TO_COME
        self._were_here.clear()
        return tuple(callers)

    def accept_loss(self) -> None:
        """Let the next quorum go back behind the committed step."""
        self._loss_accepted = True

    # -- the records -----------------------------------------------------------------------------

    def _place(self, replica_id: str, group: GroupRecord) -> None:
        """Update the state of a group that has changed."""
        state = STATES[group.conduct][group.tenure]
        if state is not group.state:
            self._remove(replica_id, group.state)
            group.state = state
        self.groups[state].add(replica_id)
        if state is GroupState.ASKING or state is GroupState.JOINING:
            since = self._waiting[replica_id].asked_at
        elif state is GroupState.HEALED and group.heal and group.heal.ended_at is not None:
            since = group.heal.ended_at
        else:
            return
        self.first[state] = min(since, self.first.get(state, math.inf))

    def _remove(self, replica_id: str, state: GroupState) -> None:
        self.groups[state].discard(replica_id)
        if not self.groups[state]:
            self.groups[state].clear()  # going through the empty places of a large set takes long
            self.first.pop(state, None)

    def _set_tenure(self, replica_id: str, tenure: Tenure) -> None:
        group = self._known[replica_id]
        self._num_veterans += (tenure is not Tenure.NEW) - (group.tenure is not Tenure.NEW)
        group.tenure = tenure
        self._place(replica_id, group)

    def _end_quorum(self, replica_ids: Set[str]) -> None:
        """These members of the last quorum are not in the new one."""
        for replica_id in self._known.keys() & replica_ids:
            group = self._known[replica_id]
            group.left_out = group.left_out and Conduct.LATE
            self._set_tenure(replica_id, Tenure.VETERAN)

    def _leave_out(self, replica_id: str, why: Conduct | None) -> None:
        group = self._known[replica_id]
        group.left_out = why
        self._place(replica_id, group)

    def _remove_request(self, replica_id: str, group: GroupRecord) -> Waiter:
        """Remove the request of a group; `_place` must follow."""
        assert group.caller is not None
        del self._replica_of[group.caller]
        group.caller = None
        waiter = self._waiting.pop(replica_id)
        self._waiting_bytes -= group.num_bytes
        group.num_bytes = 0
        wanted = waiter.member.min_replicas
        self._requested_min_replicas[wanted] -= 1
        if not self._requested_min_replicas[wanted]:
            del self._requested_min_replicas[wanted]
        return waiter

    # -- what follows ----------------------------------------------------------------------------

    def view(self, now: float) -> JobView:
        """All that a decision depends on."""
        is_young = now < self._began_at + self._config.heartbeat_timeout_s
        return JobView(
            waiting=self._waiting,
            groups=self.groups,
            living=self._known.keys(),
            previous=self._previous_ids,
            first=self._first_of_all(),
            heals=self._heals(),
            num_veterans=self._num_veterans,
            committed_step=self.committed_step,
            requested_min_replicas=max(self._requested_min_replicas, default=0),
            loss_accepted=self._loss_accepted,
            is_finished=self.is_finished,
            ahead=self._believed_ahead() if self.ahead else self.ahead,
            last_quorum_id=self.last.quorum_id,
            gathering=self._gathering,
            num_gone=sum(not self.names.owners(name) for name in self._were_here),
            begun_anew=self._begun_anew if is_young else 0,
        )

    def _first_of_all(self) -> dict[GroupState, float]:
        """The exact value of `first`, which matters only if a group is awaited (see `patience`)."""
        awaited = AWAITED_MEMBERS if self.groups[GroupState.ASKING] else SILENT
        if not any(self.groups[state] for state in awaited):
            return self.first
        return {
            state: min(self._since(replica_id, state) for replica_id in self.groups[state])
            for state in self.first
        }

    def _since(self, replica_id: str, state: GroupState) -> float:
        """The time at which its request came, or its heal ended."""
        if state is not GroupState.HEALED:
            return self._waiting[replica_id].asked_at
        heal = self._known[replica_id].heal
        assert heal is not None and heal.ended_at is not None  # noqa: PT018 - both are one claim
        return heal.ended_at

    def _heals(self) -> dict[str, Heal]:
        silent = (key for state in SILENT for key in self.groups[state])
        return {key: heal for key in silent if (heal := self._known[key].heal) is not None}

    def sharpen(self, view: JobView) -> None:
        """Keep the exact times of ``view``."""
        self.first = dict(view.first)

    def _believed_ahead(self) -> set[str]:
        """The groups that report that the job went on elsewhere, and had a name in the last quorum
        here.

        Any group may report that. So it counts only if more groups of the last quorum, by name,
        report it than live without reporting it: those have been here all the time.
        """
        names = {stable_name(replica_id) for replica_id in self._previous_ids}
        stay = {stable_name(key) for key in self._previous_ids - self.ahead if key in self._known}
        went = {stable_name(key) for key in self.ahead} & names - stay
        if len(went) <= len(stay):
            return set()
        return {key for key in self.ahead if stable_name(key) in went}

    def dead(self, now: float) -> list[str]:
        """The groups that were silent for the heartbeat timeout."""
        dead = []
        for replica_id, group in self._known.items():
            if now < group.seen_at + self._config.heartbeat_timeout_s:  # as below, to the bit
                break
            dead.append(replica_id)
        return dead

    def next_death(self) -> float | None:
        """The time at which the longest silent group dies, if it stays silent."""
        group = next(iter(self._known.values()), None)
        return None if group is None else group.seen_at + self._config.heartbeat_timeout_s

    def called(self, name: str) -> list[str]:
        """The living groups with this replica id or, if there is none, with this stable name."""
        return [name] if name in self._known else self.names.owners(name)

    def quorum_left(self) -> list[str]:
        """The living groups of the last quorum."""
        return [key for key in self._previous_ids if key in self._known]

    def stragglers(self) -> list[str]:
        """The living groups of the last quorum that did not ask for the next one in time. Others
        that do not ask: those that report a newer one or, before the first, an older one (Q12)."""
        left = sorted(self.groups[GroupState.STRAGGLING] | self.groups[GroupState.ABSENT])
        were_in = (Tenure.VETERAN, Tenure.MEMBER) if self.previous is None else (Tenure.MEMBER,)
        return [each for each in left if self._known[each].tenure in were_in or each in self.ahead]

    @property
    def previous_ids(self) -> Set[str]:
        """The groups of the last quorum, also the dead ones."""
        return self._previous_ids

    @property
    def num_reported(self) -> int:
        """How many groups, by name, have reported ``last``, before one is published here."""
        return len(self._were_here)

    @property
    def num_awaited(self) -> int:
        """How many living members of the last quorum have not asked, and may be waited for."""
        return sum(len(self.groups[state]) for state in AWAITED_MEMBERS)

    @property
    def num_have_asked(self) -> int:
        """How many living groups have asked for a quorum once, or were in one before."""
        newcomers = self.groups[GroupState.NEWCOMER]
        return len(self._known) - sum(self._known[each].gave_up is None for each in newcomers)

    def state(self, replica_id: str) -> GroupState | None:
        """The state of a group (None: it is not alive)."""
        group = self._known.get(replica_id)
        return group.state if group else None

    @property
    def committed_step(self) -> int:
        """The highest that a quorum of this job has shown, less what was given up since."""
        newest = self._gathering.newest
        return max(self.last.max_step, newest.max_step if newest >= self.last else 0)

    @property
    def min_replicas(self) -> int:
        """The setting of the lighthouse; groups may ask for more."""
        return self._config.min_replicas

    @property
    def gathers_until(self) -> float | None:
        """The end of the wait for groups that this lighthouse has not seen: for those of an earlier
        quorum (`Gathering.until`), or else of a cold start (`Gathering.starts_at`)."""
        gathering = self._gathering
        return gathering.starts_at if gathering.until is None else gathering.until

    def asking(self) -> list[Member]:
        """The groups that ask, as they describe themselves."""
        return [waiter.member for waiter in self._waiting.values()]

    def num_bytes_of_others(self, replica_id: str) -> int:
        """The size of a quorum of all groups that ask, without this one."""
        group = self._known.get(replica_id)
        return self._waiting_bytes - (group.num_bytes if group else 0)

    def silences(self, now: float) -> list[tuple[str, float]]:
        """The living groups, each with the seconds since its last sign of life."""
        return [(replica_id, now - group.seen_at) for replica_id, group in self._known.items()]

    def waiting(self) -> list[str]:
        """The groups that ask."""
        return list(self._waiting)

    def is_past(self, replica_id: str, last: LastQuorum) -> bool:
        """Whether the others continue without this group, which was in quorum ``last``: if it was
        not gone, its news may be lost. One that heals may go on (rule Q4), one that asks is in."""
        was_here = self.previous is not None and 0 < last.quorum_id <= self.last.quorum_id
        group = self._known.get(replica_id)
        if group is None or not was_here:
            return was_here
        is_in = group.tenure is Tenure.MEMBER or group.caller is not None
        return not is_in and (group.heal is None or group.heal.ended_at is not None)

    def is_member(self, replica_id: str) -> bool:
        """Whether the group is in the last quorum that was published here."""
        return self.previous is not None and replica_id in self._previous_ids

    def seen_at(self, replica_id: str) -> float:
        """The time of the last sign of life of a living group."""
        return self._known[replica_id].seen_at

    def asked_at(self, replica_id: str) -> float:
        """The time at which a group that asks has asked first."""
        return self._waiting[replica_id].asked_at

    def knows(self, replica_id: str) -> bool:
        """Whether the group is alive."""
        return replica_id in self._known

    def __len__(self) -> int:
        return len(self._known)
