"""The orders that the rules of sessions give, for a shell to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.quorum.lighthouse.lighthouse_orders import (
    AnswerQuorum,
    ReportEviction,
    ReportHang,
    ReportLeftHealing,
    ReportLoss,
    ReportStraggler,
)
from torchft_svc.core.quorum.session_messages import Drain, Kill, News
from torchft_svc.core.streams import EndStream, ReportStandstill
from torchft_svc.errors import TorchFTError


@dataclass(frozen=True, slots=True)
class Send:
    """The same ``news`` to each of ``streams``."""

    streams: tuple[int, ...]
    news: News


@dataclass(frozen=True, slots=True)
class Publish:
    """Send the quorum of ``decided`` to all that asked for it.

    ``answers``: streams, each with the number of its question. ``calls``: unary ones.
    """

    decided: AnswerQuorum
    answers: tuple[tuple[int, int], ...] = ()
    calls: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RefuseCall:
    """A unary call has failed."""

    call: int
    error: TorchFTError


@dataclass(frozen=True, slots=True)
class ReportPause:
    """Groups of ``job`` have waited for ``for_s`` seconds; reported again when ``why`` changes."""

    job: str
    for_s: float
    why: str


@dataclass(frozen=True, slots=True)
class ReportCommand:
    """An operator's ``command`` has reached ``replica_id``."""

    job: str
    replica_id: str
    command: Kill | Drain


@dataclass(frozen=True, slots=True)
class ReportAcceptedLoss:
    """An operator lets ``job`` go back from ``committed_step``."""

    job: str
    committed_step: int


Report = (
    ReportLoss
    | ReportHang
    | ReportEviction
    | ReportStraggler
    | ReportLeftHealing
    | ReportPause
    | ReportStandstill
    | ReportCommand
    | ReportAcceptedLoss
)
Order = Send | Publish | RefuseCall | EndStream | Report
Orders = tuple[Order, ...]
