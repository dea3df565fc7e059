"""The lighthouse of a simulated world: the service's own machine, behind simulated streams."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tools.sim.invariants import SLACK_S, Invariants
from tools.sim.lighthouse_checks import ClientRecord, LighthouseChecks
from tools.sim.liveness import LOOK_S
from tools.sim.network import Network, Stream, StreamEnd
from tools.sim.trace import Trace
from tools.sim.world import VirtualWorld
from torchft_svc.core.quorum.lighthouse.copies import HeldCopies, HeldCopy, MembersAndCopies
from torchft_svc.core.quorum.lighthouse.lighthouse import (
    ID_EPOCH_S,
    Lighthouse,
    Orders,
    Publish,
    RefuseCall,
    Report,
    Send,
    execute,
    first_quorum_id,
)
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Drain,
    Hello,
    Leave,
    News,
    Question,
    Refusal,
    SessionMessage,
    Welcome,
    Withdrawal,
)
from torchft_svc.core.quorum.types import Quorum, QuorumConfig
from torchft_svc.core.streams import EndStream
from torchft_svc.core.timer import DeadlineTimer
from torchft_svc.errors import NotLeader, RequestRefused, TorchFTError

# The wall clock at the world's beginning: ids start from it, as in the service.
WALL_CLOCK_AT_START_S = ID_EPOCH_S + 1000.0
# In a larger fleet it would cost more than all that happens in it.
MAX_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Introduction:
    """The first message of a stream. Without a session the messages stand for calls, and this one
    for the first heartbeat."""

    job: str
    hello: Hello
    has_session: bool


class QuorumAnswer(NamedTuple):
    """The answer to question ``number``."""

    number: int
    quorum: Quorum


class LighthouseActor:
    """One lighthouse host, the `Shell` of its machine; the process on it comes and goes."""

    def __init__(
        self,
        world: VirtualWorld,
        network: Network,
        config: QuorumConfig,
        invariants: Invariants,
        trace: Trace,
        name: str,
        clock_skew_s: float,
        elected: Callable[[], str],
    ) -> None:
        self.began_at = 0.0  # its present life, or its lead
        self._world = world
        self._network = network
        self._config = config
        self._invariants = invariants
        self._trace = trace
        self._numbers = itertools.count()  # of streams and calls
        self._num_lives = 0
        self.name = name
        self._elected = elected
        self.up_since = 0.0  # or will be up from then on
        self.thawed_at = -math.inf  # or will be thawed then
        self.clock_skew_s = clock_skew_s
        self.leads = True
        self.process = world.process(name)
        self._start_life()

    def _first_id(self) -> int:
        wall_s = WALL_CLOCK_AT_START_S + self._world.now + self.clock_skew_s
        return first_quorum_id(wall_s, remainder=0)  # the worst case: one that others have, too

    def _start_life(self) -> None:
        self.core = Lighthouse(self._config, self._first_id(), self._world.now)
        self._copies = HeldCopies(self._config.max_jobs, self._world.now)
        self.checks = self._new_checks()
        self._connections: dict[int, Connection] = {}
        self._calls: dict[int, Connection] = {}
        self._timer = DeadlineTimer(self.process.after, self._tick)
        if self._config.max_members_per_job <= MAX_LOOKED_AT:
            self.process.after(LOOK_S, self._check_now)

    def _new_checks(self) -> LighthouseChecks:
        self._invariants.ids.restarted()
        self._invariants.progress.restarted()
        self._invariants.newcomers.restarted()
        return LighthouseChecks(
            self._config, self.core, self.process, self._invariants, self._trace, self.name
        )

    def crash(self, down_s: float, clock_back_s: float) -> None:
        """Kill the process; a new one, whose wall clock was set back, begins after ``down_s``."""
        if self.process.is_dead:
            return
        self.clock_skew_s -= clock_back_s
        self.process.kill()
        self._num_lives += 1
        following = self._world.process(f"{self.name} {self._num_lives + 1}")
        following.after(down_s, self._come_back)
        self._next = following

    def _come_back(self) -> None:
        self.process, self.leads = self._next, True
        self.began_at = self._world.now
        self._start_life()
        self._trace.record(self.name, "is back")

    def end_lead(self, seconds: float) -> None:
        """Lose the election, and be elected again after ``seconds``."""
        if self.process.is_dead or not self.leads:
            return
        self.leads = False
        over, first_id = NotLeader(""), self._first_id()
        self.feed(lambda now: self.core.lead_ended(over, first_id, now), self.checks.lead_ended)
        self.checks = self._new_checks()
        self.process.after(seconds, self._lead)

    def _lead(self) -> None:
        self.leads, self.began_at = True, self._world.now
        self._trace.record(self.name, "leads again")

    @property
    def is_up(self) -> bool:
        """Whether its process runs, so that commands of an operator reach it."""
        return not (self.process.is_dead or self.process.is_frozen)

    def is_away_for(self, seconds: float) -> None:
        self.up_since = max(self.up_since, self._world.now + seconds)

    def accepts_clients(self) -> bool:
        """Whether it accepts groups; it refuses them if another lighthouse leads."""
        return self._elected() in ("", self.name) and self.leads and not self.process.is_dead

    def refusal(self) -> NotLeader | None:
        """The answer to all that groups ask while it does not lead."""
        return None if self.accepts_clients() else NotLeader(self._elected())

    def accept(self, stream: Stream) -> StreamEnd | None:
        """The server's end of a new stream, if somebody listens."""
        if self.process.is_dead:
            return None
        refusal = self.refusal()
        if refusal is not None:
            return StreamEnd(self.process, lambda _: stream.end(refusal), lambda reason: None)
        connection = Connection(self, stream, next(self._numbers))
        self._connections[connection.number] = connection
        return connection.end

    def accept_loss(self, job: str) -> bool:
        """Let ``job`` go back, as an operator; whether it was held back for that."""
        with contextlib.suppress(RequestRefused):
            self._command(lambda now: self.core.loss_accepted(job, now))
            return self.is_up
        return False

    def drain(self, job: str, name: str) -> None:
        with contextlib.suppress(RequestRefused):
            self._command(lambda now: self.core.commanded(job, name, Drain("enough"), now))

    def record_copies(
        self, job: str, holder: str, copies: tuple[HeldCopy, ...]
    ) -> MembersAndCopies | None:
        """Record what a holder reports, also while another lighthouse leads (None: it does)."""
        self._copies.record_report(job, holder, copies, self._world.now)
        return self.members_and_copies(job)

    def members_and_copies(self, job: str) -> MembersAndCopies | None:
        """Answer a worker that starts, or a holder (None: another lighthouse leads)."""
        if self.refusal() is not None:
            return None
        now, jobs = self._world.now, self.core.jobs
        members, step = jobs.members(job)
        return MembersAndCopies(
            members={each.replica_id: each.address for each in members},
            committed_step=step,
            copies=tuple(self._copies.whole_copies(job, now)),
            knows_copies=self._copies.knows_all(now),
            is_finished=jobs.is_finished(job),
        )

    def _command(self, call_core: Callable[[float], Orders]) -> None:
        if self.is_up:
            self.feed(call_core)

    # -- the driver ------------------------------------------------------------------------------

    def feed(
        self, call_core: Callable[[float], Orders], check: Callable[[], None] | None = None
    ) -> None:
        """Pass an input to the core and to the checks (``check``), and execute the orders."""
        orders = call_core(self._world.now)
        if check is not None:
            check()
        execute(orders, self)
        self.checks.executed()
        self._timer.set(self.core.next_deadline(), self._world.now)

    def call(self, client: Connection, question: Question) -> None:
        """Ask a question as a call of its own, which cancels the one before."""
        self.cancel(client)
        call = client.call = next(self._numbers)
        self._calls[call] = client
        job, member, timeout_s = client.key[0], question.member, question.timeout_s
        self.feed(
            lambda now: self.core.called(call, job, member, timeout_s, now),
            lambda: self.checks.received(client, question),
        )

    def cancel(self, client: Connection) -> None:
        if self._calls.pop(client.call, None) is not None:
            self.feed(
                lambda now: self.core.cancelled(client.call, now),
                lambda: self.checks.withdrew(client),
            )

    def closed(self, client: Connection) -> None:
        """End a stream; for a client without a session this means nothing."""
        if client.is_unary:
            self.cancel(client)
        else:
            self.feed(
                lambda now: self.core.closed(client.number, now),
                lambda: self.checks.closed(client),
            )
        self._connections.pop(client.number, None)

    # -- its orders ------------------------------------------------------------------------------

    def send(self, order: Send) -> None:
        clients = [self._connections[stream] for stream in order.streams]
        self.checks.sent(clients, order.news)
        for client in clients:
            self._send_news(client, order.news)

    def publish(self, order: Publish) -> None:
        answered = [(self._connections[stream], number) for stream, number in order.answers]
        for call in order.calls:
            client = self._calls.pop(call)
            answered.append((client, client.number_asked))
        self.checks.published(order, answered)
        for client, number in answered:
            client.stream.to_client(QuorumAnswer(number, order.quorum))

    def refuse_call(self, order: RefuseCall) -> None:
        client = self._calls.pop(order.call)
        self._send_news(client, Refusal(client.number_asked, order.error))

    def end_stream(self, order: EndStream) -> None:
        self._connections[order.stream].finish(order.error or "it has left")

    def report(self, report: Report) -> None:
        self.checks.reported(report)

    def _send_news(self, client: Connection, news: News) -> None:
        if isinstance(news, Refusal):
            self.checks.refused(client, news)
        client.stream.to_client(news)

    def _tick(self) -> None:
        self.feed(self.core.tick)

    def _check_now(self) -> None:
        self.feed(self.core.tick)
        if self.process.thawed_at + SLACK_S < self._world.now:
            self.checks.check_liveness()
        self.process.after(LOOK_S, self._check_now)


