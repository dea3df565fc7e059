"""A lighthouse: its sessions and calls, which groups they stand for, and the orders of each input.

Inputs are method calls with ``now``, the instant of a monotonic clock; each returns the orders that
follow, for a `Shell` to execute: the service's driver, and the simulator's actor. Streams and calls
are numbers of the shell's choice, each used once. What `Jobs` decides about groups and callers
becomes an order for their streams and calls in `Sessions`.

The orders of an input are one sequence, because a stream carries them in that order: members learn
of a loss before they receive the quorum that follows, and of newcomers after it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from torchft_svc.core.limits import check_name
from torchft_svc.core.pausable_clock import PausableClock, usual_look_s
from torchft_svc.core.pieces import Pieces
from torchft_svc.core.quorum.activity import Activity
from torchft_svc.core.quorum.lighthouse.incidents import Goodput, Incident, Ledgers, Moment
from torchft_svc.core.quorum.lighthouse.jobs import JobReport, Jobs
from torchft_svc.core.quorum.lighthouse.overview import JobSample, JobStatus
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Drain,
    Hello,
    Kill,
    Leave,
    Lost,
    News,
    NoQuorumYet,
    Question,
    Refusal,
    SessionMessage,
    Welcome,
    Withdrawal,
)
from torchft_svc.core.quorum.types import Member, Quorum, QuorumConfig
from torchft_svc.core.streams import EndStream, ReportStandstill
from torchft_svc.errors import DeadlineExceeded, RequestRefused, TorchFTError, Unreachable

# Ids count from the milliseconds since 2025: a restarted lighthouse is above the one before.
ID_EPOCH_S = 1_735_689_600
# Each lighthouse has its own remainder: if a job splits between two of them, the ids of the halves
# differ when they meet again. Ids stay below 2**53 for 69 years.
ID_STRIDE = 4096
# Of a manager whose link breaks again and again, some sessions are dead without being noticed.
MAX_SESSIONS_PER_GROUP = 8
# A group is sent its shortest time between beats again when that has changed by this factor:
# otherwise the groups that came first would go on beating as if they were alone. By itself no
# manager beats more often than at the shortest interval.
CHANGED_INTERVAL = 1.25
SHORTEST_INTERVAL_S = 0.05
# Groups wait for one another in every step; longer waits are reported.
REPORT_PAUSE_AFTER_S = 2.0
# Of jobs, of launched runs, and of those that have ended.
LEDGERS_PER_JOB = 3
# Informing ten thousand groups would delay the others for too long: the rest is informed at the
# next look.
MAX_INFORMED_PER_LOOK = 1000


def first_quorum_id(wall_s: float, remainder: int) -> int:
    """An id that no earlier lighthouse has given out, if the clock has not gone back since."""
    return max(0, int((wall_s - ID_EPOCH_S) * 1000)) * ID_STRIDE + remainder


def expires_at(asked_at: float, timeout_s: float) -> float:
    """The time at which a question is refused that has no answer by then."""
    return asked_at + timeout_s


# -- orders ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``news`` over each of ``streams``."""

    streams: tuple[int, ...]
    news: News


@dataclass(frozen=True, slots=True)
class Publish:
    """Send ``quorum`` to all that asked for it.

    ``answers``: streams, each with the number of its question; ``calls``: unary ones.
    ``lost_from``: the committed step of the job if it goes back with this quorum, else None;
    ``begins_anew``: that step belongs to a run that had finished. ``waited_since``: the time of the
    first of these questions (`math.inf`: nobody waits any more).
    """

    job: str
    quorum: Quorum
    answers: tuple[tuple[int, int], ...] = ()
    calls: tuple[int, ...] = ()
    lost_from: int | None = None
    begins_anew: bool = False
    waited_since: float = field(default=math.inf, compare=False)


@dataclass(frozen=True, slots=True)
class RefuseCall:
    """Answer a unary call with ``error``."""

    call: int
    error: TorchFTError


@dataclass(frozen=True, slots=True)
class ReportPause:
    """Report why groups of ``job`` have waited for ``for_s`` seconds; again when that changes."""

    job: str
    for_s: float
    why: str


