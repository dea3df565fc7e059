"""Drives the lighthouse's core: feeds it what happened, carries out its orders, keeps its timer."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from torchft_svc.core.lighthouse import Lighthouse
from torchft_svc.core.lighthouse_orders import (
    AnswerQuorum,
    Order,
    RefuseRequest,
    ReportEviction,
    ReportHang,
    ReportLeftHealing,
    ReportLoss,
    ReportWaiting,
)
from torchft_svc.core.overview import JobStatus, Pause
from torchft_svc.core.pausable_clock import PausableClock, usual_look_s
from torchft_svc.core.types import LastQuorum, Member, QuorumConfig
from torchft_svc.errors import DeadlineExceeded, NotLeader, RequestRefused, TorchFTError
from torchft_svc.lighthouse_server.questions import Hear, HearWhy, Outcome, Question, Questions
from torchft_svc.lighthouse_server.sessions import MAX_SESSIONS_PER_GROUP, Sessions
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import (
    beat_from_wire,
    kill_news,
    member_lost,
    member_waiting,
    quorum_answer,
    welcome_news,
)
from torchft_svc.rpc.heavy_writes import HeavyWrites
from torchft_svc.rpc.outbox import Outbox, Unread

log = logging.getLogger(__name__)

# Ids count from the milliseconds since 2025: a restarted lighthouse is above the one before.
ID_EPOCH_S = 1_735_689_600
# Each lighthouse has a remainder of its own: two that a job has come apart to give out other ids,
# which tell the halves from each other when they meet. Ids stay below 2**53 for 69 years.
ID_STRIDE = 4096


def first_quorum_id(wall_s: float, remainder: int) -> int:
    """An id that no earlier lighthouse has given out, if the clock has not gone back since."""
    return max(0, int((wall_s - ID_EPOCH_S) * 1000)) * ID_STRIDE + remainder


def _begin(config: QuorumConfig, now: float) -> Lighthouse:
    first_id = first_quorum_id(time.time(), secrets.randbelow(ID_STRIDE))
    return Lighthouse(config, first_id, ID_STRIDE, ids_per_s=1000 * ID_STRIDE, now=now)


class LighthouseDriver:
    """Owns the core; to be used on one event loop."""

    def __init__(
        self, config: QuorumConfig, check_leads: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._check_leads = check_leads
        self._max_jobs = config.max_jobs
        look_s = usual_look_s(config.heartbeat_timeout_s)
        self._clock = PausableClock(look_s, time.monotonic())
        self._core = _begin(config, self._clock.now(time.monotonic()))
        self._questions = Questions(self._why)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._quorum_ids: dict[str, int] = {}  # the last one logged, by job
        self._sessions = Sessions()
        self.heavy_writes = HeavyWrites()
        self.unread = Unread()

    def _why(self, job: str) -> Pause:
        return self._core.pause(job, self._clock.now(time.monotonic()))

    async def quorum(self, job: str, member: Member, timeout_s: float) -> bytes:
        """Wait for a quorum with ``member``; the encoded answer.

        Raises:
            DeadlineExceeded: none within ``timeout_s``; says what was waited for.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def hear(outcome: Outcome) -> None:
            if answer.done():  # its caller was cancelled in this moment
                return
            if isinstance(outcome, bytes):
                answer.set_result(outcome)
            else:
                answer.set_exception(outcome)

        caller = self.ask(job, member, timeout_s, hear)
        try:
            return await answer
        finally:
            self.withdraw(caller)

    def ask(
        self,
        job: str,
        member: Member,
        timeout_s: float,
        hear: Hear,
        hear_why: HearWhy | None = None,
    ) -> int:
        """The same without waiting: ``hear`` is called once, maybe before this returns.

        ``hear_why`` is told meanwhile why there is no quorum, see `Question`.

        Returns the caller's number, for `withdraw`.

        Raises:
            RequestRefused: ``member`` cannot be; ``hear`` is not called.
        """
        now = self._clock.now(time.monotonic())
        caller = self._questions.open(Question(job, timeout_s, now + timeout_s, hear, hear_why))
        try:
            orders = self._core.request(job, member, caller, now)
        except RequestRefused:
            self._questions.close(caller)
            raise
        self._carry_out(orders)
        return caller

    def withdraw(self, caller: int) -> None:
        """Nobody waits for this answer any more; nothing, if it was given."""
        question = self._questions.close(caller)
        if question is not None:
            self._carry_out(
                self._core.withdraw(question.job, caller, self._clock.now(time.monotonic()))
            )

    def _expire(self, now: float) -> None:
        expired = self._questions.expired(now)
        for question in expired.values():  # before they are withdrawn, which changes the reasons
            why = self._core.why(question.job, now)
            question.hear(DeadlineExceeded("quorum", question.timeout_s, why))
        for caller in expired:
            self.withdraw(caller)

    def heard(self, job: str, replica_id: str, outbox: Outbox, doing: pb.SessionBeat) -> None:
        """A sign of life over the session ``outbox``."""
        self._sessions.heard(job, replica_id, outbox)
        self.heartbeat(job, replica_id, doing)

    def heartbeat(self, job: str, replica_id: str, doing: pb.SessionBeat | None = None) -> float:
        """A sign of life; returns how long the group may stay silent, in seconds."""
        now = self._clock.now(time.monotonic())
        activity = None if doing is None else beat_from_wire(doing, now)
        self._carry_out(self._core.heartbeat(job, replica_id, now, activity))
        return self._core.beat_interval_s(job)

    def leave(
        self,
        job: str,
        replica_id: str,
        reason: str,
        *,
        between_steps: bool = False,
        ends: bool = False,
    ) -> None:
        """The group is gone; ``between_steps``: its fellows lose nothing by that. ``ends``: its
        program ends on purpose."""
        now = self._clock.now(time.monotonic())
        orders = self._core.leave(
            job, replica_id, reason, now, between_steps=between_steps, ends=ends
        )
        self._carry_out(orders)

    def open_session(self, job: str, replica_id: str, last: LastQuorum, outbox: Outbox) -> None:
        """``outbox`` leads to a group that tells of the ``last`` quorum it was in, and is welcomed.

        Earlier ones of the same group hear the same as it, see `Sessions`.
        """
        is_past = self._core.is_past(job, replica_id, last)
        self._carry_out(self._core.opened(job, replica_id, last, self._clock.now(time.monotonic())))
        silent = self._sessions.opened(job, replica_id, outbox)
        if silent is not None:
            others = f"{replica_id!r} has {MAX_SESSIONS_PER_GROUP} others"
            silent.fail(RequestRefused(f"{others}, this one was silent the longest"))
        outbox.tell(welcome_news(self._core.beat_interval_s(job)))
        if is_past:
            outbox.tell(member_lost(replica_id, "its session had ended", last.quorum_id))

    def close_session(
        self,
        job: str,
        replica_id: str,
        outbox: Outbox,
        reason: str,
        *,
        leaves: bool = False,
        between_steps: bool = False,
        ends: bool = False,
    ) -> None:
        """The stream has ended; the group is out if it says so itself (``leaves``), or if it has no
        other session: else the others show, by their beats, whether it lives."""
        was_open = self._sessions.closed(job, replica_id, outbox)
        if was_open and (leaves or not self._sessions.of(job, replica_id)):
            self.leave(job, replica_id, reason, between_steps=between_steps, ends=ends)

    def tell(self, job: str, name: str, news: bytes) -> str:
        """Tell ``news`` to the group with this replica id or name; its replica id.

        Raises:
            RequestRefused: there is no such group, or it has no session to be told over.
        """
        replica_id = self._core.find(job, name)
        if not self._tell_all(job, (replica_id,), news):
            raise RequestRefused(
                f"{replica_id!r} has no session with this lighthouse, it only sends heartbeats: "
                "it cannot receive commands, so ask its manager instead"
            )
        return replica_id

    def kill(self, job: str, name: str, reason: str) -> str:
        """An operator ends the group with this replica id or name; its replica id.

        Raises:
            RequestRefused: there is no such group, or it has no session to be told over.
        """
        replica_id = self.tell(job, name, kill_news(reason))
        self._core.killed(job, replica_id, f"killed: {reason}")
        return replica_id

    def check_room(self, job: str) -> None:
        """Raise `RequestRefused` if there is no room for another group of ``job``."""
        self._core.check_room(job)

    def status(self, job: str) -> list[JobStatus]:
        """What people want to know of ``job``, or of all (empty)."""
        return self._core.status(job, self._clock.now(time.monotonic()))

    def accept_loss(self, job: str) -> int:
        """Let the next quorum of ``job`` lose committed steps; up to which step it does.

        Raises:
            RequestRefused: none is held back for that reason.
        """
        committed_step = self._core.committed_step(job)
        orders = self._core.accept_loss(job, self._clock.now(time.monotonic()))
        log.warning("loss accepted by an operator job=%s step=%d", job, committed_step)
        self._carry_out(orders)
        return committed_step

    def end_term(self, error: TorchFTError) -> None:
        """Another lighthouse leads: tell all who are here, and forget them."""
        for question in self._questions.close_all():
            question.hear(error)
        for session in self._sessions.close_all():
            session.fail(error)
        self._core = _begin(self._config, self._clock.now(time.monotonic()))

    def close(self) -> None:
        """Stop the timer; callers that still wait are cancelled by the server's stop."""
        if self._timer is not None:
            self._timer.cancel()

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, AnswerQuorum):
                self._publish(order)
            elif isinstance(order, RefuseRequest):
                question = self._questions.close(order.caller)
                if question is not None:
                    question.hear(order.error)
            elif isinstance(order, ReportLoss):
                self._tell_loss(order)
            elif isinstance(order, ReportHang):
                self._report_hang(order)
            elif isinstance(order, ReportEviction):
                self._tell_eviction(order)
            elif isinstance(order, ReportLeftHealing):
                log.warning(
                    "group left out job=%s replica=%s: it has been healing for %.1f s, and has to "
                    "start again: raise --heal-timeout-ms, or repair its link",
                    order.job,
                    order.replica_id,
                    order.for_s,
                )
            elif isinstance(order, ReportWaiting):
                news = member_waiting(order.replica_id)
                self._tell_all(order.job, self._core.quorum_left(order.job), news)
        self._arm()

    def _tell_loss(self, loss: ReportLoss) -> None:
        if loss.is_orderly:
            log.info("group left job=%s replica=%s: %s", loss.job, loss.replica_id, loss.reason)
        else:
            log.warning("group lost job=%s replica=%s: %s", loss.job, loss.replica_id, loss.reason)
        if loss.between_steps:
            return
        news = member_lost(loss.replica_id, loss.reason, loss.quorum_id)
        self._tell_all(loss.job, loss.told, news)

    def _tell_eviction(self, out: ReportEviction) -> None:
        """The same news to the group itself: what it is about to do in this quorum is in vain."""
        log.warning("group left out job=%s replica=%s: %s", out.job, out.replica_id, out.reason)
        news = member_lost(out.replica_id, out.reason, out.quorum_id)
        self._tell_all(out.job, out.told, news)

    def _tell_all(self, job: str, replica_ids: Iterable[str], news: bytes) -> int:
        """Tell those of the groups that have a session; how many sessions that were."""
        sessions = [each for key in replica_ids for each in self._sessions.of(job, key)]
        for session in sessions:
            session.tell(news)
        return len(sessions)

    def _report_hang(self, hang: ReportHang) -> None:
        log.warning(
            "group hangs job=%s replica=%s phase=%s step=%d for %.1f s",
            hang.job,
            hang.replica_id,
            hang.phase.value,
            hang.step,
            hang.for_s,
        )
        if hang.kill:
            reason = f"it hangs: {hang.phase.value} in step {hang.step} for {hang.for_s:.1f} s"
            self._tell_all(hang.job, (hang.replica_id,), kill_news(reason))

    def _publish(self, order: AnswerQuorum) -> None:
        try:
            self._check_leads()  # now: this process may just have been thawed
        except NotLeader as error:
            self.end_term(error)
            return
        encoded = quorum_answer(order.quorum, time.time())
        for caller in order.callers:
            question = self._questions.close(caller)
            if question is not None:
                question.hear(encoded)
        quorum = order.quorum
        if order.lost_from is not None and order.begins_anew:
            log.info(
                "job begins anew job=%s at step %d: it had finished after step %d",
                order.job,
                quorum.max_step,
                order.lost_from,
            )
        elif order.lost_from is not None:
            log.warning(
                "job went back job=%s from step %d to step %d: no group has the newer state",
                order.job,
                order.lost_from,
                quorum.max_step,
            )
        for member in quorum.participants:
            if member.doubted_step:
                log.warning(
                    "step not believed job=%s replica=%s: it reports step %d, the job is at step "
                    "%d; it has to heal (--on-step-jump follow lets the job follow it)",
                    order.job,
                    member.replica_id,
                    member.doubted_step,
                    quorum.max_step,
                )
        if self._quorum_ids.pop(order.job, None) != quorum.quorum_id:
            log.info(
                "quorum changed job=%s id=%d step=%d groups=%d",
                order.job,
                quorum.quorum_id,
                quorum.max_step,
                len(quorum.participants),
            )
        self._quorum_ids[order.job] = quorum.quorum_id
        if len(self._quorum_ids) > self._max_jobs:  # of jobs that ended, forget the oldest
            del self._quorum_ids[next(iter(self._quorum_ids))]

    def _arm(self) -> None:
        """Keep one timer for the next deadline; too early is harmless, too late is not."""
        at = self._core.next_deadline()
        at = self._questions.look_at if at is None else min(at, self._questions.look_at)
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._sleep(self._clock.now(time.monotonic()))

    def _sleep(self, now: float) -> None:
        """Until the timer's instant, but no longer than the clock can do without a look."""
        delay = min(max(0.0, self._timer_at - now), self._clock.look_s)
        missed_s = self._clock.missed_s
        self._timer = asyncio.get_running_loop().call_later(delay, self._wake, missed_s)

    def _wake(self, missed_before_s: float) -> None:
        now = self._clock.now(time.monotonic())
        if self._clock.missed_s > missed_before_s:
            missed_s = self._clock.missed_s - missed_before_s
            log.warning(
                "this process did not run for %.1f s, for which no group is blamed", missed_s
            )
        if now < self._timer_at:
            self._sleep(now)
            return
        self._timer, self._timer_at = None, math.inf
        self._expire(now)
        self._carry_out(self._core.tick(now))
