"""The lighthouse of a simulated world: the real decisions, behind sessions as the service has them.

It does what `lighthouse_server/driver.py` and `session.py` do with the network and the clock.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from torchft_svc.core.activity import Activity
from torchft_svc.core.lighthouse import Lighthouse
from torchft_svc.core.lighthouse_orders import (
    AnswerQuorum,
    Order,
    RefuseRequest,
    ReportEviction,
    ReportHang,
    ReportLeftHealing,
    ReportLoss,
)
from torchft_svc.core.names import stable_name
from torchft_svc.core.step import Phase
from torchft_svc.core.types import LastQuorum, Member, QuorumConfig
from torchft_svc.errors import DeadlineExceeded, RequestRefused, TorchFTError
from torchft_svc.sim.invariants import SLACK_S, Invariants
from torchft_svc.sim.liveness import LOOK_S, Key, LivenessChecks
from torchft_svc.sim.network import End, Network, Stream
from torchft_svc.sim.trace import Trace
from torchft_svc.sim.world import Event, World

# The wall clock at the world's beginning, as milliseconds: ids start from it, as in the service.
CLOCK_AT_START_MS = 1_000_000
# In a larger fleet it would cost more than all that happens in it.
MAX_LOOKED_AT = 100


class LighthouseActor:
    """One lighthouse host; the process on it comes and goes."""

    def __init__(
        self,
        world: World,
        network: Network,
        config: QuorumConfig,
        invariants: Invariants,
        trace: Trace,
    ) -> None:
        self._world = world
        self._network = network
        self._config = config
        self._invariants = invariants
        self._trace = trace
        self._callers = itertools.count()
        self._num_lives = 0
        self.clock_skew_s = 0.0
        self.process = world.process("lighthouse")
        self._begin()

    def _begin(self) -> None:
        first_id = CLOCK_AT_START_MS + int((self._world.now + self.clock_skew_s) * 1000)
        self.core = Lighthouse(self._config, first_id)
        self.sessions: dict[tuple[str, str], Session] = {}
        self.heard_at: dict[tuple[str, str], float] = {}
        self.liveness = LivenessChecks(self._config)
        if self._config.max_members_per_job <= MAX_LOOKED_AT:
            self.process.after(LOOK_S, self._look)
        self._asking: dict[int, Session] = {}
        self._timer: Event | None = None
        self._timer_at = float("inf")

    def crash(self, down_s: float, clock_back_s: float) -> None:
        """SIGKILL, and a new one after ``down_s``, whose clock has gone back meanwhile."""
        if self.process.is_dead:
            return
        self.clock_skew_s -= clock_back_s
        self.process.kill()
        self._num_lives += 1
        following = self._world.process(f"lighthouse {self._num_lives + 1}")
        following.after(down_s, self._come_back)
        self._next = following

    def _come_back(self) -> None:
        self.process = self._next
        self._invariants.ids.restarted()
        self._invariants.progress.restarted()
        self._begin()
        self._trace.record("lighthouse", "is back")

    def accept(self, stream: Stream) -> End | None:
        """The server's end of a new stream, if somebody listens."""
        if self.process.is_dead:
            return None
        return Session(self, stream).end

    # -- what is looked at -----------------------------------------------------------------------

    def _look(self) -> None:
        now = self._world.now
        if self.process.thawed_at + SLACK_S < now:
            self.liveness.look(self.core, self.alive(), now)
        self.process.after(LOOK_S, self._look)

    def alive(self) -> set[Key]:
        """The groups that have a session, or were heard of in time."""
        since = self._world.now - self._config.heartbeat_timeout_s - SLACK_S
        return {*self.sessions, *(key for key, at in self.heard_at.items() if at >= since)}

    # -- what sessions say -----------------------------------------------------------------------

    def open_session(self, session: Session, last: LastQuorum) -> float:
        job, replica_id = session.key
        if self.core.is_past(job, replica_id, last):
            session.stream.to_client("lost", replica_id, last.quorum_id)
        self._invariants.progress.opened(job, replica_id)
        self.heard_at[session.key] = self._world.now
        self.liveness.heard(session.key)
        self.sessions[session.key] = session
        self._carry_out(self.core.opened(job, replica_id, last, self._world.now))
        return self.core.beat_interval_s(job)

    def heartbeat(self, session: Session, activity: Activity | None = None) -> float:
        job, replica_id = session.key
        self.heard_at[session.key] = self._world.now
        self.liveness.heard(session.key)
        if activity is not None:
            self.liveness.does(session.key, activity)
        self._carry_out(self.core.heartbeat(job, replica_id, self._world.now, activity))
        return self.core.beat_interval_s(job)

    def ask(self, session: Session, member: Member, timeout_s: float) -> int:
        """The caller's number; the answer comes over the session."""
        caller = next(self._callers)
        self._asking[caller] = session
        session.caller = caller
        self._invariants.waits.begin(caller, self.process, member.replica_id, timeout_s)
        self.process.after(timeout_s, self._expire, caller, timeout_s)
        self.heard_at[session.key] = self._world.now
        self._invariants.progress.asked(
            session.key[0], member, lambda: self._has_rival(*session.key)
        )
        self.liveness.asked(session.key, member, self._world.now)
        self._carry_out(self.core.request(session.key[0], member, caller, self._world.now))
        return caller

    def _has_rival(self, job: str, replica_id: str) -> bool:
        name = stable_name(replica_id)
        return any(
            (where, stable_name(who)) == (job, name) and who != replica_id
            for where, who in self.alive()
        )

    def withdraw(self, session: Session) -> None:
        caller, session.caller = session.caller, None
        if caller is not None and self._asking.pop(caller, None) is not None:
            self._invariants.waits.end(caller)
            self.liveness.withdrew(session.key, self._world.now)
            self._carry_out(self.core.withdraw(session.key[0], caller, self._world.now))

    def close_session(
        self, session: Session, reason: str, between_steps: bool = False, ends: bool = False
    ) -> None:
        self.withdraw(session)
        if self.sessions.get(session.key) is session:
            del self.sessions[session.key]
            self.leave(session, reason, between_steps, ends)

    def leave(self, session: Session, reason: str, between_steps: bool, ends: bool) -> None:
        job, replica_id = session.key
        now = self._world.now
        if between_steps:
            self._invariants.discards.left(replica_id)
        self._invariants.progress.gone(job, replica_id)
        orders = self.core.leave(
            job, replica_id, reason, now, between_steps=between_steps, ends=ends
        )
        self._carry_out(orders)

    def accept_loss(self, job: str) -> None:
        """An operator accepts that ``job`` goes back, if it is held back for that."""
        if self.process.is_dead:
            return
        with contextlib.suppress(RequestRefused):
            orders = self.core.accept_loss(job, self._world.now)
            self._invariants.progress.accepted(job)
            self._carry_out(orders)
            self._trace.record("lighthouse", f"the loss of {job} is accepted")

    def tell(self, job: str, name: str, kind: str) -> None:
        """An operator commands the group called ``name``, if it can be reached."""
        if self.process.is_dead:
            return
        try:
            session = self.sessions.get((job, self.core.find(job, name)))
        except RequestRefused:
            return
        if session is not None:
            session.stream.to_client(kind)

    # -- orders ----------------------------------------------------------------------------------

    def _expire(self, caller: int, timeout_s: float) -> None:
        session = self._asking.get(caller)
        if session is None:
            return
        why = self.core.why(session.key[0], self._world.now)
        session.refuse(DeadlineExceeded("quorum", timeout_s, why))
        self.withdraw(session)

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, AnswerQuorum):
                self._publish(order)
            elif isinstance(order, RefuseRequest):
                session = self._answer(order.caller)
                if all(other.key != session.key for other in self._asking.values()):
                    self.liveness.withdrew(session.key, self._world.now)
                session.refuse(order.error)
            elif isinstance(order, ReportLoss):
                self._tell_loss(order)
            elif isinstance(order, ReportHang):
                self._report_hang(order)
            elif isinstance(order, ReportEviction):
                self._tell_eviction(order)
            elif isinstance(order, ReportLeftHealing):
                self.liveness.left_healing(order, self._world.now)
        self._arm()

    def _answer(self, caller: int) -> Session:
        self._invariants.waits.answered(caller, "the lighthouse answers a question")
        session = self._asking.pop(caller)
        session.caller = None
        return session

    def _publish(self, order: AnswerQuorum) -> None:
        quorum = order.quorum
        self._trace.record(
            "lighthouse",
            f"quorum {quorum.quorum_id} at step {quorum.max_step}: "
            + ", ".join(f"{each.replica_id}@{each.step}" for each in quorum.participants),
        )
        self._invariants.ids.published(order.job, quorum)
        self._invariants.progress.published(order)
        self.liveness.published(order.job, quorum, self.heard_at, self._world.now)
        for caller, member in zip(order.callers, quorum.participants, strict=True):
            session = self._answer(caller)
            asked = session.key == (order.job, member.replica_id)
            assert asked, f"the answer for {member.replica_id} goes to {session.key}"
            session.stream.to_client("quorum", session.number, quorum)

    def _tell_loss(self, loss: ReportLoss) -> None:
        self._trace.record("lighthouse", f"{loss.replica_id} is out: {loss.reason}")
        self._invariants.progress.lost(loss)
        self.heard_at.pop((loss.job, loss.replica_id), None)
        self.liveness.gone((loss.job, loss.replica_id), self._world.now)
        if all(job != loss.job for job, _ in self.heard_at):
            self.liveness.over(loss.job)
        if loss.between_steps:
            return
        self._invariants.discards.told_as_lost(loss.replica_id)
        for peer in loss.recipients:
            session = self.sessions.get((loss.job, peer))
            if session is not None:
                session.stream.to_client("lost", loss.replica_id, loss.quorum_id)

    def _report_hang(self, hang: ReportHang) -> None:
        self._trace.record("lighthouse", f"{hang.replica_id} hangs: {hang.phase.value}")
        self._invariants.hangs.reported(hang)
        session = self.sessions.get((hang.job, hang.replica_id))
        if hang.kill and session is not None:
            session.stream.to_client("kill")

    def _tell_eviction(self, out: ReportEviction) -> None:
        self._trace.record("lighthouse", f"{out.replica_id} is left out: {out.reason}")
        self.liveness.evicted(out, self._world.now)
        self._invariants.ids.spent(out)
        for each in out.recipients:
            session = self.sessions.get((out.job, each))
            if session is not None:
                session.stream.to_client("lost", out.replica_id, out.quorum_id)

    def _arm(self) -> None:
        at = self.core.next_deadline()
        if at is None or at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancelled = True
        self._timer_at = at
        self._timer = self.process.after(at - self._world.now, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        self._carry_out(self.core.tick(self._world.now))


class Session:
    """The lighthouse's end of a group's session."""

    def __init__(self, lighthouse: LighthouseActor, stream: Stream) -> None:
        self._lighthouse = lighthouse
        self.stream = stream
        self.key = ("", "")
        self.number = 0
        self.caller: int | None = None
        self._is_unary = False  # its messages are calls of their own, and its end tells nothing
        self.end = End(lighthouse.process, self._hear, self._close)

    def refuse(self, error: TorchFTError) -> None:
        self.stream.to_client("refusal", self.number, error)

    def _hear(self, kind: str, *what: object) -> None:
        getattr(self, f"_on_{kind}")(*what)

    def _on_hello(self, job: str, replica_id: str, last: LastQuorum | None) -> None:
        """Without sessions, ``last`` is not told."""
        self.key = (job, replica_id)
        self._is_unary = last is None
        lighthouse = self._lighthouse
        interval_s = (
            lighthouse.heartbeat(self) if last is None else lighthouse.open_session(self, last)
        )
        self.stream.to_client("welcome", interval_s)

    def _on_beat(
        self, phase: Phase = Phase.IDLE, step: int | None = None, lasts_s: float = 0.0
    ) -> None:
        since = self._lighthouse.process.world.now - lasts_s
        self._lighthouse.heartbeat(self, None if step is None else Activity(phase, step, since))

    def _on_question(self, number: int, member: Member, timeout_s: float) -> None:
        self._lighthouse.withdraw(self)
        self.number = number
        try:
            self._lighthouse.ask(self, member, timeout_s)
        except RequestRefused as error:
            self._lighthouse.withdraw(self)
            self.refuse(error)

    def _on_withdrawal(self, number: int) -> None:
        if number == self.number:  # or it has been overtaken
            self._lighthouse.withdraw(self)

    def _on_leave(self, reason: str, between_steps: bool, ends: bool) -> None:
        if self._is_unary:
            self._lighthouse.leave(self, reason, between_steps, ends)
        self._lighthouse.close_session(self, reason, between_steps, ends)
        self.end.is_open = False  # what else was on its way is not read
        self.stream.end("it has left")

    def _close(self, reason: str) -> None:
        if self.key[1]:
            self._lighthouse.close_session(self, f"its session ended: {reason}")
