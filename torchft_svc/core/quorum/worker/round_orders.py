"""What a worker's round orders its shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.quorum.term import Fate
from torchft_svc.errors import TorchFTError


@dataclass(frozen=True, slots=True)
class AskManager:
    """After ``pause_s`` send `Round.question` to the manager, and wait until ``deadline``; then
    `Round.answered`, or `Round.unanswered`."""

    pause_s: float
    deadline: float


@dataclass(frozen=True, slots=True)
class EnterQuorum:
    """The quorum has other members, or other connections, than the one before, see
    `Peers.change`. Tell the manager that this worker waits for others; then call
    `Round.entered`."""


@dataclass(frozen=True, slots=True)
class MeetMembers:
    """Connect with the members of the quorum, ``anew`` or, if not, check that the connections
    still exist; then call `Round.met`."""

    anew: bool


@dataclass(frozen=True, slots=True)
class LeaveMembers:
    """Close the connections at once, because of ``reason``, so that others do not wait."""

    reason: Exception


@dataclass(frozen=True, slots=True)
class ExpectNoState:
    """No state comes: what was prepared for a heal is not needed."""


@dataclass(frozen=True, slots=True)
class BeginTraining:
    """The members are known, and connected if possible; the program may continue."""


@dataclass(frozen=True, slots=True)
class OfferState:
    """Serve the state to replica ranks that heal from here, or take a part of it from here.

    ``at_once``: as it was when the step began; otherwise what the step changes follows at its end.
    """

    receivers: tuple[int, ...]
    extras: tuple[int, ...]
    at_once: bool


@dataclass(frozen=True, slots=True)
class RefuseState:
    """The groups that would heal from here must not wait, because of ``reason``."""

    receivers: tuple[int, ...]
    reason: Exception


@dataclass(frozen=True, slots=True)
class FetchState:
    """Get the state that the quorum assigns; then `Round.fetched`."""


@dataclass(frozen=True, slots=True)
class Warn:
    what: str


@dataclass(frozen=True, slots=True)
class AskDecision:
    """After ``pause_s`` send `Round.ballot` to the manager, and wait until ``deadline``; then
    `Round.voted`, or `Round.vote_failed`."""

    pause_s: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Decide:
    """The group's decision, and how its next step begins; with ``error``, there is no decision,
    which counts as no."""

    committed: bool
    error: TorchFTError | None = None
    fate: Fate = Fate.BREAKS_OFF


@dataclass(frozen=True, slots=True)
class LoseDecision:
    """There is, or may be, a decision that did not arrive: this worker cannot continue."""

    error: TorchFTError


Order = (
    AskManager
    | EnterQuorum
    | MeetMembers
    | LeaveMembers
    | ExpectNoState
    | BeginTraining
    | OfferState
    | RefuseState
    | FetchState
    | Warn
    | AskDecision
    | Decide
    | LoseDecision
)