class Connection(ClientRecord):
    """The lighthouse's end of a group's stream.

    Without a session, its messages stand for calls, and its end means nothing.
    """

    def __init__(self, lighthouse: LighthouseActor, stream: Stream, number: int) -> None:
        super().__init__()
        self._lighthouse = lighthouse
        self._core = lighthouse.core
        self.stream = stream
        self.number = number
        self.is_unary = False
        self.call = -1
        self.end = StreamEnd(lighthouse.process, self._receive, self._close)

    def finish(self, reason: str | TorchFTError) -> None:
        """End the stream behind all that was sent; messages that are still on their way are not
        read."""
        if self.end.is_open:
            self.end.is_open = False
            self.stream.end(reason)
            self._lighthouse.closed(self)

    def _close(self, reason: str) -> None:
        self._lighthouse.closed(self)

    def _receive(self, message: Introduction | SessionMessage) -> None:
        if isinstance(message, Introduction):
            self._introduce(message)
        elif self.is_unary:
            self._call(message)
        else:
            self._feed(lambda now: self._core.received(self.number, message, now), message)

    def _feed(self, call_core: Callable[[float], Orders], message: SessionMessage) -> None:
        self._lighthouse.feed(call_core, lambda: self._lighthouse.checks.received(self, message))

    def _introduce(self, message: Introduction) -> None:
        job, hello = message.job, message.hello
        self.key = (job, hello.replica_id)
        if message.has_session:
            checks = self._lighthouse.checks
            self._lighthouse.feed(
                lambda now: self._core.opened(self.number, job, hello, now),
                lambda: checks.opened(self, hello),
            )
            return
        self.is_unary = True
        self._call(Beat())
        self.stream.to_client(Welcome(self._core.jobs.beat_interval_s(job)))

    def _call(self, message: SessionMessage) -> None:
        refusal = self._lighthouse.refusal()
        if refusal is not None:
            self.finish(refusal)
        elif isinstance(message, Question):
            self._lighthouse.call(self, message)
        elif isinstance(message, Withdrawal):
            if message.number == self.number_asked:
                self._lighthouse.cancel(self)
        elif isinstance(message, Leave):
            self._feed(lambda now: self._core.left(*self.key, message, now), message)
            self.finish("it has left")
        else:
            self._feed(lambda now: self._core.heartbeat(*self.key, now), message)