@dataclass(frozen=True, slots=True)
class ReportCommand:
    """Report that an operator's ``command`` is sent to ``replica_id``."""

    job: str
    replica_id: str
    command: Kill | Drain


@dataclass(frozen=True, slots=True)
class ReportAcceptedLoss:
    """Report that an operator lets ``job`` go back from ``committed_step``."""

    job: str
    committed_step: int


Report = JobReport | ReportPause | ReportStandstill | ReportCommand | ReportAcceptedLoss
Order = Send | Publish | RefuseCall | EndStream | Report
Orders = tuple[Order, ...]


class Shell(Protocol):
    """Executes the orders of a lighthouse, one method for each kind."""

    def send(self, order: Send, /) -> None: ...
    def publish(self, order: Publish, /) -> None: ...
    def refuse_call(self, order: RefuseCall, /) -> None: ...
    def end_stream(self, order: EndStream, /) -> None: ...
    def report(self, report: Report, /) -> None: ...


def execute(orders: Orders, shell: Shell) -> None:
    """Let ``shell`` execute all orders of an input."""
    for order in orders:
        if isinstance(order, Send):
            shell.send(order)
        elif isinstance(order, Publish):
            shell.publish(order)
        elif isinstance(order, RefuseCall):
            shell.refuse_call(order)
        elif isinstance(order, EndStream):
            shell.end_stream(order)
        else:
            shell.report(order)


# -- sessions and open questions -------------------------------------------------------------------

_Key = tuple[str, str]  # job and replica id


@dataclass(slots=True)
class Session:
    """A stream of a group: the number of its last question, and the caller as which that waits."""

    stream: int
    job: str
    replica_id: str
    beat_interval_s: float = 0.0  # as it was sent
    number: int = 0
    caller: int | None = None

    @property
    def key(self) -> _Key:
        """What all sessions of the group share."""
        return self.job, self.replica_id

    @property
    def answered(self) -> tuple[int, int]:
        """The stream, and the number of the question that is answered over it."""
        return self.stream, self.number


@dataclass(slots=True)
class OpenQuestion:
    """A question without an answer yet: of a session, or of a unary ``call``.

    ``is_of_spare``: it waits for a place, so that it does not show that its job stands still.
    """

    job: str
    timeout_s: float
    expires_at: float
    session: Session | None = None
    call: int = 0
    is_of_spare: bool = False


@dataclass(slots=True)
class OpenPause:
    """A job in which callers wait, each with the reason that it was sent."""

    since: float
    look_at: float
    waiting: dict[int, str] = field(default_factory=dict)
    reported: str = ""


