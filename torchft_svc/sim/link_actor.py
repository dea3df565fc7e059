"""A manager's line to the lighthouse in a simulated world: session, questions, retries, leaving.

It does what `manager_server/link.py` and `session_line.py` do, with the same timeouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torchft_svc.core.activity import Activity
from torchft_svc.core.assignment import check_answer
from torchft_svc.core.group_orders import AskLighthouse
from torchft_svc.core.types import NO_QUORUM, LastQuorum, Member, Quorum
from torchft_svc.errors import DeadlineExceeded, PeerError, QuorumFailed, TorchFTError, Unreachable
from torchft_svc.sim.network import End, Network, Stream
from torchft_svc.sim.world import Event, Process

# As in the service; it can not be imported, because what it builds on imports gRPC.
MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5
WELCOME_TIMEOUT_S = 2.0
REFUSAL_GRACE_S = 0.25
LEAVE_TIMEOUT_S = 1.0

Outcome = Quorum | TorchFTError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """What a link has to know; durations in seconds."""

    job: str
    name: str
    group_world_size: int
    heartbeat_interval_s: float
    connect_timeout_s: float
    quorum_retries: int
    min_replicas: int
    has_sessions: bool


class SessionActor:
    """One incarnation's session, opened again whenever it breaks, until it is left."""

    def __init__(
        self,
        process: Process,
        network: Network,
        accept: Callable[[Stream], End | None],
        config: LinkConfig,
        on_news: Callable[..., None],
        activity: Callable[[], Activity | None],
        replica_id: str,
        last: Callable[[], LastQuorum],
    ) -> None:
        self._process = process
        self._network = network
        self._accept = accept
        self._config = config
        self._replica_id = replica_id
        self._last = last
        self._on_news = on_news
        self._activity = activity
        self._stream: Stream | None = None
        self._opening: Stream | None = None
        self._pause_s = MIN_PAUSE_S
        self._numbers = itertools.count(1)
        self._number = 0
        self._done: Callable[[Outcome], None] | None = None
        self._expiry: Event | None = None
        self._left = False
        self._on_left: Callable[[], None] | None = None

    def open(self) -> None:
        if self._left:
            return
        end = End(self._process, self._hear, self._lost)
        stream = self._opening = self._network.connect(end, self._accept)
        if stream is not None:
            last = self._last() if self._config.has_sessions else None
            stream.to_server("hello", self._config.job, self._replica_id, last)
            self._process.after(WELCOME_TIMEOUT_S, self._check_welcome, stream)

    def ask(self, member: Member, timeout_s: float, done: Callable[[Outcome], None]) -> None:
        if self._stream is None:
            done(Unreachable("lighthouse", "simulated", "there is no session"))
            return
        self._number = number = next(self._numbers)
        self._done = done
        self._stream.to_server("question", number, member, timeout_s)
        self._expiry = self._process.after(timeout_s + REFUSAL_GRACE_S, self._expire, number)

    def withdraw(self) -> None:
        """Whoever asked wants the answer no more."""
        if self._done is not None:
            self._done = None
            if self._stream is not None:
                self._stream.to_server("withdrawal", self._number)

    def leave(self, reason: str, between_steps: bool, ends: bool, then: Callable[[], None]) -> None:
        """Say so, and wait a moment for the lighthouse to end the session."""
        if self._on_left is not None:  # it is leaving
            then()
            return
        self._left = True
        if self._stream is None:
            if self._opening is not None:
                self._opening.cancel()
            then()
            return
        self._on_left = then
        self._stream.to_server("leave", reason, between_steps, ends)
        self._process.after(LEAVE_TIMEOUT_S, self._has_left)

    def _has_left(self) -> None:
        then, self._on_left = self._on_left, None
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
        self._finish(Unreachable("lighthouse", "simulated", "the group has left"))
        if then is not None:
            then()

    def _check_welcome(self, stream: Stream) -> None:
        if self._opening is stream:
            stream.cancel()
            self._lost("no welcome")

    def _lost(self, reason: str) -> None:
        self._stream = self._opening = None
        if self._left:
            self._has_left()
            return
        self._finish(Unreachable("lighthouse", "simulated", reason))
        self._process.after(self._pause_s * self._process.chance.uniform(0.5, 1.0), self.open)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _hear(self, kind: str, *what: object) -> None:
        if kind in ("lost", "kill", "drain"):
            self._on_news(kind, *what)
        else:
            getattr(self, f"_on_{kind}")(*what)

    def _on_welcome(self, min_interval_s: float) -> None:
        stream, self._opening = self._opening, None
        if self._left:
            if stream is not None:
                stream.cancel()
            return
        self._stream = stream
        self._pause_s = MIN_PAUSE_S
        self._beat(stream, max(self._config.heartbeat_interval_s, min_interval_s))

    def _beat(self, stream: Stream | None, interval_s: float) -> None:
        if stream is None or self._stream is not stream:
            return
        doing = self._activity()
        if doing is not None:
            lasts_s = self._process.world.now - doing.since
            stream.to_server("beat", doing.phase, doing.step, lasts_s)
        else:
            stream.to_server("beat")
        wait_s = interval_s * self._process.chance.uniform(0.9, 1.0)
        self._process.after(wait_s, self._beat, stream, interval_s)

    def _on_quorum(self, number: int, quorum: Quorum) -> None:
        if number == self._number:
            self._finish(quorum)

    def _on_refusal(self, number: int, error: TorchFTError) -> None:
        if number == self._number:
            self._finish(error)

    def _expire(self, number: int) -> None:
        if number == self._number and self._done is not None:
            done = self._done
            self.withdraw()
            done(DeadlineExceeded("quorum", 0.0, "the lighthouse is silent"))

    def _finish(self, outcome: Outcome) -> None:
        done, self._done = self._done, None
        if self._expiry is not None:
            self._expiry.cancelled = True
            self._expiry = None
        if done is not None:
            done(outcome)


