"""Keeps a client at one lighthouse of its list: where to connect, when to beat, when to move.

A group's manager and the agent of a launched run connect, wait, look back and leave by the same
rules (F2 and F4). `LinkMachine` has these rules; `ManagerLink` adds what a manager asks,
`AgentLink` what an agent reports.

    link.start(now)                                 # the first input
    link.introduced(number, now)                    # the hello is sent
    link.welcomed(number, min_interval_s, now)
    link.probed(number, accepting, now)             # the outcome of a `Probe`
    link.closed(number, error, now)                 # also after a `Close`, then nothing happens
    link.leave(message, now)
    link.tick(now)                                  # at next_deadline(now)
    link.take_orders()                              # after each input

Inputs carry ``now`` in monotonic seconds; the shell owns the streams and the timer, and executes
the orders. Connections have numbers; inputs of a connection that is over are ignored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Generic, Literal, TypeVar

from torchft_svc.core.route import LOOK_BACK_S, Backoff, Route
from torchft_svc.errors import NotLeader, TorchFTError, Unreachable

# A lighthouse that accepts the connection but does not answer is as good as none.
WELCOME_TIMEOUT_S = 2.0
# Leaving is a courtesy: a lighthouse that does not answer must not hold up the end.
LEAVE_TIMEOUT_S = 1.0
# A lighthouse may want fewer beats; one that wants none for a minute is mistaken, and a client that
# obeyed would count as dead.
MAX_WANTED_INTERVAL_S = 60.0
# The reason of a lasting trouble is repeated in the log, so that it is near the end.
LOG_AGAIN_S = 5.0
# How old the last look at earlier lighthouses may be when a later one is asked, and when it answers
# (F4): groups gather there for as long (Q11). One look after the other at a silent one is no older.
MAX_LOOK_AGE_S = 2 * LOOK_BACK_S
# A beat is sent before it is due, by a random part of the interval up to this share.
EARLY_SHARE = 0.1
# How long the answer to a beat may take. A late beat is of no use, and the next one comes soon.
BEAT_TIMEOUT_S = 1.0
# From this interval on, clients beat at common moments, so many in each interval. A lighthouse asks
# for it where clients are many: most of what a beat costs is that it wakes up, and that is once for
# dozens of them then.
TOGETHER_FROM_S = 1.0
MOMENTS_PER_INTERVAL = 16


class LinkState(Enum):
    """The state of a link; each but PAUSED and LEFT has a connection."""

    PAUSED = auto()  # not started, or until `Attempts.retry_at`
    OPENING = auto()  # there is no welcome yet
    OPEN = auto()
    LEAVING = auto()  # the lighthouse is informed; maybe to begin again under another name
    LEFT = auto()

    def session_change(self, before: LinkState) -> bool | None:
        """Whether a session has begun (True), or is over or could not begin (False), since
        ``before``; None: neither."""
        if self is before:
            return None
        if self is LinkState.OPEN:
            return True
        return None if before is LinkState.PAUSED else False


# From each state: which may follow, and why.
TRANSITIONS: dict[LinkState, dict[LinkState, str]] = {
    LinkState.PAUSED: {
        LinkState.OPENING: "started, the pause is over, or another name was needed",
        LinkState.LEFT: "left; no lighthouse knows this client",
    },
    LinkState.OPENING: {
        LinkState.OPEN: "welcomed",
        LinkState.PAUSED: "refused, broken, or silent for `WELCOME_TIMEOUT_S`",
        LinkState.OPENING: "another name was needed",
        LinkState.LEFT: "left; this lighthouse does not know this client",
    },
    LinkState.OPEN: {
        LinkState.PAUSED: "broken",
        LinkState.OPENING: "sent to an earlier lighthouse (L21)",
        LinkState.LEAVING: "left, for good or to return under another name",
        LinkState.LEFT: "its run is closed",
    },
    LinkState.LEAVING: {
        LinkState.LEFT: "the lighthouse knows, or does not answer in time",
        LinkState.OPENING: "the same, and it returns; or sent to an earlier lighthouse (L21)",
        LinkState.PAUSED: "broken, and the lighthouse has to know (`AgentLink.leave`)",
    },
    LinkState.LEFT: {
        LinkState.OPENING: "a worker of the group was restarted",
        LinkState.LEFT: "left once more",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """The settings of a link; durations in seconds.

    ``heartbeat_interval_s``: the shortest one. ``wall_offset_s``: see `beat_together`.
    """

    lighthouses: tuple[str, ...]
    heartbeat_interval_s: float
    wall_offset_s: float = 0.0


# -- orders ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream with ``address``; it begins with `LinkMachine.hello`, made when it is sent.

    The messages among the orders that follow go over this connection.
    """

    connection: int
    address: str