class Sessions:
    """Which stream leads to which group, which question waits as which caller; the `Outputs` of
    `Jobs`.

    A group is alive as long as one of its sessions is open. It may have several: a session that was
    cut off may go unnoticed for seconds after its manager has opened the next one, and without a
    token anybody can open one under the id of a living group. So each of them receives its news.
    """

    def __init__(self, callers: itertools.count[int]) -> None:
        self.by_stream: dict[int, Session] = {}
        self.questions: dict[int, OpenQuestion] = {}  # by caller
        self.calls: dict[int, int] = {}  # the callers of unary calls
        self.pauses: dict[str, OpenPause] = {}  # by job, the one to be looked at next first
        #: When to look for questions that have expired; may be too early, never too late. A timer
        #: for each would cost as much as its answer, and nearly all are answered.
        self.expiry_at = math.inf
        self._callers = callers
        # The streams that lead to a group, the one that was silent the longest first.
        self._streams: dict[_Key, dict[int, None]] = {}
        self._orders: list[Order] = []  # of the present input

    def pop_orders(self) -> list[Order]:
        """The orders since the last call."""
        orders, self._orders = self._orders, []
        return orders

    # -- what `Jobs` decides ---------------------------------------------------------------------

    def send(self, job: str, replica_ids: Iterable[str], news: News) -> None:
        """Order ``news`` to be sent to those of these groups that have a session."""
        if streams := self.streams_of(job, replica_ids):
            self._orders.append(Send(streams, news))

    def publish(
        self,
        job: str,
        callers: tuple[int, ...],
        quorum: Quorum,
        lost_from: int | None,
        begins_anew: bool,
    ) -> None:
        """Order ``quorum`` to be sent to ``callers``."""
        answers, calls = [], []
        since = math.inf
        for caller in callers:
            question = self.close_question(caller)
            if question is None:
                continue
            since = min(since, question.expires_at - question.timeout_s)
            if question.session is not None:
                answers.append(question.session.answered)
            else:
                calls.append(question.call)
        order = Publish(job, quorum, tuple(answers), tuple(calls), lost_from, begins_anew, since)
        self._orders.append(order)

    def refuse(self, caller: int, error: TorchFTError) -> None:
        """Order ``caller`` to be refused, if it still waits."""
        question = self.close_question(caller)
        if question is None:
            return
        if question.session is None:
            self._orders.append(RefuseCall(question.call, error))
        else:
            session = question.session
            self._orders.append(Send((session.stream,), Refusal(session.number, error)))

    def report(self, report: Report) -> None:
        """Order ``report`` to be logged."""
        self._orders.append(report)

    # -- streams ---------------------------------------------------------------------------------

    def send_over(self, streams: tuple[int, ...], news: News) -> None:
        """Order ``news`` to be sent over ``streams``."""
        self._orders.append(Send(streams, news))

    def end_stream(self, stream: int, error: TorchFTError | None = None) -> None:
        """Order ``stream`` to be ended."""
        self._orders.append(EndStream(stream, error))

    def streams_of(self, job: str, replica_ids: Iterable[str]) -> tuple[int, ...]:
        """The streams that lead to these groups, all of each."""
        return tuple(
            stream for each in replica_ids for stream in self._streams.get((job, each), ())
        )

    def add_session(self, session: Session) -> int:
        """Add a session; returns how many its group has now."""
        self.by_stream[session.stream] = session
        streams = self._streams.setdefault(session.key, {})
        streams[session.stream] = None
        return len(streams)

    def remove_session(self, session: Session) -> None:
        """Remove a session that is over."""
        del self.by_stream[session.stream]
        streams = self._streams[session.key]
        del streams[session.stream]
        if not streams:
            del self._streams[session.key]

    def has_session(self, job: str, replica_id: str) -> bool:
        """Whether a session of the group is open."""
        return (job, replica_id) in self._streams

    def record_beat(self, session: Session) -> None:
        """Record a sign of life of ``session``, now the least silent one of its group."""
        streams = self._streams[session.key]
        if len(streams) > 1:
            streams[session.stream] = streams.pop(session.stream)

    def most_silent(self, session: Session) -> Session:
        """The session of the same group that was silent for the longest time."""
        return self.by_stream[next(iter(self._streams[session.key]))]

    # -- questions -------------------------------------------------------------------------------

    def open_question(self, question: OpenQuestion, at: float) -> int:
        """Add a question; returns the caller as which it waits."""
        caller = next(self._callers)
        self.questions[caller] = question
        self.expiry_at = min(self.expiry_at, question.expires_at)
        if not question.is_of_spare:
            self._add_to_pause(question.job, caller, at)
        if question.session is not None:
            question.session.caller = caller
        else:
            self.calls[question.call] = caller
        return caller

    def await_quorum(self, caller: int, now: float) -> None:
        """Count ``caller``, which has waited for a place, among those that wait for a quorum."""
        question = self.questions[caller]
        question.is_of_spare = False
        self._add_to_pause(question.job, caller, now)

    def await_place(self, caller: int) -> None:
        """Count ``caller``, which has waited for a quorum, among those that wait for a place."""
        question = self.questions[caller]
        question.is_of_spare = True
        self._remove_from_pause(question.job, caller)

    def _remove_from_pause(self, job: str, caller: int) -> None:
        pause = self.pauses[job]
        del pause.waiting[caller]
        if not pause.waiting:
            del self.pauses[job]

    def _add_to_pause(self, job: str, caller: int, at: float) -> None:
        pause = self.pauses.get(job)
        if pause is None:
            pause = self.pauses[job] = OpenPause(at, at + REPORT_PAUSE_AFTER_S)
        pause.waiting[caller] = ""

    def close_question(self, caller: int) -> OpenQuestion | None:
        """Remove the question that waits as ``caller`` (None: there is none)."""
        question = self.questions.pop(caller, None)
        if question is None:
            return None
        if question.session is not None:
            question.session.caller = None
        else:
            del self.calls[question.call]
        if not question.is_of_spare:
            self._remove_from_pause(question.job, caller)
        return question


