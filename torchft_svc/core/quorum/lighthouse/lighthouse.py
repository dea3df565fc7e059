"""The lighthouse's decisions: many jobs, their requests, and the answer for each caller.

Inputs are method calls with ``now`` (monotonic seconds); each returns the orders that the shell has
to carry out. A caller is a number of the shell's choice, unique among the requests that wait.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torchft_svc.core.limits import MAX_NAME_LENGTH, check_name
from torchft_svc.core.quorum.activity import Activity, HangWatch, Phase
from torchft_svc.core.quorum.layout import why_unlike
from torchft_svc.core.quorum.lighthouse.ids import QuorumIds
from torchft_svc.core.quorum.lighthouse.job import Announcements, EndedJob, Job
from torchft_svc.core.quorum.lighthouse.lighthouse_orders import (
    AnswerQuorum,
    Order,
    RefuseRequest,
    ReportEviction,
    ReportHang,
    ReportLeftHealing,
    ReportLoss,
    ReportTermEnds,
    ReportWaiting,
)
from torchft_svc.core.quorum.lighthouse.membership import GroupState, Membership
from torchft_svc.core.quorum.lighthouse.overview import (
    GoneGroup,
    History,
    JobStatus,
    Pause,
    describe,
    name_some,
)
from torchft_svc.core.quorum.lighthouse.quorum import (
    Formed,
    Waiting,
    Why,
    absent_deadlines,
    decide,
    has_loss_to_accept,
    joining,
    look_at,
    to_evict,
)
from torchft_svc.core.quorum.session_messages import Leave, Lost, NewcomerWaits
from torchft_svc.core.quorum.term import RunningTerm, TermEnds
from torchft_svc.core.quorum.types import (
    NO_QUORUM,
    DifferenceReport,
    LastQuorum,
    Member,
    Quorum,
    QuorumConfig,
)
from torchft_svc.errors import QuorumFailed, RequestRefused

# Heartbeats per second from all groups of a job, 0.1 to 0.2 ms each, which is gRPC's. Above that,
# groups beat less often, but at least twice per heartbeat timeout.
MAX_BEATS_PER_SECOND = 400.0
MIN_BEATS_PER_TIMEOUT = 2.0

MAX_ENDED_SHOWN = 20  # of the jobs that have ended, if none is named
_SESSION_ENDED = "its session ended"  # without a word


class Lighthouse:
    """All jobs of one lighthouse; for its ids see `QuorumIds`."""

    def __init__(
        self,
        config: QuorumConfig,
        first_id: int = 0,
        id_stride: int = 1,
        *,
        ids_per_s: float = 1000.0,
        now: float = 0.0,
    ) -> None:
        self._config = config
        self._ids = QuorumIds(first_id, id_stride, ids_per_s, now)
        self._began_at = now
        self._jobs: dict[str, Job] = {}
        self._ended: OrderedDict[str, EndedJob] = OrderedDict()
        self._wake_at: float | None = None

    # -- inputs ----------------------------------------------------------------------------------

    def request(
        self, job: str, member: Member, caller: int, now: float, *, agreed: bool = False
    ) -> tuple[Order, ...]:
        """``caller`` waits for a quorum that contains ``member``; ``agreed``: see `Question`."""
        member.check()
        self._check_weight(job, member)
        state = self._job(job, member.replica_id, now, member.seen_quorum_id)
        misfits = state.likeness.check(member, state.members)
        orders = self._sign_of_life(state, member.replica_id, now)
        orders += _turn_away(state, misfits, member, now)
        state.members.seen(member.replica_id, now)
        if member.replica_id in state.members.previous_ids:
            state.end_progress()
            state.note_wait(member, self._config.join_timeout_s)
            orders += self._miss_silent(job, state, now, agreed=agreed)
        state.hangs.reported(member.replica_id, Activity(Phase.QUORUM, member.step, now), now)
        if not state.members.names.is_free_for(member.replica_id):
            held_before = state.held.pop(member.replica_id, None)
            if held_before is not None:
                orders.append(_superseded(held_before[1], member.replica_id))
            state.held[member.replica_id] = (member, caller)
        else:
            state.history.asked(member)
            replaced = state.members.asked(member, caller, now)
            if replaced is not None:
                orders.append(_superseded(replaced, member.replica_id))
            if told := state.break_off(member, agreed=agreed):
                why = f"{member.replica_id} asks for a quorum at step {member.step}"
                ends = TermEnds(state.members.last.quorum_id, member.step, why)
                orders.append(ReportTermEnds(job, ends, told))
            orders += self._end_stalled_term(job, state, now)
        orders += self._heed_hangs(job, state, now, (member.replica_id,))
        return self._settle(job, state, orders, now, asked=[member.replica_id])

    def withdraw(self, job: str, caller: int, now: float) -> tuple[Order, ...]:
        """``caller`` waits no longer (cancelled, or its deadline is over)."""
        state = self._jobs.get(job)
        if state is None:
            return ()
        state.members.withdrew(caller, now)
        for key in [key for key, held in state.held.items() if held[1] == caller]:
            del state.held[key]
        return self._settle(job, state, [], now)

    def opened(
        self, job: str, replica_id: str, last: LastQuorum, now: float, *, num_groups: int = 0
    ) -> tuple[Order, ...]:
        """A sign of life, with the ``last`` quorum that the group was in, of ``num_groups``."""
        check_name("replica_id", replica_id)
        last.check()
        state = self._job(job, replica_id, now, last.quorum_id)
        orders = self._sign_of_life(state, replica_id, now)
        if state.silent.keys() & set(state.members.names.earlier(replica_id)):
            orders += self._miss_silent(job, state, now)  # it will not be back, this is its heir
        state.members.seen(replica_id, now)
        state.reported(replica_id, last, num_groups, now)
        if state.term.may_go_on and state.rivals() == {replica_id}:
            told = tuple(state.members.quorum_left())
            orders += [ReportTermEnds(job, state.contested(), told)] if told else []
        return self._settle(job, state, orders, now)

    def heartbeat(
        self, job: str, replica_id: str, now: float, activity: Activity | None = None
    ) -> tuple[Order, ...]:
        """A sign of life without a request, with the group's ``activity`` if it reports that."""
        check_name("replica_id", replica_id)
        state = self._job(job, replica_id, now)
        is_new = not state.members.knows(replica_id)
        if is_new and now < state.left.get(replica_id, -math.inf):
            return ()
        orders = self._sign_of_life(state, replica_id, now)
        state.members.seen(replica_id, now)
        if activity is not None:
            state.hangs.reported(replica_id, activity, now)
            is_new |= state.members.does(replica_id, activity, now)
            if replica_id in state.members.previous_ids:
                state.history.heard(activity.reached, now)
                state.heard(replica_id, activity)
                if activity.phase is Phase.QUORUM:
                    state.term.waits(activity.since, self._config.join_timeout_s, now)
                    orders += self._end_stalled_term(job, state, now)
                    self._wake(state.term.due_at)
                    if state.is_missed(activity, now):
                        orders += self._miss_silent(job, state, now)
                    orders += self._miss_unheard(job, state, activity, now)
            orders += self._heed_hangs(job, state, now, (replica_id,))
            self._wake(state.hangs.look_at())
        if is_new or orders:
            return self._settle(job, state, orders, now)
        return ()

    def record_difference(self, job: str, replica_id: str, report: DifferenceReport) -> None:
        """Count a check that has found a difference, if a living group reports it."""
        state = self._jobs.get(job)
        if state is not None and state.members.knows(replica_id):
            state.history.record_difference(report)

    def leave(self, job: str, replica_id: str, leave: Leave, now: float) -> tuple[Order, ...]:
        """The group is gone: its heartbeat timeout need not pass."""
        state = self._jobs.get(job)
        if state is None or not state.members.knows(replica_id):
            return ()
        state.note_left(replica_id, leave, until=now + self._config.heartbeat_timeout_s)
        orders = self._remove(job, state, replica_id, leave, now)
        return self._settle(job, state, orders, now)

    def went_silent(self, job: str, replica_id: str, now: float) -> tuple[Order, ...]:
        """The group's session has ended without a word: in a term it stays a member while nobody
        misses it (rule E7), otherwise it is gone."""
        state = self._jobs.get(job)
        if state is None or not state.may_be_back(replica_id):
            return self.leave(job, replica_id, Leave(_SESSION_ENDED), now)
        state.silent[replica_id] = now
        return ()

    def killed(self, job: str, replica_id: str, reason: str) -> None:
        """An operator ends a living group: it then ends on purpose, however it ends."""
        self._jobs[job].killed[replica_id] = reason

    def accept_loss(self, job: str, now: float) -> tuple[Order, ...]:
        """An operator lets the next quorum through although it loses committed steps.

        Forgotten when a group with the newer state asks.

        Raises: RequestRefused: no quorum of this job is held back for that reason, or a group that
        may have those steps is still awaited.
        """
        check_name("job", job)
        state = self._jobs.get(job)
        if state is None or not has_loss_to_accept(state.members.view(now), self._config, now):
            raise RequestRefused(
                f"job {job!r} has no loss to accept: {self.why(job, now)}; only a quorum that is "
                "held back because it would lose committed steps can be let through"
            )
        state.members.accept_loss()
        return self._settle(job, state, [], now)

    def tick(self, now: float) -> tuple[Order, ...]:
        """Time has passed; call it at `next_deadline`, or more often."""
        self._wake_at = None
        orders: list[Order] = []
        for name, state in list(self._jobs.items()):
            silent = Leave(f"no sign of life for {self._config.heartbeat_timeout_s:g} s")
            for replica_id in state.members.dead(now):
                orders += self._remove(name, state, replica_id, silent, now)
            orders += self._heed_hangs(name, state, now)
            orders += self._end_stalled_term(name, state, now)
            orders += self._settle(name, state, [], now)
        return tuple(orders)

    # -- questions -------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; may be too early, never too late."""
        return self._wake_at

    def pause(self, job: str, now: float) -> Pause:
        """Why the groups of ``job`` that ask have no quorum yet; changes nothing."""
        state = self._jobs.get(job)
        if state is None:
            return Pause(Waiting(Why.NOBODY_ASKS), now)
        held = {key: tuple(state.members.names.earlier(key)) for key in state.held}
        return Pause(decide(state.members.view(now), self._config, now), now, held)

    def why(self, job: str, now: float) -> str:
        return self.pause(job, now).sentence()

    def status(self, job: str, now: float) -> list[JobStatus]:
        """All jobs that have living groups, and the last that have ended; or the one that is named.

        Raises:
            RequestRefused: there is no such job.
        """
        if job and not (job in self._jobs or job in self._ended):
            raise RequestRefused(f"this lighthouse serves no job {job[:MAX_NAME_LENGTH]!r} now")
        ended = [name for name, each in self._ended.items() if each.last.quorum_id]
        names = [job] if job else [*sorted(self._jobs), *ended[-MAX_ENDED_SHOWN:][::-1]]
        return [self._describe(name, now) for name in names]

    def _describe(self, job: str, now: float) -> JobStatus:
        if job in self._ended:
            ended = self._ended[job]
            status = JobStatus(
                job=job,
                quorum_id=ended.last.quorum_id,
                committed_step=ended.last.max_step,
                min_replicas=self._config.min_replicas,
                ended_s=now - ended.at,
                finished=ended.is_finished,
            )
            return ended.history.add_to(status, now)
        state, why = self._jobs[job], self.why(job, now)
        state.note_progress()
        held = [member for member, _ in state.held.values()]
        status = describe(job, state.members, state.hangs, held, why, now)
        return state.history.add_to(status, now)

    def find(self, job: str, name: str) -> str:
        """The living group of ``job`` with this replica id or name.

        Raises: RequestRefused: there is no such group, or more than one.
        """
        check_name("replica_id", name)
        state = self._jobs.get(job)
        called = state.members.called(name) if state else []
        if not called:
            raise RequestRefused(f"job {job!r} has no living group {name!r}")
        if len(called) > 1:
            raise RequestRefused(
                f"job {job!r} has several groups {name!r}, say which: {', '.join(called)}"
            )
        return called[0]

    def check_room(self, job: str) -> None:
        """Raise `RequestRefused` if there is no room for another group of ``job``."""
        state = self._jobs.get(job)
        if state is None:
            check_name("job", job)
            if len(self._jobs) >= self._config.max_jobs:
                raise RequestRefused(
                    f"this lighthouse already serves {len(self._jobs)} jobs, its limit: "
                    f"job {job!r} has to go to another one"
                )
        elif len(state.members) >= self._config.max_members_per_job:
            raise RequestRefused(
                f"job {job!r} has {len(state.members)} groups, the limit of this lighthouse"
            )

    def missed_news(
        self, job: str, replica_id: str, last: LastQuorum, num_groups: int
    ) -> list[NewcomerWaits | TermEnds | Lost]:
        """What a member of the last quorum may not have heard, because it had no session."""
        state = self._jobs[job]
        members, quorum_id = state.members, state.members.last.quorum_id
        if replica_id not in members.previous_ids or last.quorum_id != quorum_id:
            return []
        newcomer = min(members.groups[GroupState.JOINING], default=None)
        news: list[NewcomerWaits | TermEnds | Lost] = [NewcomerWaits(newcomer)] if newcomer else []
        if 0 < num_groups < self._config.min_replicas:
            needed = f"this lighthouse needs {self._config.min_replicas} groups (--min-replicas)"
            news.append(TermEnds(quorum_id, None, needed))
        if state.rivals():
            news.append(state.contested())
        news += [Lost(who, why, quorum_id) for who, why in state.term.lost.items()]
        if state.term.over_from:
            news.append(TermEnds(quorum_id, state.term.over_from, "not all members take part"))
        return news

    def is_past(self, job: str, replica_id: str, last: LastQuorum) -> bool:
        """Whether the others continued without a group that is back, and was in quorum ``last``."""
        state = self._jobs.get(job)
        return state is not None and state.members.is_past(replica_id, last)

    def committed_step(self, job: str) -> int:
        """The highest that a quorum of this job has shown, less what was given up since."""
        state = self._jobs.get(job)
        return state.members.committed_step if state else 0

    def quorum_left(self, job: str) -> list[str]:
        """The living groups of the last quorum."""
        state = self._jobs.get(job)
        return state.members.quorum_left() if state else []

    def beat_interval_s(self, job: str) -> float:
        """The shortest time between the heartbeats of a group."""
        state = self._jobs.get(job)
        groups = len(state.members) if state else 1
        rarest = self._config.heartbeat_timeout_s / MIN_BEATS_PER_TIMEOUT
        return min(groups / MAX_BEATS_PER_SECOND, rarest)

    # -- the rules -------------------------------------------------------------------------------

    def _job(self, name: str, replica_id: str, now: float, told_id: int = 0) -> Job:
        state = self._jobs.get(name)
        self._check_told(name, state, told_id, now)
        if state is None or not state.members.knows(replica_id):
            self.check_room(name)
        if state is None:
            new = EndedJob(NO_QUORUM, self._ids.first, History(now), now)
            ended = self._ended.pop(name, new)
            history = History(now) if ended.is_finished else ended.history
            last = ended.last if ended.last.max_step else NO_QUORUM  # there is nothing to lose
            members = Membership(
                self._config, last, is_finished=ended.is_finished, began_at=self._began_at
            )
            hangs = HangWatch(self._config.hang_timeout_s)
            state = Job(members, hangs, history, max(self._ids.first, ended.last_id))
            self._jobs[name] = state
        state.heard_id = max(state.heard_id, told_id)
        return state

    def _check_weight(self, job: str, member: Member) -> None:
        """Every member receives the whole quorum: for 200 members with 64 KB each that is 2.5
        GB."""
        num_bytes, state = member.num_bytes, self._jobs.get(job)
        if state is not None:
            num_bytes += state.members.num_bytes_of_others(member.replica_id)
            held = [each for each, _ in state.held.values()] if state.held else []
            others = (each for each in held if each.replica_id != member.replica_id)
            num_bytes += sum(each.num_bytes for each in others)
        if num_bytes > self._config.max_quorum_bytes:
            raise RequestRefused(
                f"with the {member.num_bytes} bytes of {member.replica_id!r} the quorum of job "
                f"{job!r} would have {num_bytes} bytes, and the limit of this lighthouse is "
                f"{self._config.max_quorum_bytes} (--max-quorum-bytes)"
            )

    def _check_told(self, name: str, state: Job | None, told_id: int, now: float) -> None:
        """Refuse an id that cannot have been given out."""
        known = state or self._ended.get(name)
        is_running = state is not None and state.members.previous is not None
        self._ids.check_told(told_id, known.last_id if known else 0, now, is_running=is_running)

    def _sign_of_life(self, state: Job, replica_id: str, now: float) -> list[Order]:
        """A living incarnation keeps its name: later ones that wait for it are refused."""
        state.silent.pop(replica_id, None)
        orders: list[Order] = []
        for rival in state.members.names.later(replica_id) if state.held else ():
            if rival not in state.held:
                continue
            _, caller = state.held.pop(rival)
            state.forget(rival)
            reason = (
                f"the name of {rival!r} is taken: {replica_id!r} is alive; "
                "give every replica group a name of its own"
            )
            orders.append(RefuseRequest(caller, RequestRefused(reason)))
        return orders

    def _remove(self, job: str, state: Job, replica_id: str, how: Leave, now: float) -> list[Order]:
        if replica_id in state.killed:
            how = Leave(state.killed.pop(replica_id), how.between_steps, ends=True)
        quorum_id = state.members.last.quorum_id
        if replica_id in state.members.previous_ids:
            state.end_progress()
        # The news would make its peers give up a step that it has finished.
        told = () if how.between_steps else state.loss_recipients(replica_id, how.reason)
        orders: list[Order] = [
            ReportLoss(
                job, replica_id, how.reason, how.between_steps, how.is_orderly, quorum_id, told
            )
        ]
        gone = GoneGroup(replica_id=replica_id, reason=how.reason, orderly=how.is_orderly)
        state.history.gone(gone, ends=how.ends, now=now)
        held = state.held.pop(replica_id, None)
        caller = state.forget(replica_id)
        for lost in (caller, held[1] if held else None):
            if lost is not None:
                orders.append(
                    RefuseRequest(lost, QuorumFailed(f"{replica_id!r} is out: {how.reason}"))
                )
        return orders

    def _heed_hangs(
        self, job: str, state: Job, now: float, told: Sequence[str] = ()
    ) -> list[Order]:
        """Report hanging groups, and evict those that others wait for, maybe since ``told`` do."""
        kill = self._config.on_hang == "kill"
        orders: list[Order] = [
            ReportHang(job, replica_id, hang.phase, hang.step, now - hang.since, kill)
            for replica_id, hang in state.hangs.newly_hung(now)
        ]
        if self._config.on_hang != "evict":
            return orders
        candidates = state.members.previous_ids if orders else told
        evicted = to_evict(state.members, state.hangs, candidates)
        if evicted:
            state.members.evicted(evicted)
            state.spent_id = state.last_id
        for each in evicted:
            why, quorum_id = state.hangs.why(each, now), state.members.last.quorum_id
            told = state.loss_recipients(each, why)
            orders.append(ReportEviction(job, each, why, quorum_id, told))
        return orders

    def _miss_silent(
        self, job: str, state: Job, now: float, *, agreed: bool = False
    ) -> list[Order]:
        """Give up the members without a session (rule E7). ``agreed``: all members end their step,
        and ask, so nobody needs to be told."""
        silent = Leave(_SESSION_ENDED, between_steps=agreed)
        orders: list[Order] = []
        for replica_id in list(state.silent):
            orders += self._remove(job, state, replica_id, silent, now)
        return orders

    def _miss_unheard(self, job: str, state: Job, activity: Activity, now: float) -> list[Order]:
        """Members that wait in a step for one that has not reported to this lighthouse wait no
        longer (rule E8)."""
        if not state.waits_for_unheard(activity, self._config.heartbeat_timeout_s, now):
            return []
        state.term.over_from = activity.step
        num_missing = state.term.num_groups - state.members.num_reported
        why = f"{num_missing} of its {state.term.num_groups} groups have not come back"
        ends = TermEnds(state.members.last.quorum_id, activity.step, why)
        return [ReportTermEnds(job, ends, tuple(state.members.quorum_left()))]

    def _end_stalled_term(self, job: str, state: Job, now: float) -> list[Order]:
        """Groups that have not begun a step in time keep the others waiting in it no longer."""
        step, due_at = state.stalled_step(self._config.join_timeout_s, now)
        if step is None:
            return []
        late = state.late_in_term(step, due_at)
        if not late:
            return []
        state.members.left_out(late)
        state.term.over_from, state.spent_id = step, state.last_id
        why = f"{name_some(late)} did not begin step {step} in time"
        ends = TermEnds(state.members.last.quorum_id, step, why)
        return [ReportTermEnds(job, ends, tuple(state.members.quorum_left()))]

    def _settle(
        self, job: str, state: Job, orders: list[Order], now: float, asked: Sequence[str] = ()
    ) -> tuple[Order, ...]:
        """Draw all conclusions for one job, after ``asked`` have asked."""
        newcomers = list(asked)
        for replica_id in state.members.names.take_heirs():
            if replica_id in state.held:
                state.members.asked(*state.held.pop(replica_id), now)
                newcomers.append(replica_id)
        state.hangs.heed_again(state.members.recalled())
        look = look_at(state.members, self._config)
        if look <= now:
            decision = self._decide(job, state, orders, now)
            if isinstance(decision, Formed):
                orders += state.leave_behind(job)
                orders.append(self._publish(job, state, decision, now))
                newcomers = state.members.waiting()
            look = look_at(state.members, self._config)
        orders += [ReportWaiting(job, each) for each in state.announce(newcomers)]
        if not len(state.members):
            self._end(job, state, now)
        else:
            self._wake(state.members.next_death())
            self._wake(state.hangs.look_at())
            self._wake(state.term.due_at)
            if now < look < math.inf:
                self._wake(look)
            gathers_until = state.members.gathers_until
            if gathers_until is not None and now < gathers_until:
                self._wake(gathers_until)
        return tuple(orders)

    def _decide(self, job: str, state: Job, orders: list[Order], now: float) -> Formed | Waiting:
        """Whether there is a quorum now. Groups that are out of time are stragglers from here
        on."""
        view = state.members.view(now)
        state.members.sharpen(view)
        deadlines = absent_deadlines(view, self._config)
        late = sorted(key for key, at in deadlines.items() if at <= now)
        for replica_id, since in state.members.left_out(late):
            orders.append(ReportLeftHealing(job, replica_id, now - since))
        return decide(view, self._config, now)

    def _publish(self, job: str, state: Job, formed: Formed, now: float) -> AnswerQuorum:
        previous = state.members.previous
        may_keep_id = (
            previous is not None
            and state.heard_id <= state.last_id != state.spent_id
            and [member.place for member in formed.members]
            == [member.place for member in previous.participants]
            and not any(member.commit_failures for member in formed.members)
        )
        if not may_keep_id:
            state.last_id = self._ids.next(max(state.last_id, state.heard_id))
        quorum = Quorum(
            quorum_id=state.last_id,
            participants=formed.members,
            joining=joining(formed.members, previous),
        )
        begins_anew = state.members.is_finished and formed.lost_from is not None
        callers = state.members.publish(quorum)
        state.announcements, state.left = Announcements(), {}
        state.term = RunningTerm(quorum.steady, quorum.max_step, formed_at=now)
        if formed.lost_from is not None:
            state.history.went_back()
        state.history.published(quorum, now)
        return AnswerQuorum(job, callers, quorum, formed.lost_from, begins_anew)

    def _end(self, job: str, state: Job, now: float) -> None:
        del self._jobs[job]
        last_id = max(state.last_id, state.heard_id)
        if state.members.last.quorum_id or last_id > self._ids.first:
            is_finished = state.history.end() or state.members.is_finished
            self._ended[job] = EndedJob(
                state.members.last, last_id, state.history, now, is_finished
            )
        while len(self._ended) > self._config.max_jobs:
            _, forgotten = self._ended.popitem(last=False)
            self._ids.forget(forgotten.last_id, now)

    def _wake(self, at: float | None) -> None:
        if at is not None and at < (math.inf if self._wake_at is None else self._wake_at):
            self._wake_at = at


def _turn_away(state: Job, misfits: list[Member], trains: Member, now: float) -> list[Order]:
    """Refuse waiting groups that are not like one that ``trains``."""
    orders: list[Order] = []
    for misfit in misfits:
        caller = state.members.turned_away(misfit.replica_id, now)
        if caller is not None:
            refused = RequestRefused(why_unlike(misfit, trains))
            orders.append(RefuseRequest(caller, refused))
    return orders


def _superseded(caller: int, replica_id: str) -> RefuseRequest:
    reason = f"a newer request of {replica_id!r} has taken the place of this one"
    return RefuseRequest(caller, QuorumFailed(reason))
