"""The lighthouse's end of its sessions: what clients may send, what they receive, and until when.

Inputs are method calls with ``now``, the instant of a monotonic clock; each returns orders for the
shell. Streams and calls are numbers of the shell's choice, each used once. What `Lighthouse`
decides is put into messages here; shells only carry them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from torchft_svc.core.limits import check_name
from torchft_svc.core.pausable_clock import PausableClock, usual_look_s
from torchft_svc.core.quorum.activity import Activity
from torchft_svc.core.quorum.lighthouse.lighthouse import Lighthouse
from torchft_svc.core.quorum.lighthouse.lighthouse_orders import (
    AnswerQuorum,
    RefuseRequest,
    ReportEviction,
    ReportHang,
    ReportLeftHealing,
    ReportLoss,
    ReportStraggler,
    ReportTermEnds,
    ReportWaiting,
)
from torchft_svc.core.quorum.lighthouse.lighthouse_orders import Order as Decided
from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.core.quorum.lighthouse.session_orders import (
    Order,
    Orders,
    Publish,
    RefuseCall,
    ReportAcceptedLoss,
    ReportCommand,
    ReportPause,
    Send,
)
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Drain,
    Hello,
    Kill,
    Leave,
    Lost,
    NewcomerWaits,
    News,
    NoQuorumYet,
    Question,
    Refusal,
    SessionMessage,
    Welcome,
    Withdrawal,
)
from torchft_svc.core.quorum.types import Member, QuorumConfig
from torchft_svc.core.streams import EndStream, ReportStandstill
from torchft_svc.errors import DeadlineExceeded, RequestRefused, TorchFTError, Unreachable

# Ids count from the milliseconds since 2025: a restarted lighthouse is above the one before.
ID_EPOCH_S = 1_735_689_600
# Each lighthouse has its own remainder: if a job splits between two of them, the ids of the halves
# differ when they meet again. Ids stay below 2**53 for 69 years.
ID_STRIDE = 4096
# Of a manager whose link breaks again and again, some sessions are dead without being noticed.
MAX_SESSIONS_PER_GROUP = 8
# A group is told again how often to beat when that has changed by this factor: the first ones would
# else beat as if they were alone. No manager beats more often by itself than at the shortest
# interval.
CHANGED_INTERVAL = 1.25
SHORTEST_INTERVAL_S = 0.05
# Groups wait for one another in every step; longer waits are reported.
REPORT_PAUSE_AFTER_S = 2.0
# Informing ten thousand groups would delay the others for too long: the rest is informed at the
# next look.
MAX_TOLD_PER_LOOK = 1000


def first_quorum_id(wall_s: float, remainder: int) -> int:
    """An id that no earlier lighthouse has given out, if the clock has not gone back since."""
    return max(0, int((wall_s - ID_EPOCH_S) * 1000)) * ID_STRIDE + remainder


_Key = tuple[str, str]  # job and replica id


@dataclass(slots=True)
class _Session:
    stream: int
    job: str
    replica_id: str
    beat_interval_s: float  # as it was told
    number: int = 0  # of its last question
    caller: int | None = None  # as which that waits

    @property
    def key(self) -> _Key:
        return self.job, self.replica_id


@dataclass(slots=True)
class _Asked:
    """An open question: of a session, or of a unary ``call``."""

    job: str
    timeout_s: float
    expires_at: float
    session: _Session | None = None
    call: int = 0


@dataclass(slots=True)
class _Pause:
    """A job in which callers wait, each with the reason that it was told."""

    since: float
    look_at: float
    waiting: dict[int, str] = field(default_factory=dict)
    reported: str = ""


class LighthouseSessions:
    """All sessions and unary calls of one lighthouse, above its decisions.

    A group is alive as long as one of its sessions is open. A session that was cut off may go
    unnoticed for seconds, while its manager has opened the next one; and without a token anybody
    can open a session under the id of a living group. Every session of a group receives its news.
    """

    def __init__(self, config: QuorumConfig, first_id: int, now: float) -> None:
        self._config = config
        self.clock = PausableClock(usual_look_s(config.heartbeat_timeout_s), now)
        self._reported_missed_s = 0.0
        self._callers = itertools.count()
        self._begin_lead(first_id, now)

    def _begin_lead(self, first_id: int, at: float) -> None:
        self.lighthouse = Lighthouse(
            self._config, first_id, ID_STRIDE, ids_per_s=1000 * ID_STRIDE, now=at
        )
        self._sessions: dict[int, _Session] = {}  # by stream
        # The streams that lead to a group, the one that was silent the longest first.
        self._streams: dict[_Key, dict[int, None]] = {}
        self._asked: dict[int, _Asked] = {}  # by caller
        self._calls: dict[int, int] = {}  # the callers of unary calls
        # When to look for questions that have expired; may be too early, never too late. A timer
        # for each would cost as much as its answer, and nearly all are answered.
        self._expiry_at = math.inf
        self._pauses: dict[str, _Pause] = {}  # by job, the one to be looked at next first

    # -- inputs: sessions ------------------------------------------------------------------------

    def opened(self, stream: int, job: str, hello: Hello, now: float) -> Orders:
        """A stream has begun with ``hello``.

        Raises:
            RequestRefused: this group cannot have a session; the stream has to end.
        """
        at = self._time(now)
        replica_id, last = hello.replica_id, hello.last
        is_past = self.lighthouse.is_past(job, replica_id, last)
        decided = self.lighthouse.opened(job, replica_id, last, at, num_groups=hello.num_groups)
        interval_s = self.lighthouse.beat_interval_s(job)
        self._sessions[stream] = session = _Session(stream, job, replica_id, interval_s)
        streams = self._streams.setdefault(session.key, {})
        streams[stream] = None
        orders: list[Order] = [Send((stream,), Welcome(interval_s))]
        orders += self._translate(decided)  # which may concern this group already
        if len(streams) > MAX_SESSIONS_PER_GROUP:
            orders += self._end_most_silent(session.key, at)
        if is_past:
            lost = Lost(replica_id, "its session had ended", last.quorum_id)
            orders.append(Send((stream,), lost))
        else:
            missed = self.lighthouse.missed_news(job, replica_id, last, hello.num_groups)
            orders += [Send((stream,), news) for news in missed]
        return self._finish(orders)

    def _end_most_silent(self, key: _Key, at: float) -> list[Order]:
        silent = self._sessions.pop(next(iter(self._streams[key])))
        del self._streams[key][silent.stream]
        others = f"{silent.replica_id!r} has {MAX_SESSIONS_PER_GROUP} others"
        error = RequestRefused(f"{others}, this one was silent the longest")
        return [*self._withdraw(silent, at), EndStream(silent.stream, error)]

    def received(self, stream: int, message: SessionMessage, now: float) -> Orders:
        """A message has come over ``stream``; ignored if that has ended.

        Raises: RequestRefused: it breaks the protocol; the stream has to end.
        """
        session = self._sessions.get(stream)
        if session is None:
            return ()
        at = self._time(now)
        if isinstance(message, Beat):
            orders = self._beat(session.job, session.replica_id, message, at)
            orders += self._pace(session)
            streams = self._streams[session.key]
            if len(streams) > 1:
                streams[stream] = streams.pop(stream)
        elif isinstance(message, Question):
            orders = self._ask(session, message, at)
        elif isinstance(message, Withdrawal):
            is_last = message.number == session.number  # or it has been overtaken
            orders = self._withdraw(session, at) if is_last else []
        else:
            orders = self._leave(session, message, at)
        return self._finish(orders)

    def closed(self, stream: int, now: float, error: TorchFTError | None = None) -> Orders:
        """A stream has ended, maybe with ``error``; if its group has no other one, it is gone, or
        missing."""
        session = self._sessions.pop(stream, None)
        if session is None:
            return ()
        at = self._time(now)
        orders = self._withdraw(session, at)
        if not self._forget(session):
            return self._finish(orders)
        job, replica_id = session.key
        if error is not None and not isinstance(error, Unreachable):
            orders += self._gone(job, replica_id, Leave(f"its session was refused: {error}"), at)
        else:
            orders += self._translate(self.lighthouse.went_silent(job, replica_id, at))
        return self._finish(orders)

    def _ask(self, session: _Session, question: Question, at: float) -> list[Order]:
        member = question.member
        if member.replica_id != session.replica_id:
            raise RequestRefused(
                f"the session of {session.replica_id!r} cannot ask for {member.replica_id[:64]!r}"
            )
        orders = self._withdraw(session, at)
        session.number = question.number
        asked = _Asked(session.job, question.timeout_s, at + question.timeout_s, session)
        session.caller = self._open(asked, at)
        return orders + self._request(session.caller, asked, member, at, agreed=question.agreed)

    def _leave(self, session: _Session, leave: Leave, at: float) -> list[Order]:
        """The group is out before its stream ends; its question gets an answer or an error."""
        leave.check()
        del self._sessions[session.stream]
        self._forget(session)
        orders = self._gone(session.job, session.replica_id, leave, at)
        return [*orders, *self._withdraw(session, at), EndStream(session.stream)]

    def _forget(self, session: _Session) -> bool:
        """Whether the group has no other session."""
        streams = self._streams[session.key]
        del streams[session.stream]
        if not streams:
            del self._streams[session.key]
        return not streams

    # -- inputs: unary calls ---------------------------------------------------------------------

    def called(self, call: int, job: str, member: Member, timeout_s: float, now: float) -> Orders:
        """Unary ``call`` waits for a quorum with ``member``; it is answered once."""
        at = self._time(now)
        asked = _Asked(job, timeout_s, at + timeout_s, call=call)
        self._calls[call] = caller = self._open(asked, at)
        return self._finish(self._request(caller, asked, member, at))

    def cancelled(self, call: int, now: float) -> Orders:
        """Nobody waits for unary ``call`` any more; ignored if it was answered."""
        caller = self._calls.get(call)
        if caller is None:
            return ()
        return self._finish(self._withdraw_caller(caller, self._time(now)))

    def heartbeat(self, job: str, replica_id: str, now: float) -> Orders:
        """A sign of life without a session.

        Raises:
            RequestRefused: there can be no such group.
        """
        return self._finish(self._beat(job, replica_id, Beat(), self._time(now)))

    def left(self, job: str, replica_id: str, leave: Leave, now: float) -> Orders:
        """A group without a session leaves.

        Raises: RequestRefused: there can be no such group, or reason.
        """
        check_name("replica_id", replica_id)
        leave.check()
        return self._finish(self._gone(job, replica_id, leave, self._time(now)))

    # -- inputs: operators, the election, time ---------------------------------------------------

    def commanded(self, job: str, name: str, command: Kill | Drain, now: float) -> Orders:
        """An operator kills or drains the group with this replica id or name.

        Raises: RequestRefused: there is no such group, or it has no session.
        """
        self._time(now)
        replica_id = self.lighthouse.find(job, name)
        streams = tuple(self._streams.get((job, replica_id), ()))
        if not streams:
            raise RequestRefused(
                f"{replica_id!r} has no session with this lighthouse, it only sends heartbeats: "
                "it cannot receive commands, so ask its manager instead"
            )
        if isinstance(command, Kill):
            self.lighthouse.killed(job, replica_id, f"killed: {command.reason}")
        return self._finish([Send(streams, command), ReportCommand(job, replica_id, command)])

    def loss_accepted(self, job: str, now: float) -> Orders:
        """An operator lets the next quorum of ``job`` lose committed steps.

        Raises:
            RequestRefused: none is held back for that reason.
        """
        at = self._time(now)
        committed_step = self.lighthouse.committed_step(job)
        orders = self._translate(self.lighthouse.accept_loss(job, at))
        return self._finish([ReportAcceptedLoss(job, committed_step), *orders])

    def lead_ended(self, error: TorchFTError, first_id: int, now: float) -> Orders:
        """Another lighthouse leads: inform all clients, and forget them."""
        orders: list[Order] = [RefuseCall(call, error) for call in self._calls]
        orders += [EndStream(stream, error) for stream in self._sessions]
        self._begin_lead(first_id, self._time(now))
        return self._finish(orders)

    def tick(self, now: float) -> Orders:
        """Time has passed; call it at `next_deadline`, or more often."""
        at = self._time(now)
        orders = self._expire(at)
        while self._pauses:
            job, pause = next(iter(self._pauses.items()))
            if pause.look_at > at:
                break
            orders += self._look_at_pause(job, pause, at)
        due_at = self.lighthouse.next_deadline()
        if due_at is not None and due_at <= at:
            orders += self._translate(self.lighthouse.tick(at))
        return self._finish(orders)

    # -- questions -------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When to `tick`, on the clock of ``now``; may be too early, never too late."""
        at = self._expiry_at
        due_at = self.lighthouse.next_deadline()
        if due_at is not None and due_at < at:
            at = due_at
        if self._pauses:
            at = min(at, next(iter(self._pauses.values())).look_at)
        return None if at == math.inf else self.clock.look_by(at)

    def status(self, job: str, now: float) -> list[JobStatus]:
        """The status of ``job``, or of all jobs (empty).

        Raises: RequestRefused: there is no such job.
        """
        return self.lighthouse.status(job, self._time(now))

    # -- the rules -------------------------------------------------------------------------------

    def _time(self, now: float) -> float:
        """The time of the decisions, which stops with this process."""
        if not self._asked and self.lighthouse.next_deadline() is None:
            self.clock.skip_to(now)  # nobody was there to be heard
        return self.clock.now(now)

    def _finish(self, orders: list[Order]) -> Orders:
        missed_s = self.clock.missed_s - self._reported_missed_s
        if missed_s:
            self._reported_missed_s = self.clock.missed_s
            orders.insert(0, ReportStandstill(missed_s))
        return tuple(orders)

    def _beat(self, job: str, replica_id: str, beat: Beat, at: float) -> list[Order]:
        doing = None
        if beat.phase is not None:
            doing = Activity(beat.phase, beat.step, at - beat.lasts_s)
        orders = self._translate(self.lighthouse.heartbeat(job, replica_id, at, doing))
        for report in beat.differences:
            self.lighthouse.record_difference(job, replica_id, report)
        return orders

    def _pace(self, session: _Session) -> list[Order]:
        """Tell a group how often to beat, if its job has grown or shrunk."""
        wanted_s = self.lighthouse.beat_interval_s(session.job)
        shorter_s, longer_s = sorted((session.beat_interval_s, wanted_s))
        if longer_s <= CHANGED_INTERVAL * max(shorter_s, SHORTEST_INTERVAL_S):
            return []
        session.beat_interval_s = wanted_s
        return [Send((session.stream,), Welcome(wanted_s))]

    def _gone(self, job: str, replica_id: str, leave: Leave, at: float) -> list[Order]:
        leave = leave if leave.reason else replace(leave, reason="it has left")
        return self._translate(self.lighthouse.leave(job, replica_id, leave, at))

    def _open(self, asked: _Asked, at: float) -> int:
        """Returns the caller as which the question waits."""
        caller = next(self._callers)
        self._asked[caller] = asked
        self._expiry_at = min(self._expiry_at, asked.expires_at)
        pause = self._pauses.get(asked.job)
        if pause is None:
            pause = self._pauses[asked.job] = _Pause(at, at + REPORT_PAUSE_AFTER_S)
        pause.waiting[caller] = ""
        return caller

    def _close(self, caller: int) -> _Asked | None:
        """None: it did not wait."""
        asked = self._asked.pop(caller, None)
        if asked is None:
            return None
        if asked.session is not None:
            asked.session.caller = None
        else:
            del self._calls[asked.call]
        pause = self._pauses[asked.job]
        del pause.waiting[caller]
        if not pause.waiting:
            del self._pauses[asked.job]
        return asked

    def _request(
        self, caller: int, asked: _Asked, member: Member, at: float, *, agreed: bool = False
    ) -> list[Order]:
        try:
            decided = self.lighthouse.request(asked.job, member, caller, at, agreed=agreed)
            return self._translate(decided)
        except RequestRefused as error:
            return self._refuse(caller, error)

    def _refuse(self, caller: int, error: TorchFTError) -> list[Order]:
        asked = self._close(caller)
        if asked is None:
            return []
        if asked.session is None:
            return [RefuseCall(asked.call, error)]
        session = asked.session
        return [Send((session.stream,), Refusal(session.number, error))]

    def _withdraw(self, session: _Session, at: float) -> list[Order]:
        return [] if session.caller is None else self._withdraw_caller(session.caller, at)

    def _withdraw_caller(self, caller: int, at: float) -> list[Order]:
        asked = self._close(caller)
        assert asked is not None
        return self._translate(self.lighthouse.withdraw(asked.job, caller, at))

    def _expire(self, at: float) -> list[Order]:
        """Refuse the questions that are out of time, with what they waited for."""
        if at < self._expiry_at:
            return []
        expired = {key: asked for key, asked in self._asked.items() if asked.expires_at <= at}
        # Before they are withdrawn, which changes the reasons.
        whys = {asked.job: self.lighthouse.why(asked.job, at) for asked in expired.values()}
        orders: list[Order] = []
        for caller, asked in expired.items():
            if caller not in self._asked:
                continue  # the one before was withdrawn, which made a quorum of the others
            error = DeadlineExceeded("quorum", asked.timeout_s, whys[asked.job])
            orders += self._refuse(caller, error)
            orders += self._translate(self.lighthouse.withdraw(asked.job, caller, at))
        open_until = (asked.expires_at for asked in self._asked.values())
        self._expiry_at = min(open_until, default=math.inf)
        return orders

    def _look_at_pause(self, job: str, pause: _Pause, at: float) -> list[Order]:
        """Say why a job stands still, in the log and to waiting groups, when that has changed."""
        orders: list[Order] = []
        why = self.lighthouse.pause(job, at)
        reason = why.sentence(with_durations=False)  # what changes all the time is no other one
        if reason != pause.reported:
            pause.reported = reason
            orders.append(ReportPause(job, at - pause.since, why.sentence()))
        untold = (caller for caller, told in pause.waiting.items() if told != reason)
        callers = list(islice(untold, MAX_TOLD_PER_LOOK))
        pause.waiting.update(dict.fromkeys(callers, reason))
        sessions = (self._asked[caller].session for caller in callers)
        if streams := tuple(each.stream for each in sessions if each is not None):
            orders.append(Send(streams, NoQuorumYet(reason)))
        pause.look_at = at + REPORT_PAUSE_AFTER_S
        self._pauses[job] = self._pauses.pop(job)
        return orders

    def _translate(self, decided: Iterable[Decided]) -> list[Order]:
        """Make messages of the lighthouse's decisions."""
        orders: list[Order] = []
        for each in decided:
            if isinstance(each, AnswerQuorum):
                orders.append(self._publish(each))
            elif isinstance(each, RefuseRequest):
                orders += self._refuse(each.caller, each.error)
            elif isinstance(each, ReportLoss | ReportEviction | ReportStraggler):
                orders += self._report_loss(each)
            elif isinstance(each, ReportHang):
                orders.append(each)
                if each.kill:
                    hang = f"{each.phase.value} in step {each.step} for {each.for_s:.1f} s"
                    orders += self._tell(each.job, (each.replica_id,), Kill(f"it hangs: {hang}"))
            elif isinstance(each, ReportLeftHealing):
                orders.append(each)
            elif isinstance(each, ReportTermEnds):
                orders += self._tell(each.job, each.recipients, each.news)
            elif isinstance(each, ReportWaiting):
                told = self.lighthouse.quorum_left(each.job)
                orders += self._tell(each.job, told, NewcomerWaits(each.replica_id))
        return orders

    def _report_loss(self, out: ReportLoss | ReportEviction | ReportStraggler) -> list[Order]:
        if isinstance(out, ReportLoss) and out.between_steps:
            return [out]
        lost = Lost(out.replica_id, out.reason, out.quorum_id)
        return [out, *self._tell(out.job, out.recipients, lost)]

    def _publish(self, decided: AnswerQuorum) -> Publish:
        answers, calls = [], []
        for caller in decided.callers:
            asked = self._close(caller)
            if asked is None:
                continue
            if asked.session is not None:
                answers.append((asked.session.stream, asked.session.number))
            else:
                calls.append(asked.call)
        return Publish(decided, tuple(answers), tuple(calls))

    def _tell(self, job: str, replica_ids: Iterable[str], news: News) -> list[Order]:
        """To the groups that have a session."""
        streams = tuple(
            stream for each in replica_ids for stream in self._streams.get((job, each), ())
        )
        return [Send(streams, news)] if streams else []