class LinkActor:
    """Asks the lighthouse on behalf of a group, as one incarnation after another."""

    def __init__(
        self,
        process: Process,
        network: Network,
        accept: Callable[[Stream], End | None],
        config: LinkConfig,
        on_news: Callable[..., None],
        activity: Callable[[], Activity | None],
    ) -> None:
        self._process = process
        self._config = config
        self._make_session = partial(
            SessionActor, process, network, accept, config, on_news, activity
        )
        self.seen_quorum_id = 0  # of the newest quorum that the group was told
        self._last_num_groups = 0
        self._last = NO_QUORUM
        self._question: _Question | None = None
        self._num_incarnations = 0
        self._new_incarnation()

    def _new_incarnation(self) -> None:
        self._has_left = False
        self._num_incarnations += 1
        self.replica_id = f"{self._config.name}:{self._process.name}.{self._num_incarnations}"
        self._session = self._make_session(self.replica_id, lambda: self._last)
        self._session.open()

    def ask(self, ask: AskLighthouse, timeout_s: float, done: Callable[[Outcome], None]) -> None:
        deadline = self._process.world.now + timeout_s
        question = self._question = _Question(ask, deadline, self._config.quorum_retries, done)
        if ask.new_incarnation:
            self._last = NO_QUORUM
            left = self._session
            begin_again = lambda: self._begin_again(question, left)  # noqa: E731
            left.leave("a worker was restarted", False, False, begin_again)
        else:
            self._attempt(question)

    def stop(self) -> None:
        """Nobody waits for the answer any more."""
        self._question = None
        self._session.withdraw()

    def leave(self, reason: str, between_steps: bool, ends: bool) -> None:
        self._has_left = True
        self._session.leave(reason, between_steps, ends, lambda: None)

    def _begin_again(self, question: _Question, left: SessionActor) -> None:
        if self._session is left:
            self._new_incarnation()
        self._attempt(question)

    def _attempt(self, question: _Question) -> None:
        now = self._process.world.now
        question.give_up_at = min(question.deadline, now + self._config.connect_timeout_s)
        question.pause_s = MIN_PAUSE_S
        self._ask_once(question)

    def _ask_once(self, question: _Question) -> None:
        if question is not self._question:
            return
        timeout_s = question.deadline - self._process.world.now
        if timeout_s <= 0:
            self._told(question, DeadlineExceeded("quorum", 0.0, "no time is left"))
            return
        self.seen_quorum_id = max(self.seen_quorum_id, question.ask.seen_quorum_id)
        member = Member(
            replica_id=self.replica_id,
            address=self._process.name,
            store_address=self._process.name,
            step=question.ask.step,
            world_size=self._config.group_world_size,
            shrink_only=question.ask.shrink_only,
            commit_failures=question.ask.commit_failures,
            seen_quorum_id=self.seen_quorum_id,
            min_replicas=self._config.min_replicas,
            last_num_groups=self._last_num_groups,
            unhealed=question.ask.unhealed,
            has_history=question.ask.has_history,
            layout=question.ask.layout,
        )
        self._session.ask(
            member, timeout_s, lambda outcome: self._told(question, self._check(member, outcome))
        )

    def _told(self, question: _Question, outcome: Outcome) -> None:
        if question is not self._question:
            return
        now = self._process.world.now
        if self._has_left and isinstance(outcome, Unreachable):
            outcome = QuorumFailed("this group has left the lighthouse")
        if isinstance(outcome, Unreachable) and now + question.pause_s < question.give_up_at:
            wait_s = question.pause_s * self._process.chance.uniform(0.5, 1.0)
            self._process.after(wait_s, self._ask_once, question)
            question.pause_s = min(2 * question.pause_s, MAX_PAUSE_S)
            return
        if isinstance(outcome, PeerError) and question.retries_left and now < question.deadline:
            question.retries_left -= 1
            self._attempt(question)
            return
        self._question = None
        question.done(outcome)

    def _check(self, asked: Member, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Quorum):
            return outcome
        try:
            check_answer(asked, outcome, ids_grow=self._config.has_sessions)
        except QuorumFailed as error:
            return error
        self.seen_quorum_id = max(self.seen_quorum_id, outcome.quorum_id)
        self._last_num_groups = len(outcome.participants)
        self._last = LastQuorum(outcome.quorum_id, outcome.max_step)
        return outcome


@dataclass(slots=True)
class _Question:
    ask: AskLighthouse
    deadline: float
    retries_left: int
    done: Callable[[Outcome], None]
    give_up_at: float = 0.0
    pause_s: float = MIN_PAUSE_S
