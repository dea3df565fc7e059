"""A lighthouse for one job that remembers little and decides again after every event.

It is woken at every instant, keeps lists, and uses the twin of the rules: slow, obviously right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.core import twin
from support.core.views import job_view
from torchft_svc.core.quorum.lighthouse.membership import (
    ALL_BACK_S,
    EACH_BACK_S,
    GATHER_S,
    Gathering,
    JobView,
    Waiter,
)
from torchft_svc.core.quorum.types import NO_QUORUM, LastQuorum, Member, Quorum, QuorumConfig


@dataclass
class Request:
    member: Member
    caller: int
    asked_at: float
    held: bool  # an earlier incarnation has the name


@dataclass
class Naive:
    """A lighthouse; its ``log``: quorums, losses, and refused callers with a word why."""

    config: QuorumConfig
    log: list[tuple[Any, ...]] = field(default_factory=list)
    groups: dict[str, float] = field(default_factory=dict)  # last sign of life, the eldest first
    requests: list[Request] = field(default_factory=list)
    gave_up: list[tuple[Request, float]] = field(default_factory=list)
    stragglers: set[str] = field(default_factory=set)
    veterans: set[str] = field(default_factory=set)
    previous: Quorum | None = None
    newest: LastQuorum = NO_QUORUM  # known here, or reported
    reported: dict[str, LastQuorum] = field(
        default_factory=dict
    )  # by the living, of other lighthouses
    ahead: set[str] = field(
        default_factory=set
    )  # reported of a newer quorum than the last one here
    last_id: int = 0
    reported_id: int = 0
    loss_accepted: bool = False
    reported_num_groups: list[tuple[int, float]] = field(default_factory=list)  # and when
    others_known: bool = False  # lighthouses; by one of them
    asked_alone: list[float] = field(default_factory=list)  # newcomers, or that were alone: when
    all_reported: list[tuple[str, int]] = field(
        default_factory=list
    )  # as reported, also by the dead
    questions: list[LastQuorum] = field(default_factory=list)  # what those that asked knew of
    begun_anew: int = 0  # the first quorum, if none of it knew another one

    def request(self, member: Member, caller: int, now: float) -> None:
        self._sign_of_life(member.replica_id, now)
        self.reported_id = max(self.reported_id, member.seen_quorum_id)
        asked_at = now
        for request in list(self.requests):
            if request.member.replica_id == member.replica_id:
                self._refuse(request, "superseded")
                asked_at = request.asked_at
        held = self._is_held(member.replica_id)
        for request, gave_up_at in [] if held else list(self.gave_up):
            if request.member.replica_id == member.replica_id:
                self.gave_up.remove((request, gave_up_at))
                if now - gave_up_at <= self.config.heartbeat_timeout_s:
                    asked_at = request.asked_at
        if not held:
            self.stragglers.discard(member.replica_id)
            self._has_come(member, now)
        self.requests.append(Request(member, caller, asked_at, held))
        self._settle_job(now)

    def withdraw(self, caller: int, now: float) -> None:
        for request in [each for each in self.requests if each.caller == caller]:
            self.requests.remove(request)
            if not request.held:
                self.gave_up.append((request, now))
        self._settle_job(now)

    def heartbeat(self, replica_id: str, now: float) -> None:
        self._sign_of_life(replica_id, now)
        self._settle_job(now)

    def hello(self, replica_id: str, last: LastQuorum, now: float) -> None:
        self._sign_of_life(replica_id, now)
        self.reported_id = max(self.reported_id, last.quorum_id)
        if last.quorum_id > 0:
            self.veterans.add(replica_id)
            if self.previous is not None and last.quorum_id > self.newest.quorum_id:
                self.ahead.add(replica_id)
            if self.previous is None:
                self.reported[replica_id] = max(last, self.reported.get(replica_id, last))
                self.all_reported.append((replica_id, last.quorum_id))
                if last > self.newest:
                    self.newest = last
                    self.loss_accepted = False
        self._settle_job(now)

    def leave(self, replica_id: str, now: float) -> None:
        if replica_id in self.groups:
            self._lose(replica_id)
        self._settle_job(now)

    def accept_loss(self, now: float) -> None:
        """Refused, with a word in the log, unless nothing but the policy could hold them back:
        they may be too few, but all who could have the newer state are here, or are late."""
        asking = [request.member for request in self.requests if not request.held]
        inside = self._before()
        if any(member.shrink_only and member.replica_id in inside for member in asking):
            asking = [member for member in asking if member.replica_id in inside]
        wrong = twin.not_believed(self.view(now), self.config, asking)
        asking = [member for member in asking if member not in wrong]
        policy = self.config.on_step_regression
        holds = policy == "hold" or (policy == "auto" and len(self.veterans) > 0)
        behind = asking != [] and all(member.step < self._floor() for member in asking)
        awaited = behind and twin.still_waited_for(self.view(now), self.config, now) != []
        if not (holds and behind) or awaited:
            self.log.append(("nothing to accept",))
            return
        self.loss_accepted = True
        self._settle_job(now)

    def time_passed(self, now: float) -> None:
        for replica_id, seen_at in list(self.groups.items()):
            if now - seen_at >= self.config.heartbeat_timeout_s:
                self._lose(replica_id)
        self._settle_job(now)

    def view(self, now: float) -> JobView:
        asking = [request for request in self.requests if not request.held]
        return job_view(
            waiting={each.member.replica_id: Waiter(each.member, each.asked_at) for each in asking},
            living=set(self.groups),
            veterans=set(self.veterans),
            straggling=set(self.stragglers),
            previous=self._before(),
            committed_step=self._floor(),
            requested_min_replicas=max((each.member.min_replicas for each in asking), default=0),
            loss_accepted=self.loss_accepted,
            ahead=self._believed(),
            gathering=self._gathering(),
            num_gone=self._num_gone(),
            begun_anew=self.begun_anew if now < self.config.heartbeat_timeout_s else 0,
        )

    def _believed(self) -> set[str]:
        """The believed among those who report a newer quorum: the last one had their names.

        None is believed if as many of the last one live, and do not report that.
        """
        loyal = {each for each in self._before() if each in self.groups and each not in self.ahead}
        loyal_names = {each.split(":")[0] for each in loyal}
        old_names = {each.split(":")[0] for each in self._before()} - loyal_names
        found = {each for each in self.ahead if each.split(":")[0] in old_names}
        is_most = len({each.split(":")[0] for each in found}) > len(loyal_names)
        return found if is_most else set()

    def _floor(self) -> int:
        """How far the job is at least, by sessions, or by questions of a quorum that is not
        older."""
        asked = max(self.questions, default=NO_QUORUM)
        is_news = asked.quorum_id >= self.newest.quorum_id
        return max(self.newest.max_step, asked.max_step if is_news else 0)

    def _before(self) -> set[str]:
        """The members of the last quorum, as far as this lighthouse can know."""
        if self.previous is not None:
            return {member.replica_id for member in self.previous.participants}
        newest = self.newest.quorum_id
        return {
            replica_id for replica_id, last in self.reported.items() if last.quorum_id == newest
        }

    def _gathering(self) -> Gathering:
        if not self.reported_num_groups:
            knows_job = max(self.questions, default=NO_QUORUM) > NO_QUORUM
            if knows_job or not self.asked_alone:
                return Gathering()
            return Gathering(starts_at=min(self.asked_alone) + self.config.startup_wait_s)
        first = min(now for _, now in self.reported_num_groups)
        most = max(num for num, _ in self.reported_num_groups)
        until = first + min(GATHER_S, self.config.join_timeout_s)
        all_back_at = ALL_BACK_S + most * EACH_BACK_S  # it has begun at 0
        if not self.others_known and first <= all_back_at:
            until = min(until, all_back_at)
        return Gathering(most, until)

    def _num_gone(self) -> int:
        """Groups, by name, that have reported of the newest quorum, and live no more."""
        if self.previous is not None:
            return 0
        reported = {
            each.split(":")[0] for each, id_ in self.all_reported if id_ == self.newest.quorum_id
        }
        return len(reported - {each.split(":")[0] for each in self.groups})

    def _settle_job(self, now: float) -> None:
        for request in self.requests:
            if request.held and not self._is_held(request.member.replica_id):
                request.held = False
                self.stragglers.discard(request.member.replica_id)
                request.asked_at = now
                self._has_come(request.member, now)
        if not self.groups:  # the job is over; its ids and its step are remembered
            self.previous, self.begun_anew = None, 0
            if self.newest.max_step == 0:  # that is like no step at all
                self.newest = NO_QUORUM
            self.loss_accepted = False
            self.reported_num_groups, self.all_reported, self.others_known = [], [], False
            self.asked_alone = []
            self.questions = []
            self.last_id = max(self.last_id, self.reported_id)
        while True:
            if self.view(now).waiting:
                deadlines = twin.waited_for(self.view(now), self.config)
                self.stragglers |= {key for key, at in deadlines.items() if at <= now}
            decision = twin.decide(self.view(now), self.config, now)
            if isinstance(decision, float):
                return
            self._publish(*decision, now)

    def _publish(self, members: list[Member], lost_from: int | None, now: float) -> None:
        ids, floor = [member.replica_id for member in members], self._floor()
        before = self.previous.participants if self.previous else ()
        grows = len(before) != len(members) or self.reported_id > self.last_id
        grows = grows or any(member.commit_failures for member in members)
        for mine, theirs in zip(members, before, strict=False):
            grows = grows or mine.replica_id != theirs.replica_id
            grows = grows or mine.address != theirs.address
            grows = grows or mine.store_address != theirs.store_address
        if grows:
            self.last_id = max(self.last_id, self.reported_id) + 1
        callers = [
            request.caller
            for replica_id in ids
            for request in self.requests
            if request.member.replica_id == replica_id
        ]
        self.requests = [each for each in self.requests if each.member.replica_id not in ids]
        is_first = self.previous is None and self.newest == NO_QUORUM
        if is_first and all(not member.has_history for member in members):
            self.begun_anew = self.last_id
        self.previous = Quorum(quorum_id=self.last_id, participants=tuple(members))
        self.veterans |= set(ids)
        self.reported_num_groups, self.all_reported, self.others_known = [], [], False
        self.asked_alone = []
        self.questions = []
        top = max(member.step for member in members)
        self.loss_accepted = False
        if lost_from is None:
            assert top >= floor
        self.newest = LastQuorum(self.last_id, top)
        self.reported, self.ahead = {}, set()
        self.log.append(("quorum", now, self.previous, tuple(callers), lost_from))

    def _has_come(self, member: Member, now: float) -> None:
        if member.has_history:
            self.veterans.add(member.replica_id)
            if self.previous is not None and member.seen_quorum_id > self.newest.quorum_id:
                self.ahead.add(member.replica_id)
            step = member.step  # all of that quorum have it, unless it was committed alone
            if member.step_quorum_id == 0 or member.step_quorum_id == member.seen_quorum_id:
                step = max(0, step - 1)
            if self.previous is None:
                self.questions.append(LastQuorum(member.seen_quorum_id, step))
        if self.previous is None and member.last_num_groups > 1:
            self.reported_num_groups.append((member.last_num_groups, now))
            self.others_known |= not member.sole_lighthouse
        elif self.previous is None:
            self.asked_alone.append(now)
        if member.step >= self._floor():
            self.loss_accepted = False

    def _is_held(self, replica_id: str) -> bool:
        for other in self.groups:
            if other == replica_id:
                return False
            if other.split(":")[0] == replica_id.split(":")[0]:
                return True
        raise AssertionError(f"{replica_id} does not live")

    def _sign_of_life(self, replica_id: str, now: float) -> None:
        was_known = replica_id in self.groups
        self.groups[replica_id] = now
        took_part = self.previous and any(
            member.replica_id == replica_id for member in self.previous.participants
        )
        if not was_known and took_part:
            self.veterans.add(replica_id)
        if was_known:
            order = list(self.groups)
            for request in list(self.requests):
                other = request.member.replica_id
                same_name = other.split(":")[0] == replica_id.split(":")[0]
                if same_name and order.index(other) > order.index(replica_id):
                    self._refuse(request, "taken")
                    self._forget(other)

    def _lose(self, replica_id: str) -> None:
        self.log.append(("loss", replica_id))
        for request in list(self.requests):
            if request.member.replica_id == replica_id:
                self._refuse(request, "out")
        self._forget(replica_id)

    def _forget(self, replica_id: str) -> None:
        del self.groups[replica_id]
        self.stragglers.discard(replica_id)
        self.ahead.discard(replica_id)
        self.veterans.discard(replica_id)
        self.reported.pop(replica_id, None)
        self.gave_up = [each for each in self.gave_up if each[0].member.replica_id != replica_id]

    def _refuse(self, request: Request, word: str) -> None:
        self.requests.remove(request)
        self.log.append(("refused", request.caller, word))
