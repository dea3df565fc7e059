"""Checks one life of a lighthouse: records what it receives, and looks at what it orders then."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tools.sim.invariants import SLACK_S, Invariants, must
from tools.sim.liveness import LOOK_S, Key, LivenessChecks
from tools.sim.places import PlaceChecks
from tools.sim.trace import Trace
from tools.sim.world import Process
from torchft_svc.core.quorum.activity import Activity, Phase
from torchft_svc.core.quorum.lighthouse.jobs import (
    ReportEviction,
    ReportHang,
    ReportLeftHealing,
    ReportLoss,
    ReportPlaceReturned,
    ReportPlaceTaken,
    ReportStraggler,
)
from torchft_svc.core.quorum.lighthouse.lighthouse import (
    REPORT_PAUSE_AFTER_S,
    Lighthouse,
    Publish,
    Report,
    ReportAcceptedLoss,
)
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Drain,
    Hello,
    Leave,
    Lost,
    News,
    NoQuorumYet,
    Question,
    Refusal,
    SessionMessage,
    Withdrawal,
)
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Member, QuorumConfig
from torchft_svc.errors import RequestRefused

# What a lighthouse may count of each time in which its process was stopped, in heartbeat timeouts.
COUNTED_OF_A_STOP = 0.5
# The reason for which prepared spares are drained in the end.
JOB_FINISHED = "the job has finished"
# The reason for which a group is refused that has the name of an earlier one.
NAME_TAKEN = "is taken"
# The world's timers are exact, and an answer at a deadline comes in that moment.
TIMER_SLACK_S = 0.01
# Waiting groups receive the reason by then: jobs are looked at in turns, and one may have come just
# after.
MAX_UNINFORMED_S = 2 * REPORT_PAUSE_AFTER_S + LOOK_S


class ClientRecord:
    """Whose stream it is, and the last question that came over it."""

    def __init__(self) -> None:
        self.key: Key = ("", "")
        self.number_asked = 0

    @property
    def question(self) -> tuple[ClientRecord, int]:
        return self, self.number_asked


class LighthouseChecks:
    """All times are on the lighthouse's clock, which stops with its process."""

    def __init__(
        self,
        config: QuorumConfig,
        core: Lighthouse,
        process: Process,
        invariants: Invariants,
        trace: Trace,
        name: str,
    ) -> None:
        self._config = config
        self._name = name
        self._core = core
        self._process = process
        self._invariants = invariants
        self._trace = trace
        self._sessions: set[ClientRecord] = set()
        self._waiting: set[ClientRecord] = set()
        self._signs_at: dict[Key, float] = {}
        self._signs_awake_at: dict[Key, float] = {}
        # When those asked that do not know what they wait for.
        self._asked_at: dict[ClientRecord, float] = {}
        self._uninformed: set[ClientRecord] = set()  # that have to receive a loss at once
        self._liveness = LivenessChecks(config)
        self._places = PlaceChecks(config.heartbeat_timeout_s)
        self._held: dict[Key, tuple[ClientRecord, Member]] = {}  # the questions of spares
        self._questions: dict[Key, tuple[ClientRecord, Member]] = {}  # and of groups
        self._undrained: set[ClientRecord] = set()  # spares of a job that has just finished
        self._began_at = self._now
        self._formed_at: dict[str, float] = {}  # the last quorum of each job

    @property
    def _now(self) -> float:
        return self._process.world.now - self._core.clock.missed_s

    @property
    def _awake_at(self) -> float:
        """The time that this process has run, whatever the core takes it for."""
        return self._process.world.now - self._process.stopped_s

    # -- what comes in ---------------------------------------------------------------------------

    def opened(self, client: ClientRecord, hello: Hello) -> None:
        self._sessions.add(client)
        self._places.opened(client.key, hello.num_groups, self._now, is_spare=hello.is_spare)
        if self._places.has_to_end(client.key):
            self._undrained.add(client)
        self._record_sign(client)
        self._invariants.progress.opened(*client.key, hello.last)

    def received(self, client: ClientRecord, message: SessionMessage) -> None:
        if isinstance(message, Beat):
            self._beat(client, message)
        elif isinstance(message, Question):
            self._asked(client, message)
        elif isinstance(message, Withdrawal):
            self.withdrew(client, message.number)
        else:
            self._left(client, message)

    def _beat(self, client: ClientRecord, beat: Beat) -> None:
        self._record_sign(client)
        if beat.phase is not None:
            doing = Activity(beat.phase, beat.step, self._now - beat.lasts_s)
            self._liveness.does(client.key, doing, self._now)
            is_in = doing.since > self._formed_at.get(client.key[0], -math.inf)
            if is_in or doing.phase is not Phase.QUORUM:
                self._invariants.progress.reached(*client.key, doing.reached)

    def _asked(self, client: ClientRecord, question: Question) -> None:
        self.withdrew(client)
        client.number_asked = question.number
        self._waiting.add(client)
        member, timeout_s = question.member, question.timeout_s
        what = member.replica_id
        self._invariants.waits.begin_wait(
            client.question, self._process, what, timeout_s, slack_s=TIMER_SLACK_S
        )
        has_rival = self._has_rival(*client.key)
        if self._places.asked(client.key, member.seen_quorum_id, has_rival=has_rival):
            self._held[client.key] = client, member
            self._record_sign(client)
            return
        self._record_sign(client)
        self._ask(client, member)

    def _ask(self, client: ClientRecord, member: Member) -> None:
        """A group that is no prepared spare, or no longer, waits for a quorum."""
        self._questions[client.key] = client, member
        if client in self._sessions:
            self._asked_at[client] = self._now
        self._invariants.progress.asked(client.key[0], member, lambda: self._has_rival(*client.key))
        self._liveness.asked(client.key, member, self._now)
        if not self._has_rival(*client.key):
            at = self._process.world.now
            self._invariants.newcomers.asked(client.key[0], member, at)

    def withdrew(self, client: ClientRecord, number: int | None = None) -> None:
        """Withdraw question ``number`` (None: the last one)."""
        if client in self._waiting and number in (None, client.number_asked):
            self._forget(client)
            self._invariants.waits.end(client.question)
            if self._held.get(client.key, (None,))[0] is client:
                del self._held[client.key]
                self._places.withdrew(client.key)
            self._liveness.withdrew(client.key, self._now)
            self._invariants.newcomers.gone(*client.key)

    def _left(self, client: ClientRecord, leave: Leave) -> None:
        self._sessions.discard(client)
        if leave.between_steps:
            self._invariants.discards.left(client.key[1])
        self._places.left(client.key, self._now, leave)
        self._held.pop(client.key, None)
        self._invariants.progress.gone(*client.key)

    def closed(self, client: ClientRecord) -> None:
        """Record the end of a stream; a group without another session is gone, or missing."""
        self.withdrew(client)
        if client in self._sessions:
            self._sessions.remove(client)
            if all(each.key != client.key for each in self._sessions):
                self._places.left(client.key, self._now)
                self._invariants.progress.went_silent(*client.key)

    def lead_ended(self) -> None:
        """Withdraw questions over sessions; calls are refused."""
        for client in self._waiting & self._sessions:
            self.withdrew(client)

    def _record_sign(self, client: ClientRecord) -> None:
        key = client.key
        if client in self._sessions:
            self._invariants.discards.session_opened(key[1])
        if self._places.record_sign(key, self._now):
            return
        self._signs_at[key] = self._now
        self._signs_awake_at[key] = self._awake_at
        self._liveness.record_sign(key)

    # -- what goes out ---------------------------------------------------------------------------

    def sent(self, clients: Sequence[ClientRecord], news: News) -> None:
        """Record news that are sent to ``clients``."""
        if isinstance(news, Lost):
            self._uninformed.difference_update(clients)
        elif isinstance(news, NoQuorumYet):
            for client in clients:
                self._asked_at.pop(client, None)
        elif isinstance(news, TermEnds) and news.step is not None:
            for client in clients:
                self._invariants.ids.spent(client.key[0], news.quorum_id)
                self._liveness.term_ended(client.key, news, self._now)
        elif isinstance(news, Drain) and news.reason == JOB_FINISHED:
            early = [each.key for each in clients if each not in self._undrained]
            must(not early, "G4", f"{early} have to end, and their job has not finished")
            self._undrained.difference_update(clients)

    def executed(self) -> None:
        """Check what holds when all orders of an input are executed."""
        must(
            not self._uninformed,
            "I5",
            lambda: f"{len(self._uninformed)} sessions do not receive a loss",
        )
        left = [each.key for each in self._undrained]
        must(not left, "G4", lambda: f"{left} do not learn that their job has finished")

    def refused(self, client: ClientRecord, refusal: Refusal) -> None:
        """Record an answer without a quorum; a group whose name another one has is forgotten."""
        self._answered(client, refusal.number)
        if isinstance(refusal.error, RequestRefused) and NAME_TAKEN in str(refusal.error):
            must(self._has_rival(*client.key), "I5", f"nobody else has the name of {client.key}")
            self._places.refused(client.key)
            self._signs_at.pop(client.key, None)
            self._signs_awake_at.pop(client.key, None)
        if all(each.key != client.key for each in self._waiting):
            self._liveness.withdrew(client.key, self._now)
            self._invariants.newcomers.gone(*client.key)

    def published(self, order: Publish, answered: Sequence[tuple[ClientRecord, int]]) -> None:
        """Check a quorum; ``answered``: the clients that receive it, each with its question."""
        quorum = order.quorum
        self._trace.record(
            self._name,
            f"quorum {quorum.quorum_id} at step {quorum.max_step}: "
            + ", ".join(f"{each.replica_id}@{each.step}" for each in quorum.participants),
        )
        self._invariants.ids.published(order.job, quorum)
        self._invariants.groups.published(order.job, quorum)
        self._places.published(order.job, quorum, goes_back=order.lost_from is not None)
        is_young = self._now - self._began_at < self._config.heartbeat_timeout_s
        self._invariants.progress.published(order, by=self, is_young=is_young)
        self._invariants.newcomers.published(order)
        self._formed_at[order.job] = self._now
        self._liveness.published(order.job, quorum, self._signs_at, self._now)
        for client, number in answered:
            self._answered(client, number)
        receivers = sorted(client.key for client, _ in answered)
        members = [(order.job, each.replica_id) for each in quorum.participants]
        must(receivers == members, "I5", f"the answer for {members[:4]} goes to {receivers[:4]}")

    def reported(self, report: Report) -> None:
        if isinstance(report, ReportLoss):
            self._lost(report)
        elif isinstance(report, ReportPlaceTaken):
            self._place_taken((report.job, report.replica_id))
        elif isinstance(report, ReportPlaceReturned):
            self._place_returned((report.job, report.replica_id))
        elif isinstance(report, ReportHang):
            self._trace.record(self._name, f"{report.replica_id} hangs: {report.phase.value}")
            self._invariants.hangs.reported(report)
        elif isinstance(report, ReportEviction):
            self._trace.record(self._name, f"{report.replica_id} is left out: {report.reason}")
            self._expect_loss(report)
            self._liveness.evicted(report, self._now)
            self._invariants.ids.spent(report.job, report.quorum_id)
        elif isinstance(report, ReportStraggler):
            self._expect_loss(report)
        elif isinstance(report, ReportLeftHealing):
            self._liveness.left_healing(report, self._now)
        elif isinstance(report, ReportAcceptedLoss):
            self._invariants.progress.accepted(report.job)
            self._trace.record(self._name, f"the loss of {report.job} is accepted")

    def _place_taken(self, key: Key) -> None:
        """Check a place that is taken: the spare is a group as any other from now on."""
        self._trace.record(self._name, f"{key[1]} takes a place")
        self._places.placed(key, self._now, has_rival=self._has_rival(*key))
        client, member = self._held.pop(key)
        self._record_sign(client)
        self._ask(client, member)

    def _place_returned(self, key: Key) -> None:
        """A spare waits for a place again: its question is that of no group."""
        self._trace.record(self._name, f"{key[1]} stands by again")
        client, member = self._questions.pop(key)
        self._places.returned(key, self._now)
        if self._places.has_finished(key[0]):
            self._expect_drains(key[0])
        self._held[key] = client, member
        self._asked_at.pop(client, None)
        self._liveness.withdrew(key, self._now)
        self._invariants.newcomers.gone(*key)
        self._signs_at.pop(key, None)
        self._signs_awake_at.pop(key, None)
        self._end_if_nobody_is_left(key[0])

    def _answered(self, client: ClientRecord, number: int) -> None:
        what = "the lighthouse answers a question"
        self._invariants.waits.answered((client, number), what)
        self._forget(client)

    def _forget(self, client: ClientRecord) -> None:
        self._waiting.discard(client)
        self._asked_at.pop(client, None)
        if self._questions.get(client.key, (None,))[0] is client:
            del self._questions[client.key]

    def _lost(self, loss: ReportLoss) -> None:
        self._trace.record(self._name, f"{loss.replica_id} is out: {loss.reason}")
        self._invariants.progress.lost(loss, by=self)
        self._invariants.newcomers.gone(loss.job, loss.replica_id)
        key = (loss.job, loss.replica_id)
        if loss.reason.startswith("its session ended"):
            others = [each for each in self._sessions if each.key == key]
            must(not others, "I5", f"{key} is out, and has another session")
        if not loss.between_steps:
            self._expect_loss(loss)
        self._signs_at.pop(key, None)
        sign_at = self._signs_awake_at.pop(key, self._awake_at)
        if "no sign of life" in loss.reason:
            silent_s, limit_s = self._awake_at - sign_at, self._config.heartbeat_timeout_s
            least_s = limit_s * (1 - COUNTED_OF_A_STOP * bool(self._process.stopped_s))
            must(silent_s + 1e-6 >= least_s, "I5", f"{key} is dead after {silent_s:.2f} s")
        if self._places.gone(key, self._now):
            self._expect_drains(loss.job)
        self._liveness.gone(key, self._now)
        self._end_if_nobody_is_left(loss.job)
        if {*loss.recipients} - {loss.replica_id} and not loss.between_steps:
            self._invariants.discards.reported_as_lost(loss.replica_id)

    def _end_if_nobody_is_left(self, name: str) -> None:
        if all(job != name for job, _ in self._signs_at):
            self._liveness.over(name)

    def _expect_drains(self, job: str) -> None:
        """Expect that the spares of a job that has finished learn so."""
        spares = self._places.spares_of(job)
        self._undrained |= {each for each in self._sessions if each.key in spares}

    def _expect_loss(self, lost: ReportLoss | ReportEviction | ReportStraggler) -> None:
        """Expect a loss to be sent over all sessions of its recipients: nobody knows which one is
        read."""
        keys = {(lost.job, each) for each in lost.recipients}
        self._uninformed |= {each for each in self._sessions if each.key in keys}

    # -- what is looked at -----------------------------------------------------------------------

    def check_liveness(self) -> None:
        self._liveness.check_jobs(self._core.jobs, self._alive(), self._now)
        self._places.check(self._now)
        for client, at in self._asked_at.items():
            waits_s = self._now - at
            must(waits_s <= MAX_UNINFORMED_S, "I5", f"{client.key} does not receive why it waits")

    def has_finished(self, job: str) -> bool:
        """Whether all groups of ``job`` have ended on purpose."""
        return self._places.has_finished(job)

    def has_to_end(self, job: str, name: str) -> bool:
        """Whether ``job`` has finished, and group ``name`` has a session."""
        names = {stable_name(each.key[1]) for each in self._sessions if each.key[0] == job}
        return self.has_finished(job) and name in names

    def check_memory(self) -> None:
        """Check that the lighthouse knows the groups that have given a sign of life, and were not
        reported as gone since; and what it remembers of others."""
        jobs = self._core.jobs._jobs
        known = {(name, each) for name, job in jobs.items() for each in job.members._known}
        gone = sorted(known - self._signs_at.keys())
        must(not gone, "I7", f"{gone[:4]} are gone, and the lighthouse counts them as living")
        connected = self._signs_at.keys() & {each.key for each in self._sessions}
        lost = sorted(connected - known)  # others may have left: what comes late does not count
        must(not lost, "I7", f"{lost[:4]} are connected, and the lighthouse has forgotten them")
        self._liveness.check_memory(self._core.jobs, self._alive())

    def _alive(self) -> set[Key]:
        """The groups that have a session, or gave a sign of life in time."""
        since = self._now - self._config.heartbeat_timeout_s - SLACK_S
        signs = (key for key, at in self._signs_at.items() if at >= since)
        return {*signs, *(client.key for client in self._sessions)}

    def _has_rival(self, job: str, replica_id: str) -> bool:
        name = stable_name(replica_id)
        return any(
            (where, stable_name(who)) == (job, name) and who != replica_id
            for where, who in self._alive()
        )