@dataclass(frozen=True, slots=True)
class SendBeat:
    """Send what the client does, as it is when this is sent.

    Where a beat is a call, it has `BEAT_TIMEOUT_S`.
    """


@dataclass(frozen=True, slots=True)
class Close:
    """Ignore what still comes over the connection."""

    connection: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the lighthouses at ``addresses``, all at once, whether they would accept this client.

    `LinkMachine.probed` receives those that would, within ``timeout_s``.
    """

    connection: int
    addresses: tuple[str, ...]
    timeout_s: float = LOOK_BACK_S


@dataclass(frozen=True, slots=True)
class ConfirmLeft:
    """Report that the client has left, as far as a lighthouse could be informed."""


@dataclass(frozen=True, slots=True)
class Log:
    """Log ``text``."""

    level: Literal["info", "warning"]
    text: str


LinkOrder = Connect | SendBeat | Close | Probe | ConfirmLeft | Log
OwnOrder = TypeVar("OwnOrder")  # the messages and orders of one kind of client


# -- state -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class LinkConnection:
    """An attempt to connect with one lighthouse, and the connection that follows.

    ``closes_at``: when `LinkState.OPENING` and `LinkState.LEAVING` are given up. ``alive_at``: when
    another message than a beat was sent last.
    """

    number: int
    address: str
    closes_at: float
    is_unary: bool = False  # no stream: each message is a call of its own
    opened_at: float = math.inf
    interval_s: float = 0.0
    beat_at: float = math.inf
    beat_sent_at: float = 0.0
    alive_at: float = -math.inf
    look_at: float = math.inf
    probing: tuple[str, ...] = ()
    probing_since: float = 0.0
    looked_at: float = -math.inf  # when the last look at all earlier lighthouses began


@dataclass(slots=True)
class Attempts:
    """The history of the attempts to connect."""

    backoff: Backoff
    retry_at: float = math.inf  # it has not been started
    was_open: bool = False
    failing_since: float | None = None
    failing_for: TorchFTError | None = None
    logged_at: float = 0.0

    def absence(self) -> Absence | None:
        """The absence of all lighthouses that ends now (None: there was none)."""
        is_absence = isinstance(self.failing_for, Unreachable | NotLeader)
        if self.failing_since is None or not (self.was_open and is_absence):
            return None
        return Absence(self.failing_since, str(self.failing_for))


def beat_together(now: float, wait_s: float, interval_s: float, wall_offset_s: float) -> float:
    """Return when to beat after ``wait_s`` at most: when other clients do, which is a little
    earlier.

    ``wall_offset_s``: what a wall clock shows more than the clock of ``now``. Clocks that differ
    only spread the beats, as they would be without this.
    """
    at = now + wait_s
    if interval_s < TOGETHER_FROM_S or math.isinf(at):
        return at
    moment_s = interval_s / MOMENTS_PER_INTERVAL
    together_at = (at + wall_offset_s) // moment_s * moment_s - wall_offset_s
    return together_at if together_at > now else at


# -- the machine -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Absence:
    """The time ``since`` when no lighthouse could be reached, because of ``reason``."""

    since: float
    reason: str


class LinkMachine(ABC, Generic[OwnOrder]):
    """The rules of a link that all clients have; ``draw`` gives numbers from 0 to 1.

    A kind of client decides what it introduces itself with (`hello`), and what follows when it is
    connected (`_on_open`), was disconnected (`_on_loss`), has found an earlier lighthouse
    (`_on_better`) or none (`_on_look`), and has left (`_on_left`).
    """

    # Whether it looks at earlier lighthouses as soon as it is connected, not within a second.
    _looks_at_once: ClassVar[bool]

    def __init__(self, config: LinkConfig, draw: Callable[[], float]) -> None:
        self.state = LinkState.PAUSED
        #: Before the present session.
        self.absence: Absence | None = None
        self.config = config
        self._draw = draw
        self._route = Route(config.lighthouses)
        self._attempts = Attempts(Backoff(draw))
        self._num_connections = 0
        self._connection: LinkConnection | None = None
        self._restarts = False  # as soon as it has left
        self._orders: list[LinkOrder | OwnOrder] = []

    # -- what a kind of client decides -----------------------------------------------------------

    @abstractmethod
    def hello(self) -> object:
        """The first message of the present connection."""

    @abstractmethod
    def _on_open(self, connection: LinkConnection, now: float) -> None:
        """React to a welcome; `Attempts.was_open` is still that of before."""

    @abstractmethod
    def _on_loss(
        self, connection: LinkConnection, error: TorchFTError, now: float, *, everywhere: bool
    ) -> None:
        """React to the end of the connection because of ``error``.

        ``everywhere``: all of the list have failed since one has answered.
        """

    @abstractmethod
    def _on_better(self, address: str, now: float) -> None:
        """React to an earlier lighthouse, at ``address``, that would accept this client."""

    def _on_look(
        self,
        connection: LinkConnection,
        probed: Collection[str],
        accepting: Collection[str],
        now: float,
    ) -> None:
        """React to a look in which no earlier lighthouse would accept this client.

        Of those ``probed``, those ``accepting`` would.
        """

    def _on_left(self, now: float) -> None:
        """React to having left, for good or to return under another name."""

    def _choose_name(self) -> None:
        """Choose another name, which no lighthouse knows."""
        self._attempts = Attempts(Backoff(self._draw))

    # -- inputs ----------------------------------------------------------------------------------

    def take_orders(self) -> tuple[LinkOrder | OwnOrder, ...]:
        """Return the orders of the inputs since the last call; to be called after each input."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def start(self, now: float) -> None:
        """Connect for the first time."""
        self._connect(now)

    def introduced(self, number: int, now: float) -> None:
        """Record that the hello is sent: the lighthouse has to answer now."""
        connection = self._current(number)
        if connection is not None and self.state is LinkState.OPENING:
            connection.closes_at = now + WELCOME_TIMEOUT_S

    def not_supported(self, number: int, now: float) -> None:
        """Use calls for beats and questions: like that of the public release, the lighthouse has
        no sessions."""
        connection = self._current(number)
        if connection is not None and self.state is LinkState.OPENING:
            self._log("info", "the lighthouse has no sessions, sending heartbeats")
            connection.is_unary = True
            connection.interval_s = self.config.heartbeat_interval_s
            connection.closes_at = math.inf
            self._send_beat(connection, now)

    def welcomed(self, number: int, min_interval_s: float, now: float) -> None:
        """Record that the lighthouse accepts this client, and wants no more than one beat in
        ``min_interval_s``; without a session it answers this to each beat."""
        connection = self._current(number)
        if connection is None or self.state not in (LinkState.OPENING, LinkState.OPEN):
            return
        wanted_s = min(min_interval_s, MAX_WANTED_INTERVAL_S)
        connection.interval_s = max(self.config.heartbeat_interval_s, wanted_s)
        if connection.is_unary:
            self._plan_call(connection, now)
        elif self.state is LinkState.OPENING:
            connection.beat_at = now + connection.interval_s * self._between(1 - EARLY_SHARE)
        if self.state is LinkState.OPENING:
            self._begin_session(connection, now)

    def beat_at_once(self, now: float) -> None:
        """Send the next beat now, if there is a session: it carries what people wait for."""
        if self._connection is not None and self.state is LinkState.OPEN:
            self._send_beat(self._connection, now)

    def beat_was_late(self, number: int, now: float) -> None:
        """Plan another beat without a session: the last one timed out, which breaks nothing."""
        connection = self._current(number)
        if connection is not None:
            self._plan_call(connection, now)

    def probed(self, number: int, accepting: Collection[str], now: float) -> None:
        """Record which lighthouses of a `Probe` would accept this client: those ``accepting``."""
        connection = self._current(number)
        if connection is None or self.state is not LinkState.OPEN:
            return
        better = next((each for each in self._route.preferred if each in accepting), None)
        if better is not None:
            self._on_better(better, now)
            return
        connection.looked_at = connection.probing_since
        probed, connection.probing = connection.probing, ()
        # A look that lasts, because nobody answers, makes the next one no rarer.
        next_at = connection.probing_since + LOOK_BACK_S * self._between(0.5)
        connection.look_at = max(now, next_at) if self._route.preferred else math.inf
        self._on_look(connection, probed, accepting, now)

    def closed(self, number: int, error: TorchFTError | None, now: float) -> None:
        """Record that the connection broke because of ``error``; None: the lighthouse ended it."""
        connection = self._current(number)
        if connection is None:
            return
        if self.state is LinkState.LEAVING:
            self._finish_leaving(now)
        else:
            ended = Unreachable("lighthouse", connection.address, "it ended the session")
            self._lose_connection(error or ended, now)

    # -- time ------------------------------------------------------------------------------------

    def next_deadline(self, now: float) -> float:
        """Return when to call `tick` (inf: not before another input)."""
        if self.state is LinkState.PAUSED:
            return self._attempts.retry_at
        connection = self._connection
        if connection is None:
            return math.inf
        return min(connection.closes_at, connection.beat_at, connection.look_at)

    def tick(self, now: float) -> None:
        """Act on the deadlines that are over; too early is harmless."""
        connection = self._connection
        if self.state is LinkState.PAUSED and now >= self._attempts.retry_at:
            self._connect(now)
        elif connection is not None and now >= connection.closes_at:
            if self.state is LinkState.LEAVING:
                self._finish_leaving(now)
            else:
                self._lose_connection(
                    Unreachable("lighthouse", connection.address, "it does not answer"), now
                )
        elif connection is not None and self.state is not LinkState.LEAVING:
            self._tick_connection(connection, now)

    def _tick_connection(self, connection: LinkConnection, now: float) -> None:
        if now >= connection.beat_at:
            silent_s = now - connection.alive_at
            wait_s = connection.interval_s - silent_s
            if connection.is_unary or silent_s >= (1 - EARLY_SHARE) * connection.interval_s:
                self._send_beat(connection, now)
                wait_s = math.inf if connection.is_unary else connection.interval_s
            connection.beat_at = beat_together(
                now,
                wait_s * self._between(1 - EARLY_SHARE),
                connection.interval_s,
                self.config.wall_offset_s,
            )
        if now >= connection.look_at:
            self._probe(connection, self._route.preferred, now)

    # -- connecting ------------------------------------------------------------------------------

    def _enter_state(self, state: LinkState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} cannot become {state}"
        self.state = state

    def _connect(self, now: float) -> None:
        self._num_connections += 1
        number, address = self._num_connections, self._route.current
        self._connection = LinkConnection(number, address, closes_at=now + WELCOME_TIMEOUT_S)
        self._enter_state(LinkState.OPENING)
        self._orders.append(Connect(number, address))

    def _begin_session(self, connection: LinkConnection, now: float) -> None:
        self._enter_state(LinkState.OPEN)
        self._route.record_answer()
        attempts = self._attempts
        attempts.backoff.record_attempt(failed=False)
        if attempts.failing_since is not None:
            self._log("warning", f"connected to lighthouse {connection.address}")
        connection.closes_at = math.inf
        connection.opened_at = now
        self.absence = attempts.absence()
        if self._route.preferred and self._looks_at_once:
            self._probe(connection, self._route.preferred, now)
        elif self._route.preferred:
            connection.look_at = now + LOOK_BACK_S * self._between(0.5)
        self._on_open(connection, now)
        attempts.was_open, attempts.failing_since = True, None

    def _lose_connection(self, error: TorchFTError, now: float) -> None:
        """Connect again after a pause: the connection is over, but the client has not left."""
        connection, attempts = self._connection, self._attempts
        assert connection is not None
        self._close_connection()
        self._enter_state(LinkState.PAUSED)
        self._log_trouble(error, now)
        leader = error.leader if isinstance(error, NotLeader) else ""
        all_failed = not self._route.choose_next(leader)
        if all_failed:
            attempts.backoff.record_attempt(failed=True)
        attempts.retry_at = now + attempts.backoff.pause_s()
        self._on_loss(connection, error, now, everywhere=all_failed)

    def _log_trouble(self, error: TorchFTError, now: float) -> None:
        attempts = self._attempts
        if attempts.failing_since is None:
            attempts.failing_since = attempts.logged_at = now
            attempts.failing_for = error
            what = "lost the lighthouse" if attempts.was_open else "there is no lighthouse"
            self._log("warning", f"{what}: {error}")
        elif now - attempts.logged_at >= LOG_AGAIN_S:
            attempts.logged_at = now
            self._log("warning", f"no lighthouse for {now - attempts.failing_since:.0f} s: {error}")

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._orders.append(Close(self._connection.number))
            self._connection = None

    # -- leaving, and beginning again ------------------------------------------------------------

    def _leave(self, message: OwnOrder, now: float, *, restarts: bool = False) -> None:
        """Leave with ``message``; ``restarts``: and connect again, under another name."""
        self._restarts = restarts
        if self.state is LinkState.OPEN:
            self._send_leave(message, now + LEAVE_TIMEOUT_S)
        elif self.state is not LinkState.LEAVING:
            self._finish_leaving(now)

    def _send_leave(self, message: OwnOrder, closes_at: float) -> None:
        assert self._connection is not None
        self._enter_state(LinkState.LEAVING)
        self._connection.closes_at = closes_at
        # A beat would bring the client back.
        self._connection.beat_at = self._connection.look_at = math.inf
        self._orders.append(message)

    def _finish_leaving(self, now: float) -> None:
        self._close_connection()
        self._orders.append(ConfirmLeft())
        if self._restarts:
            self._restarts = False
            self._choose_name()
            self._connect(now)
        else:
            self._enter_state(LinkState.LEFT)
        self._on_left(now)

    # -- looking at other lighthouses ------------------------------------------------------------

    def _probe(self, connection: LinkConnection, addresses: tuple[str, ...], now: float) -> None:
        connection.look_at = math.inf
        if not connection.probing:
            connection.probing, connection.probing_since = addresses, now
            self._orders.append(Probe(connection.number, addresses))

    # -- beats -----------------------------------------------------------------------------------

    def _send_beat(self, connection: LinkConnection, now: float) -> None:
        connection.beat_sent_at = now
        self._orders.append(SendBeat())

    def _plan_call(self, connection: LinkConnection, now: float) -> None:
        if self.state is not LinkState.LEAVING:
            wait_s = connection.interval_s * self._between(1 - EARLY_SHARE)
            connection.beat_at = max(now, connection.beat_sent_at + wait_s)

    def _current(self, number: int) -> LinkConnection | None:
        connection = self._connection
        return connection if connection is not None and connection.number == number else None

    def _between(self, least: float) -> float:
        """A factor from ``least`` to 1."""
        return least + (1 - least) * self._draw()

    def _log(self, level: Literal["info", "warning"], text: str) -> None:
        self._orders.append(Log(level, text))
