"""The orders that the lighthouse's rules give, for its shell to carry out."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Quorum
from torchft_svc.errors import TorchFTError


@dataclass(frozen=True, slots=True)
class AnswerQuorum:
    """Send ``quorum`` to ``callers``, one for each member, in member order.

    ``lost_from``: the committed step of the job if it goes back with this quorum, else None;
    ``begins_anew``: that step belongs to a run that had finished.
    """

    job: str
    callers: tuple[int, ...]
    quorum: Quorum
    lost_from: int | None = None
    begins_anew: bool = False


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    caller: int
    error: TorchFTError


@dataclass(frozen=True, slots=True)
class ReportLoss:
    """``replica_id`` is no longer alive, because of ``reason``.

    ``between_steps``: it had finished its step, so its peers lose nothing. ``is_orderly``: it left
    on purpose. ``quorum_id``: the job's last quorum (0: none yet); the group may be in a later one
    again. ``recipients``: its peers in that quorum that are informed, and the group itself: if it
    was frozen and moves again, what it does is in vain.
    """

    job: str
    replica_id: str
    reason: str
    between_steps: bool = False
    is_orderly: bool = False
    quorum_id: int = field(default=0, compare=False)
    recipients: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class ReportHang:
    """``replica_id`` has stayed in ``phase`` of ``step`` for ``for_s`` seconds; reported once.

    ``kill``: its processes are to be ended.
    """

    job: str
    replica_id: str
    phase: Phase
    step: int
    for_s: float
    kill: bool


@dataclass(frozen=True, slots=True)
class ReportEviction:
    """``replica_id`` lives, but hangs: quorum ``quorum_id`` continues without it. ``recipients``
    are informed, the group itself among them."""

    job: str
    replica_id: str
    reason: str
    quorum_id: int = field(default=0, compare=False)
    recipients: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class ReportStraggler:
    """``replica_id`` lives, but has not asked in time: the next quorum is formed without it.

    ``quorum_id``: of its quorum, in which it may wait for others. ``recipients``: itself.
    """

    job: str
    replica_id: str
    quorum_id: int
    recipients: tuple[str, ...]
    reason: str = "it did not ask for the next quorum in time"


@dataclass(frozen=True, slots=True)
class ReportLeftHealing:
    """``replica_id`` was left out after it has healed for ``for_s`` seconds; reported once."""

    job: str
    replica_id: str
    for_s: float


@dataclass(frozen=True, slots=True)
class ReportWaiting:
    """``replica_id`` asks, and is not in the last quorum; reported once in the quorum's life."""

    job: str
    replica_id: str


@dataclass(frozen=True, slots=True)
class ReportTermEnds:
    """``recipients`` are members of a quorum whose steps ask nobody, and are told ``news``."""

    job: str
    news: TermEnds
    recipients: tuple[str, ...]


Order = (
    AnswerQuorum
    | RefuseRequest
    | ReportLoss
    | ReportHang
    | ReportEviction
    | ReportStraggler
    | ReportLeftHealing
    | ReportWaiting
    | ReportTermEnds
)