# -- the machine -----------------------------------------------------------------------------------


class Lighthouse:
    """All sessions and unary calls of one lighthouse, and the `jobs` that they are about."""

    def __init__(
        self, config: QuorumConfig, first_id: int, now: float, wall_offset_s: float = 0.0
    ) -> None:
        """``wall_offset_s``: unix seconds less ``now``."""
        self._config = config
        self.clock = PausableClock(usual_look_s(config.heartbeat_timeout_s), now)
        self._wall_offset_s = wall_offset_s
        self._reported_missed_s = 0.0
        self._callers = itertools.count()
        self._begin_lead(first_id, now)

    def _begin_lead(self, first_id: int, at: float) -> None:
        self._ledgers = Ledgers(LEDGERS_PER_JOB * self._config.max_jobs)
        self._sessions = Sessions(self._callers)
        self.jobs = Jobs(
            self._config,
            self._sessions,
            first_id,
            ID_STRIDE,
            ids_per_s=1000 * ID_STRIDE,
            now=at,
            unix_s=self._unix_s,
            ledgers=self._ledgers,
        )

    def _unix_s(self, at: float) -> float:
        """Unix seconds at the time ``at`` of the decisions."""
        return at + self.clock.missed_s + self._wall_offset_s

    # -- inputs: sessions ------------------------------------------------------------------------

    def opened(self, stream: int, job: str, hello: Hello, now: float) -> Orders:
        """Open a session: a stream has begun with ``hello``.

        Raises:
            RequestRefused: this group cannot have a session; the stream has to end.
        """
        at = self._begin_input(now)
        replica_id, last = hello.replica_id, hello.last
        is_past = self.jobs.is_past(job, replica_id, last)
        session = Session(stream, job, replica_id)
        num_sessions = self._sessions.add_session(session)  # first: its news may follow at once
        try:
            if hello.is_spare and not self.jobs.is_group(job, replica_id):
                self.jobs.opened_by_spare(job, replica_id, at)
            else:
                self.jobs.opened(job, replica_id, last, at, num_groups=hello.num_groups)
        except RequestRefused:
            self._sessions.remove_session(session)
            raise
        session.beat_interval_s = self.jobs.beat_interval_s(job)
        if num_sessions > MAX_SESSIONS_PER_GROUP:
            self._end_most_silent(session, at)
        if is_past:
            lost = Lost(replica_id, "its session had ended", last.quorum_id)
            self._sessions.send_over((stream,), lost)
        else:
            for news in self.jobs.missed_news(job, replica_id, last, hello.num_groups):
                self._sessions.send_over((stream,), news)
        if command := self.jobs.missed_command(job, replica_id, at):
            self._sessions.send_over((stream,), command)
        return self._end_input(Send((stream,), Welcome(session.beat_interval_s)))

    def _end_most_silent(self, session: Session, at: float) -> None:
        silent = self._sessions.most_silent(session)
        self._sessions.remove_session(silent)
        self._withdraw_question(silent, at)
        others = f"{silent.replica_id!r} has {MAX_SESSIONS_PER_GROUP} others"
        error = RequestRefused(f"{others}, this one was silent the longest")
        self._sessions.end_stream(silent.stream, error)

    def received(self, stream: int, message: SessionMessage, now: float) -> Orders:
        """Process a message that has come over ``stream``; ignored if that has ended.

        Raises: RequestRefused: it breaks the protocol; the stream has to end.
        """
        session = self._sessions.by_stream.get(stream)
        if session is None:
            return ()
        at = self._begin_input(now)
        if isinstance(message, Beat):
            self._record_beat(session.job, session.replica_id, message, at)
            self._adapt_beats(session)
            self._sessions.record_beat(session)
        elif isinstance(message, Question):
            self._ask(session, message, at)
        elif isinstance(message, Withdrawal):
            if message.number == session.number:  # else another question has replaced it
                self._withdraw_question(session, at)
        else:
            self.leave_session(session, message, at)
        return self._end_input()

    def closed(self, stream: int, now: float, error: TorchFTError | None = None) -> Orders:
        """Close the session of a stream that has ended, maybe with ``error``; a group without
        another one is gone, or missing."""
        session = self._sessions.by_stream.get(stream)
        if session is None:
            return ()
        at = self._begin_input(now)
        job, replica_id = session.key
        self.withdraw_closed(session, at)
        self._sessions.remove_session(session)
        if self._sessions.has_session(job, replica_id):
            return self._end_input()
        if error is not None and not isinstance(error, Unreachable):
            self._leave(job, replica_id, Leave(f"its session was refused: {error}"), at)
        else:
            self.jobs.went_silent(job, replica_id, at)
        return self._end_input()

    def _ask(self, session: Session, question: Question, at: float) -> None:
        member = question.member
        if member.replica_id != session.replica_id:
            raise RequestRefused(
                f"the session of {session.replica_id!r} cannot ask for {member.replica_id[:64]!r}"
            )
        self._withdraw_question(session, at)
        session.number = question.number
        until = expires_at(at, question.timeout_s)
        opened = OpenQuestion(session.job, question.timeout_s, until, session)
        self._request(opened, member, at, agreed=question.agreed)

    def leave_session(self, session: Session, leave: Leave, at: float) -> None:
        """Remove a group before its stream ends; its question gets an answer or an error."""
        leave.check()
        self._sessions.remove_session(session)
        self._leave(session.job, session.replica_id, leave, at)
        self._withdraw_question(session, at)
        self._sessions.end_stream(session.stream)

    # -- inputs: unary calls ---------------------------------------------------------------------

    def called(self, call: int, job: str, member: Member, timeout_s: float, now: float) -> Orders:
        """Record that unary ``call`` waits for a quorum with ``member``; it is answered once."""
        at = self._begin_input(now)
        opened = OpenQuestion(job, timeout_s, expires_at(at, timeout_s), call=call)
        self._request(opened, member, at)
        return self._end_input()

    def cancelled(self, call: int, now: float) -> Orders:
        """Withdraw unary ``call``, for which nobody waits; ignored if it was answered."""
        caller = self._sessions.calls.get(call)
        if caller is None:
            return ()
        at = self._begin_input(now)
        self._withdraw_caller(caller, at)
        return self._end_input()

    def heartbeat(self, job: str, replica_id: str, now: float) -> Orders:
        """Record a sign of life without a session.

        Raises:
            RequestRefused: there can be no such group.
        """
        at = self._begin_input(now)
        self._record_beat(job, replica_id, Beat(), at)
        return self._end_input()

    def left(self, job: str, replica_id: str, leave: Leave, now: float) -> Orders:
        """Remove a group without a session, which leaves.

        Raises: RequestRefused: there can be no such group, or reason.
        """
        check_name("replica_id", replica_id)
        leave.check()
        at = self._begin_input(now)
        self._leave(job, replica_id, leave, at)
        return self._end_input()

    # -- inputs: operators, the election, time ---------------------------------------------------

    def commanded(self, job: str, name: str, command: Kill | Drain, now: float) -> Orders:
        """Send an operator's command to the group with this replica id or name.

        Raises: RequestRefused: there is no such group, or it has no session.
        """
        at = self._begin_input(now)
        replica_id = self.jobs.find_group(job, name)
        streams = self._sessions.streams_of(job, (replica_id,))
        if not streams:
            raise RequestRefused(
                f"{replica_id!r} has no session with this lighthouse, it only sends heartbeats: "
                "it cannot receive commands, so ask its manager instead"
            )
        self.jobs.commanded(job, replica_id, command, at)
        self._sessions.send_over(streams, command)
        self._sessions.report(ReportCommand(job, replica_id, command))
        return self._end_input()

    def loss_accepted(self, job: str, now: float) -> Orders:
        """Let the next quorum of ``job`` lose committed steps, as an operator wants.

        Raises:
            RequestRefused: none is held back for that reason.
        """
        at = self._begin_input(now)
        committed_step = self.jobs.committed_step(job)
        self.jobs.accept_loss(job, at)
        return self._end_input(ReportAcceptedLoss(job, committed_step))

    def lead_ended(self, error: TorchFTError, first_id: int, now: float) -> Orders:
        """Inform all clients that another lighthouse leads, and forget them."""
        before = self._sessions
        at = self._begin_input(now)
        self._begin_lead(first_id, at)
        calls = (RefuseCall(call, error) for call in before.calls)
        streams = (EndStream(stream, error) for stream in before.by_stream)
        return self._end_input(*calls, *streams)

    def record_run_change(
        self, run: str, cause: str, nodes: tuple[str, ...], now: float, *, is_over: bool = True
    ) -> None:
        """Record a change of a launched run; it is not over while its nodes have no next world."""
        moment = Moment(self._unix_s(self._time(now)))
        ledger = self._ledgers.open_ledger(run, moment.at)
        ledger.record_run_change(cause, nodes, moment, is_over=is_over)

    def tick(self, now: float) -> Orders:
        """Draw conclusions from the time; call it at `next_deadline`, or more often."""
        at = self._begin_input(now)
        self._expire_questions(at)
        pauses = self._sessions.pauses
        while pauses:
            job, pause = next(iter(pauses.items()))
            if pause.look_at > at:
                break
            self._look_at_pause(job, pause, at)
        due_at = self.jobs.next_deadline()
        if due_at is not None and due_at <= at:
            self.jobs.tick(at)
        return self._end_input()

    # -- questions -------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """The time of the next `tick`, on the clock of ``now``; maybe too early, never too late."""
        at = self._sessions.expiry_at
        due_at = self.jobs.next_deadline()
        if due_at is not None and due_at < at:
            at = due_at
        if self._sessions.pauses:
            at = min(at, next(iter(self._sessions.pauses.values())).look_at)
        return None if at == math.inf else self.clock.look_by(at)

    def incidents(self, job: str, after: int = 0) -> list[Incident]:
        """See `Jobs.incidents`."""
        return self.jobs.incidents(job, after)

    def goodput(self, job: str, now: float) -> Goodput:
        """See `Jobs.goodput`."""
        return self.jobs.goodput(job, self._time(now))

    def pop_incidents(self) -> list[Incident]:
        """The records of all jobs that are new or have changed since the last call."""
        return self._ledgers.pop_changed()

    def status(self, job: str, now: float, *, with_paces: bool = True) -> list[JobStatus]:
        """The status of ``job``, or of all jobs (empty).

        Raises: RequestRefused: there is no such job.
        """
        return self.jobs.status(job, self._time(now), with_paces=with_paces)

    def status_in_pieces(
        self, job: str, now: float, *, with_paces: bool = True
    ) -> Pieces[list[JobStatus]]:
        """See `status`; other inputs may come between two pieces."""
        return self.jobs.status_in_pieces(job, self._time(now), with_paces=with_paces)

    def samples_in_pieces(self, now: float) -> Pieces[dict[str, JobSample | None]]:
        """See `Jobs.samples_in_pieces`; other inputs may come between two pieces."""
        return self.jobs.samples_in_pieces(self._time(now))

    # -- the rules -------------------------------------------------------------------------------

    def _begin_input(self, now: float) -> float:
        """The time of the decisions; an input that was refused leaves no orders behind."""
        self._sessions.pop_orders()
        return self._time(now)

    def _time(self, now: float) -> float:
        """The time of the decisions, which stops with this process."""
        if not self._sessions.questions and self.jobs.next_deadline() is None:
            self.clock.skip_to(now)  # nobody was there who could have sent anything
        return self.clock.now(now)

    def _end_input(self, *first: Order) -> Orders:
        """The orders of the input, after the ``first`` ones."""
        orders = self._sessions.pop_orders()
        missed_s = self.clock.missed_s - self._reported_missed_s
        if missed_s:
            self._reported_missed_s = self.clock.missed_s
            return (ReportStandstill(missed_s), *first, *orders)
        return (*first, *orders)

    def _record_beat(self, job: str, replica_id: str, beat: Beat, at: float) -> None:
        activity = None
        if beat.phase is not None:
            since = at - beat.lasts_s
            activity = Activity(beat.phase, beat.step, since, beat.received_bytes, beat.state_bytes)
        self.jobs.heartbeat(job, replica_id, at, activity)
        for report in beat.differences:
            self.jobs.record_difference(job, replica_id, report, at)
        if beat.tally is not None or beat.events:
            self.jobs.record_report(job, replica_id, beat.tally, beat.events, at)

    def _adapt_beats(self, session: Session) -> None:
        """Send a group how often to beat, if its job has grown or shrunk."""
        wanted_s = self.jobs.beat_interval_s(session.job)
        shorter_s, longer_s = sorted((session.beat_interval_s, wanted_s))
        if longer_s > CHANGED_INTERVAL * max(shorter_s, SHORTEST_INTERVAL_S):
            session.beat_interval_s = wanted_s
            self._sessions.send_over((session.stream,), Welcome(wanted_s))

    def _leave(self, job: str, replica_id: str, leave: Leave, at: float) -> None:
        leave = leave if leave.reason else replace(leave, reason="it has left")
        self.jobs.leave(job, replica_id, leave, at)

    def _request(
        self, question: OpenQuestion, member: Member, at: float, *, agreed: bool = False
    ) -> None:
        question.is_of_spare = self.jobs.holds_spare(question.job, member)
        caller = self._sessions.open_question(question, at)
        try:
            self.jobs.request(question.job, member, caller, at, agreed=agreed)
        except RequestRefused as error:
            self._sessions.refuse(caller, error)

    def withdraw_closed(self, session: Session, at: float) -> None:
        """Withdraw the question of a stream that has ended."""
        self._withdraw_question(session, at)

    def _withdraw_question(self, session: Session, at: float) -> None:
        if session.caller is not None:
            self._withdraw_caller(session.caller, at)

    def _withdraw_caller(self, caller: int, at: float) -> None:
        question = self._sessions.close_question(caller)
        assert question is not None
        self.jobs.withdraw(question.job, caller, at)

    def _expire_questions(self, at: float) -> None:
        """Refuse the questions that are out of time, with what they waited for."""
        if at < self._sessions.expiry_at:
            return
        questions = self._sessions.questions
        expired = {key: each for key, each in questions.items() if each.expires_at <= at}
        # Before they are withdrawn, which changes the reasons.
        whys = {each.job: self.jobs.why(each.job, at) for each in expired.values()}
        for caller, question in expired.items():
            if caller not in questions:
                continue  # the one before was withdrawn, which made a quorum of the others
            error = DeadlineExceeded("quorum", question.timeout_s, whys[question.job])
            self._sessions.refuse(caller, error)
            self.jobs.withdraw(question.job, caller, at)
        open_until = (each.expires_at for each in questions.values())
        self._sessions.expiry_at = min(open_until, default=math.inf)

    def _look_at_pause(self, job: str, pause: OpenPause, at: float) -> None:
        """Report why a job stands still, in the log and to waiting groups, when it has changed."""
        why = self.jobs.pause(job, at)
        reason = why.sentence(with_durations=False)  # what changes all the time is no other one
        if reason != pause.reported:
            pause.reported = reason
            self._sessions.report(ReportPause(job, at - pause.since, why.sentence()))
        callers = self.uninformed(pause, reason)
        pause.waiting.update(dict.fromkeys(callers, reason))
        sessions = (self._sessions.questions[caller].session for caller in callers)
        if streams := tuple(each.stream for each in sessions if each is not None):
            self._sessions.send_over(streams, NoQuorumYet(reason))
        pause.look_at = at + REPORT_PAUSE_AFTER_S
        self._sessions.pauses[job] = self._sessions.pauses.pop(job)

    def uninformed(self, pause: OpenPause, reason: str) -> list[int]:
        """The callers that have not received ``reason``: some of them, if there are many."""
        callers = (caller for caller, sent in pause.waiting.items() if sent != reason)
        return list(islice(callers, MAX_INFORMED_PER_LOOK))
