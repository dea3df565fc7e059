"""The values of a manager's link to its lighthouses: settings, states, and orders to its shell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from torchft_svc.core.quorum.session_messages import Hello, Leave, Question, Withdrawal
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import GroupRequest, Member, Quorum, Resumed
from torchft_svc.core.route import LOOK_BACK_S, Backoff
from torchft_svc.errors import NotLeader, TorchFTError, Unauthorized

# A heartbeat is worthless when it is late; the next one is a new chance.
BEAT_TIMEOUT_S = 1.0
# So long after it is connected a newcomer asks, where the job may be at another lighthouse (F4): by
# then all groups that are there have looked back, and have moved. But it does not spend more than
# this share of its question's time: groups that start over and over have to meet.
NEWCOMER_PAUSE_S = 2 * LOOK_BACK_S + 0.5
NEWCOMER_SHARE = 0.25
# So long after it is connected a newcomer asks that could not reach any lighthouse before (F8): the
# members of the job are back by then. If it could not reach one only, they may have lost that at
# the same moment; they go on to the next one of the list without a pause, and are here far sooner.
RETURN_S = 1.0
GO_ON_S = 0.25
# Groups that are told to beat this rarely are many: they beat at so many moments of an interval,
# together. A lighthouse then wakes up once for dozens, and that is most of what a heartbeat costs.
TOGETHER_FROM_S = 1.0
MOMENTS_PER_INTERVAL = 16


def beat_together(now: float, wait_s: float, interval_s: float, wall_offset_s: float) -> float:
    """When to beat that waits for ``wait_s`` at most: when other groups do, which is a little
    earlier.

    ``wall_offset_s``: what a wall clock shows more than the clock of ``now``. Clocks that differ
    only spread the heartbeats, as they would be without this.
    """
    at = now + wait_s
    if interval_s < TOGETHER_FROM_S or math.isinf(at):
        return at
    moment_s = interval_s / MOMENTS_PER_INTERVAL
    together_at = (at + wall_offset_s) // moment_s * moment_s - wall_offset_s
    return together_at if together_at > now else at


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """The settings of a link, see `ManagerConfig`; durations in seconds."""

    lighthouses: tuple[str, ...]
    store_address: str
    group_world_size: int
    heartbeat_interval_s: float
    connect_timeout_s: float
    quorum_retries: int
    min_replicas: int
    resumed: Resumed | None = None
    wall_offset_s: float = 0.0  # see `beat_together`


class LinkState(Enum):
    """Each state but PAUSED and LEFT has a connection."""

    PAUSED = auto()  # until `Incarnation.retry_at`
    OPENING = auto()  # there is no welcome yet
    OPEN = auto()
    LEAVING = auto()  # maybe to begin again
    LEFT = auto()

    def session_change(self, before: LinkState) -> bool | None:
        """Whether a session has begun (True), or is over or could not begin (False), since
        ``before``; None: neither."""
        if self is before:
            return None
        if self is LinkState.OPEN:
            return True
        return None if before is LinkState.PAUSED else False


@dataclass(slots=True)
class LinkConnection:
    """An attempt to connect with one lighthouse, and the connection that follows.

    ``closes_at``: when `LinkState.OPENING` and `LinkState.LEAVING` are given up.
    """

    number: int
    address: str
    closes_at: float
    is_unary: bool = False  # no stream: each message is a call of its own
    opened_at: float = 0.0
    pause_s: float = 0.0  # so long after it is open a newcomer asks (F8)
    interval_s: float = 0.0
    beat_at: float = math.inf
    beat_sent_at: float = 0.0
    asked_at: float = -math.inf
    look_at: float = math.inf
    probing: tuple[str, ...] = ()
    probing_since: float = 0.0
    looked_at: float = -math.inf  # when the last look at all earlier lighthouses began
    has_rivals: bool | None = None  # lighthouses that would take the job, too; None: not known

    def beat_after(self, wait_s: float, now: float, config: LinkConfig) -> None:
        self.beat_at = beat_together(now, wait_s, self.interval_s, config.wall_offset_s)


@dataclass(slots=True)
class LinkQuestion:
    ask: GroupRequest
    deadline: float
    timeout_s: float  # when it was asked last
    retries_left: int
    gives_up_at: float = 0.0  # unless it is with a lighthouse by then
    number: int = 0  # under which it is with the lighthouse (0: it is not)
    member: Member | None = None
    sent_at: float = 0.0
    held: Quorum | None = None  # until it is known that the others are not elsewhere
    expires_at: float = math.inf
    again_at: float = -math.inf
    distrust: Unauthorized | None = None  # what to tell at ``again_at``

    def settles_at(self, connection: LinkConnection) -> float:
        """When a newcomer asks it, if the job may be at another lighthouse."""
        return connection.opened_at + min(NEWCOMER_PAUSE_S, self.timeout_s * NEWCOMER_SHARE)

    def begins_at(self, connection: LinkConnection) -> float:
        """When a newcomer asks it at the earliest."""
        return connection.opened_at + min(connection.pause_s, self.timeout_s * NEWCOMER_SHARE)

    def looks_at(self, connection: LinkConnection, now: float) -> list[float]:
        """When it may be time to ask it."""
        return [at for at in (self.begins_at(connection), self.settles_at(connection)) if at > now]


@dataclass(slots=True)
class Incarnation:
    replica_id: str
    backoff: Backoff
    why_not: TorchFTError  # it is not connected
    retry_at: float = math.inf  # it has not been started
    was_open: bool = False
    failing_since: float | None = None
    logged_at: float = 0.0
    pause_s: float = 0.0  # for the next connection

    def failed(self, error: TorchFTError, *, everywhere: bool) -> None:
        """A lighthouse could not be reached, does not lead, or was lost; ``everywhere``: so it is
        with all of the list."""
        if everywhere:
            self.pause_s = RETURN_S
            self.backoff.tried(failed=True)
        elif not isinstance(error, NotLeader):
            self.pause_s = max(self.pause_s, GO_ON_S)

    def opened(self) -> float:
        """It is connected; returns how long a newcomer lets others come first."""
        self.backoff.tried(failed=False)
        pause_s = max(self.pause_s, RETURN_S if self.was_open else 0.0)
        self.was_open, self.failing_since, self.pause_s = True, None, 0.0
        return pause_s


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a session with ``address``, which begins with ``hello``.

    The messages among the orders that follow go over this connection; the answer to a question
    comes as `LinkMachine.answered`.
    """

    connection: int
    address: str
    hello: Hello


@dataclass(frozen=True, slots=True)
class SendBeat:
    """Send a `Beat` with what the group does. Where a beat is a call, it has `BEAT_TIMEOUT_S`."""


@dataclass(frozen=True, slots=True)
class Close:
    """Ignore what still comes over the connection."""

    connection: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the lighthouses at ``addresses``, all at once, whether they would take this group.

    `LinkMachine.probed` receives those that would, within ``timeout_s``.
    """

    connection: int
    addresses: tuple[str, ...]
    timeout_s: float = LOOK_BACK_S


@dataclass(frozen=True, slots=True)
class AnswerAsker:
    """The outcome of the question of ``round``."""

    round: int
    outcome: Quorum | TorchFTError


@dataclass(frozen=True, slots=True)
class ConfirmLeft:
    """The group has left, as far as a lighthouse could be told."""


@dataclass(frozen=True, slots=True)
class Log:
    level: Literal["info", "warning"]
    text: str


Message = Question | Withdrawal | SendBeat | Leave
# `TermEnds`: tell it to the workers.
Order = Connect | Message | Close | Probe | AnswerAsker | ConfirmLeft | TermEnds | Log
