"""A world of replica groups around one lighthouse, which follow the protocol, die, hang and return.

The world keeps its own ledger from what it did and what it received, and checks every order against
them as it arrives: I1, I2, I4 and that nobody is answered twice (I5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from support.core.recorded_jobs import (
    Announce,
    AnswerQuorum,
    EndTerm,
    Record,
    RecordedJobs,
    RefuseRequest,
)
from support.core.scenes import member
from torchft_svc.core.quorum.activity import Activity, Phase
from torchft_svc.core.quorum.assignment import assign
from torchft_svc.core.quorum.lighthouse.jobs import (
    ReportEviction,
    ReportHang,
    ReportLeftHealing,
    ReportLoss,
    ReportStraggler,
)
from torchft_svc.core.quorum.lighthouse.membership import GroupState
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.core.quorum.types import NO_QUORUM, LastQuorum, Member, Quorum, QuorumConfig
from torchft_svc.errors import RequestRefused


@dataclass
class Group:
    """One incarnation of a replica group, as it sees itself."""

    job: str
    replica_id: str
    step: int = 0
    min_replicas: int = 0
    commit_failures: int = 0
    seen_quorum_id: int = 0
    last: LastQuorum = NO_QUORUM
    address: str = "here:1"
    is_hung: bool = False  # its heartbeats go on, but it does not ask
    is_frozen: bool = False  # nothing goes on
    is_healing: bool = False  # in the quorum that it has
    caller: int | None = None
    asked: Member | None = None
    quorum: Quorum | None = None
    trains_since: int = 0  # while it has a quorum

    def activity(self, now: int) -> Activity:
        """The activity that its beats report."""
        if self.quorum is not None:
            phase = Phase.HEALING if self.is_healing else Phase.TRAINING
            return Activity(phase, self.step, self.trains_since)
        return Activity(Phase.IDLE if self.caller is None else Phase.QUORUM, self.step, now)

    def request(self, shrink_only: bool) -> Member:
        return member(
            self.replica_id,
            self.step,
            address=self.address,
            shrink_only=shrink_only,
            commit_failures=self.commit_failures,
            seen_quorum_id=self.seen_quorum_id,
            min_replicas=self.min_replicas,
            has_history=self.seen_quorum_id > 0,
        )


@dataclass
class JobLedger:
    """What has been published for one job; the last quorum is what this lighthouse knows of it."""

    last_id: int = 0
    lists: dict[int, list[tuple[str, str, str]]] = field(default_factory=dict)
    last: LastQuorum = NO_QUORUM
    has_published: bool = False  # this lighthouse
    took_part: set[str] = field(default_factory=set)
    reported: dict[str, LastQuorum] = field(
        default_factory=dict
    )  # to this lighthouse, by the living
    announced: set[str] = field(default_factory=set)
    evicted: set[str] = field(default_factory=set)  # from the last quorum, and has not asked since
    loss_accepted: bool = False  # by an operator, since the last quorum
    remaining: set[str] = field(default_factory=set)  # of the last quorum: not ended on purpose
    is_finished: bool = False
    asked: LastQuorum = (
        NO_QUORUM  # the newest that those who asked knew of, before the first quorum
    )
    begun_anew: int = 0  # the first quorum of this lighthouse, if it was one of newcomers only

    @property
    def floor(self) -> int:
        """How far the job is at least."""
        is_news = self.asked >= self.last
        return max(self.last.max_step, self.asked.max_step if is_news else 0)


@dataclass
class World:
    config: QuorumConfig
    now: int = 0
    jobs: RecordedJobs = field(init=False)
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    seen_at: dict[tuple[str, str], int] = field(default_factory=dict)
    ledger: dict[str, JobLedger] = field(default_factory=dict)
    greeted: set[tuple[str, str]] = field(default_factory=set)  # have a session
    began_at: int = 0  # the lighthouse
    callers: int = 0
    asked_by: dict[int, Group] = field(default_factory=dict)  # callers not yet reported
    beats: dict[tuple[str, str], Activity] = field(default_factory=dict)  # the last ones
    hangs_reported: dict[tuple[str, str], set[float]] = field(default_factory=dict)  # since when
    left_healing: set[tuple[str, str]] = field(default_factory=set)  # was reported
    num_starts: int = 0
    num_quorums: int = 0

    def __post_init__(self) -> None:
        self.jobs = RecordedJobs(self.config)

    # -- what happens ----------------------------------------------------------------------------

    def start(self, job: str, name: str, step: int, min_replicas: int = 0) -> None:
        self.num_starts += 1
        group = Group(job, f"{name}:{self.num_starts}", step, min_replicas)
        self.groups[job, group.replica_id] = group
        self.beat(group)

    def greet(self, group: Group) -> None:
        """A session begins with what the group knows, unless it has one."""
        key = (group.job, group.replica_id)
        if key in self.greeted:
            return
        self.greeted.add(key)
        ledger = self.ledger.setdefault(group.job, JobLedger())
        if group.last.quorum_id:
            ledger.took_part.add(group.replica_id)
            if not ledger.has_published:
                ledger.reported[group.replica_id] = group.last
                ledger.is_finished &= group.last <= ledger.last
                ledger.last = max(ledger.last, group.last)
        self.live(group)
        self.carry_out(self.jobs.opened(group.job, group.replica_id, group.last, self.now))

    def beat(self, group: Group) -> None:
        self.greet(group)
        self.live(group)
        doing = self.beats[group.job, group.replica_id] = group.activity(self.now)
        self.carry_out(self.jobs.heartbeat(group.job, group.replica_id, self.now, doing))

    def ask(self, group: Group, shrink_only: bool) -> None:
        self.greet(group)
        self.callers += 1
        replaced, group.caller = group.caller, self.callers
        self.asked_by[self.callers] = group
        group.quorum, group.asked = None, group.request(shrink_only)
        waits = Activity(Phase.QUORUM, group.asked.step, self.now)
        self.beats[group.job, group.replica_id] = waits
        ledger = self.ledger.setdefault(group.job, JobLedger())
        ledger.evicted.discard(group.replica_id)
        if group.asked.has_history:
            ledger.took_part.add(group.replica_id)
            if not ledger.has_published:
                known = LastQuorum(group.seen_quorum_id, max(0, group.step - 1))
                ledger.asked = max(ledger.asked, known)
        self.live(group)
        orders = self.jobs.request(group.job, group.asked, self.callers, self.now)
        if replaced is not None:
            refused = [each.caller for each in orders if isinstance(each, RefuseRequest)]
            assert replaced in refused, "I5: the call that was replaced is reported"
            del self.asked_by[replaced]
            orders = tuple(
                each
                for each in orders
                if not (isinstance(each, RefuseRequest) and each.caller == replaced)
            )
        self.carry_out(orders)

    def withdraw(self, group: Group) -> None:
        assert group.caller is not None
        caller, group.caller, group.asked = group.caller, None, None
        del self.asked_by[caller]
        self.carry_out(self.jobs.withdraw(group.job, caller, self.now))

    def end_step(self, group: Group, commits: bool, has_healed: bool) -> None:
        """Commit or discard; who was behind has the state of max_step if it got that far."""
        assert group.quorum is not None
        if commits or has_healed:
            me = next(x for x in group.quorum.participants if x.replica_id == group.replica_id)
            heals = me.doubted_step or group.step < group.quorum.max_step
            group.step = (group.quorum.max_step if heals else group.step) + commits
        group.commit_failures = 0 if commits else group.commit_failures + 1
        group.quorum, group.is_healing = None, False

    def kill(self, group: Group, noticed: bool, ends: bool = False) -> None:
        """The group is dead; its caller withdraws with its connection if that is noticed. ``ends``:
        it ends on purpose, and says so."""
        job, replica_id = group.job, group.replica_id
        del self.groups[job, replica_id]
        if noticed:
            if ends and (job, replica_id) in self.seen_at:
                self.ledger.setdefault(job, JobLedger()).remaining.discard(replica_id)
            orders = self.jobs.leave(
                job, replica_id, Leave("its session ended", ends=ends), self.now
            )
            self.carry_out(orders)

    def succeed(self, group: Group) -> None:
        """Make the group leave and come back as another incarnation.

        It comes back with what it has, but does not report the quorum that it was in.
        """
        self.kill(group, noticed=True)
        self.start(group.job, group.replica_id.split(":")[0], group.step, group.min_replicas)
        self.groups[
            group.job, f"{group.replica_id.split(':')[0]}:{self.num_starts}"
        ].seen_quorum_id = group.seen_quorum_id

    def accept_loss(self, job: str) -> None:
        """An operator gives up what those who ask do not have; refused if one of them has it.

        Whoever died unnoticed still asks.
        """
        ledger = self.ledger.get(job, JobLedger())
        callers = set(self.jobs._jobs[job].members._replica_of) if job in self.jobs._jobs else ()
        asking = [self.asked_by[caller] for caller in callers]
        why = self.jobs.why(job, self.now)
        try:
            orders = self.jobs.accept_loss(job, self.now)
        except RequestRefused:
            return
        policy = self.config.on_step_regression
        assert policy != "warn", "nothing is held back"
        newest = [each for each in asking if each.step >= ledger.floor]
        shrinks = any(each.asked and each.asked.shrink_only for each in asking)
        assert asking, "nobody asks"
        assert "alive, but has not asked" not in why, "the newer state may come"
        assert not newest or shrinks, "the newer state is here"
        ledger.loss_accepted = True
        self.carry_out(orders)

    def restart_lighthouse(self) -> None:
        """Everything is forgotten, every call is broken; its ids begin above any before."""
        first_id = max((ledger.last_id for ledger in self.ledger.values()), default=0)
        self.jobs, self.began_at = RecordedJobs(self.config, first_id, now=self.now), self.now
        self.seen_at.clear()
        self.greeted.clear()
        self.hangs_reported.clear()
        self.left_healing.clear()
        for ledger in self.ledger.values():
            ledger.last = NO_QUORUM
            ledger.has_published = False
            ledger.remaining.clear()
            ledger.is_finished = False
            ledger.loss_accepted = False
            ledger.took_part.clear()
            ledger.reported.clear()
            ledger.announced.clear()
            ledger.evicted.clear()
            ledger.begun_anew = 0
            ledger.asked = NO_QUORUM
        self.asked_by.clear()
        for group in self.groups.values():
            group.caller = group.asked = None

    def pass_second(self) -> None:
        """The lighthouse wakes if it wanted to, then all who can show that they live."""
        self.now += 1
        at = self.jobs.next_deadline()
        if at is not None and at <= self.now:
            self.carry_out(self.jobs.tick(self.now))
        for group in list(self.groups.values()):
            if not group.is_frozen and (group.job, group.replica_id) in self.groups:
                self.beat(group)

    # -- what follows ----------------------------------------------------------------------------

    def live(self, group: Group) -> None:
        self.seen_at[group.job, group.replica_id] = self.now

    def living(self, job: str) -> set[str]:
        return {replica_id for of_job, replica_id in self.seen_at if of_job == job}

    def carry_out(self, orders: tuple[Record, ...] | list[Record]) -> None:
        # Each step asks here, so that it has to is no news.
        for order in (each for each in orders if not isinstance(each, EndTerm)):
            if isinstance(order, ReportLoss):
                self.lose(order)
            elif isinstance(order, ReportHang):
                self.hang(order)
            elif isinstance(order, ReportEviction):
                self.evict(order)
            elif isinstance(order, ReportStraggler):
                self.leave_behind(order)
            elif isinstance(order, ReportLeftHealing):
                self.leave_healing(order)
            elif isinstance(order, Announce):
                self.announce(order)
            elif isinstance(order, RefuseRequest):
                self.refuse(order)
            else:
                self.publish(order)
        for job, ledger in self.ledger.items():  # who is awaited again may be evicted again
            state = self.jobs._jobs.get(job)
            left_out = state.members.groups[GroupState.EVICTED] if state else set()
            ledger.evicted &= left_out

    def lose(self, order: ReportLoss) -> None:
        seen_at = self.seen_at.pop((order.job, order.replica_id), None)
        self.greeted.discard((order.job, order.replica_id))
        if order.reason.startswith("no sign of life"):
            assert seen_at is not None
            assert self.now - seen_at >= self.config.heartbeat_timeout_s, "rule Q8"
        self.hangs_reported.pop((order.job, order.replica_id), None)  # if it comes back, it is news
        self.left_healing.discard((order.job, order.replica_id))
        ledger = self.ledger.get(order.job, JobLedger())
        ledger.took_part.discard(order.replica_id)
        ledger.reported.pop(order.replica_id, None)
        ledger.announced.discard(order.replica_id)
        ledger.evicted.discard(order.replica_id)
        if not self.living(order.job):
            ledger.is_finished |= ledger.last_id > 0 and not ledger.remaining

    def hang(self, order: ReportHang) -> None:
        reported = self.hangs_reported.setdefault((order.job, order.replica_id), set())
        assert order.for_s >= (self.config.hang_timeout_s or math.inf)
        since = self.now - order.for_s
        assert since not in reported, "a hang is reported once"
        reported.add(since)
        beat = self.beats[order.job, order.replica_id]
        assert beat == Activity(order.phase, order.step, since), "what its last beat reported"

    def evict(self, order: ReportEviction) -> None:
        """Check that the group hangs, while a member of the same quorum last reported a wait."""
        assert self.config.on_hang == "evict"
        assert order.quorum_id == self.ledger[order.job].last.quorum_id
        doing = self.beats[order.job, order.replica_id]
        assert doing.phase is Phase.TRAINING
        assert self.now - doing.since >= (self.config.hang_timeout_s or math.inf)
        ledger = self.ledger[order.job]
        assert order.replica_id not in ledger.evicted, "reported once"
        before, living = self.members_before(order.job), self.living(order.job)
        assert order.replica_id in before & living
        said = {each: self.beats.get((order.job, each)) for each in before & living}
        waiting = {each for each, doing in said.items() if doing and doing.phase is Phase.QUORUM}
        assert waiting - ledger.evicted, "nobody waits for it"
        ledger.evicted.add(order.replica_id)

    def leave_behind(self, order: ReportStraggler) -> None:
        """Check that the order is for a living member of the last quorum, and of that quorum.

        Before the first quorum here it may also be for those that were in an older one.
        """
        assert order.recipients == (order.replica_id,)
        assert order.quorum_id == self.ledger[order.job].last.quorum_id
        before = self.members_before(order.job)
        if not self.ledger[order.job].has_published:
            before |= self.ledger[order.job].took_part
        assert order.replica_id in before & self.living(order.job)
        doing = self.beats.get((order.job, order.replica_id))
        assert doing is None or doing.phase is not Phase.HEALING

    def leave_healing(self, order: ReportLeftHealing) -> None:
        """Check that the order comes once, of a living group that was waited for in vain."""
        assert order.replica_id in self.living(order.job)
        assert (order.job, order.replica_id) not in self.left_healing, "reported once"
        self.left_healing.add((order.job, order.replica_id))

    def members_before(self, job: str) -> set[str]:
        """Members of the last quorum, published here or reported by its members elsewhere."""
        ledger = self.ledger[job]
        if ledger.has_published:
            return {key for key, _, _ in ledger.lists[ledger.last_id]}
        newest = ledger.last.quorum_id
        return {key for key, last in ledger.reported.items() if last.quorum_id == newest > 0}

    def announce(self, order: Announce) -> None:
        ledger = self.ledger[order.job]  # there is a quorum to be reported
        assert order.replica_id not in {key for key, _, _ in ledger.lists[ledger.last_id]}
        assert order.replica_id not in ledger.announced, "reported once"
        assert order.replica_id in {each.replica_id for each in self.asked_by.values()}
        ledger.announced.add(order.replica_id)

    def refuse(self, order: RefuseRequest) -> None:
        asker = self.asked_by.pop(order.caller)  # fails if the caller has been reported before
        key = (asker.job, asker.replica_id)
        if isinstance(order.error, RequestRefused):  # its name is taken: it gives up
            self.groups.pop(key, None)
            self.seen_at.pop(key, None)
        if key in self.groups:
            assert self.groups[key].caller == order.caller
            self.groups[key].caller = self.groups[key].asked = None

    def publish(self, order: AnswerQuorum) -> None:
        self.num_quorums += 1
        ledger = self.ledger.setdefault(order.job, JobLedger())
        if ledger.evicted:  # nobody begins a second history while they hang
            goes_on = {each.replica_id for each in order.quorum.participants}
            assert goes_on & self.members_before(order.job)
            assert order.quorum.quorum_id > ledger.last_id, (
                "they were reported that the last is over"
            )
            ledger.evicted.clear()
        self.check_doubts(order, ledger)
        self.check_i1_ids(order, ledger)
        self.check_i4_progress(order, ledger)
        assert len(set(order.callers)) == len(order.callers) == len(order.quorum.participants)
        living = self.living(order.job)
        for caller, each in zip(order.callers, order.quorum.participants, strict=True):
            assert each.replica_id in living, "rule Q8: no dead member"
            asker = self.asked_by.pop(caller)  # I5: reported once
            assert (asker.job, asker.replica_id) == (order.job, each.replica_id)
            group = self.groups.get((order.job, each.replica_id))
            if group is None:
                continue  # killed a moment ago, and nobody has noticed yet
            reported = replace(each, step=each.doubted_step or each.step, doubted_step=0)
            assert (group.caller, group.asked) == (caller, reported), "rule Q1: nobody who gave up"
            group.caller = group.asked = None
            group.quorum, group.trains_since = order.quorum, self.now
            group.seen_quorum_id = order.quorum.quorum_id
            group.last = LastQuorum(order.quorum.quorum_id, order.quorum.max_step)
        check_i2_agreement(order.quorum)

    def check_i1_ids(self, order: AnswerQuorum, ledger: JobLedger) -> None:
        """Ids grow when the list changes or a commit failed, and name one list only."""
        quorum_id = order.quorum.quorum_id
        places = [each.place for each in order.quorum.participants]
        failed = any(each.commit_failures for each in order.quorum.participants)
        is_same = ledger.lists.get(ledger.last_id) == places and not failed
        assert quorum_id >= ledger.last_id
        if not is_same:
            assert quorum_id > ledger.last_id, "I1"
        assert ledger.lists.setdefault(quorum_id, places) == places, "I1"
        ledger.last_id = quorum_id
        ledger.announced.clear()

    def check_doubts(self, order: AnswerQuorum, ledger: JobLedger) -> None:
        """Check that members who are not believed are more than a step ahead, and a witness is not.

        A lighthouse that has published believes nobody else who is, but from elsewhere.
        """
        before = self.members_before(order.job) & self.living(order.job)
        limit = ledger.floor + 1
        steps = {
            each.replica_id: each.doubted_step or each.step for each in order.quorum.participants
        }
        for group in self.asked_by.values():
            if group.job == order.job and group.asked:
                steps[group.replica_id] = group.asked.step
        witnesses = {each for each in before if steps.get(each, 0) <= limit}
        for each in order.quorum.participants:
            if each.doubted_step:
                assert each.doubted_step > limit
                assert witnesses
            elif each.step > limit and ledger.has_published and witnesses:
                group = self.groups.get((order.job, each.replica_id))
                seen_id = group.seen_quorum_id if group else 0
                is_back = self.now < self.began_at + self.config.heartbeat_timeout_s
                is_older = is_back and 0 < seen_id < ledger.begun_anew
                assert group is None or seen_id > ledger.last.quorum_id or is_older

    def check_i4_progress(self, order: AnswerQuorum, ledger: JobLedger) -> None:
        """The committed step never goes back, unless the policy accepts it; then it is reported."""
        max_step, living = order.quorum.max_step, self.living(order.job)
        askers = [each for each in self.asked_by.values() if each.job == order.job]
        if not any(each.min_replicas for each in askers):
            assert len(order.callers) >= self.config.min_replicas
        assert len(order.callers) >= max(each.min_replicas for each in order.quorum.participants)
        if max_step < ledger.floor:
            assert order.lost_from == ledger.floor, "I4: a loss is reported"
            policy = "warn" if ledger.loss_accepted else self.config.on_step_regression
            assert policy != "hold" or ledger.is_finished, "I4"
            if policy != "warn":
                assert not ledger.took_part & living, "I4: a group of the job is alive"
            assert order.begins_anew == ledger.is_finished
        else:
            assert order.lost_from is None
            assert not order.begins_anew
        knew = any(each.has_history for each in order.quorum.participants)
        if not ledger.has_published and ledger.last == NO_QUORUM and not knew:
            ledger.begun_anew = order.quorum.quorum_id
        ledger.asked = NO_QUORUM
        ledger.last, ledger.has_published = LastQuorum(order.quorum.quorum_id, max_step), True
        ledger.loss_accepted = ledger.is_finished = False
        ledger.remaining = {each.replica_id for each in order.quorum.participants}
        ledger.took_part &= living
        ledger.took_part |= {each.replica_id for each in order.quorum.participants}


def check_i2_agreement(quorum: Quorum) -> None:
    """All members compute the same order, store and heal plan, for two group ranks."""
    for group_rank in (0, 1):
        parts = [assign(quorum, each.replica_id, group_rank) for each in quorum.participants]
        assert [part.replica_rank for part in parts] == list(range(len(parts))), "I2"
        assert len({(part.replica_ids, part.store_address, part.max_step) for part in parts}) == 1
        for part in parts:
            if part.recover_src_replica_rank is not None:
                assert (
                    part.replica_rank
                    in parts[part.recover_src_replica_rank].recover_dst_replica_ranks
                ), "I2"
                assert parts[part.recover_src_replica_rank].max_replica_rank is not None
