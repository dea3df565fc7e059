"""The messages of a session between a group's manager and the lighthouse, as plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torchft_svc.core.limits import MAX_REASON_LENGTH, check_text
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.tally import GroupEvent, Tally
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import DifferenceReport, LastQuorum, Member
from torchft_svc.errors import TorchFTError

# -- from the manager ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message: which group it is, and the ``last`` quorum that it was in, of
    ``num_groups`` (0: none, or not known).

    ``is_spare``: it is a prepared spare, which is in no quorum before a place is free (rule G1).
    """

    replica_id: str
    last: LastQuorum
    num_groups: int = 0
    is_spare: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life; the group has been in ``phase`` for ``lasts_s`` (None: not known).

    ``differences`` and ``events``: those that were reported since the last one. ``tally``: what
    group rank 0 has spent its time on (None: not known). ``received_bytes``, ``state_bytes``: see
    `Activity`.
    """

    phase: Phase | None = None
    step: int = 0
    lasts_s: float = 0.0
    differences: tuple[DifferenceReport, ...] = ()
    tally: Tally | None = None
    events: tuple[GroupEvent, ...] = ()
    received_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """Ask for a quorum with ``member`` within ``timeout_s``; it withdraws the question before.

    ``agreed``: the other members of its last quorum know that they have to ask now, too.
    """

    number: int
    member: Member
    timeout_s: float
    agreed: bool = False


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Withdraw question ``number``: nobody waits for its answer any more."""

    number: int


class Departure(enum.Enum):
    """Why a group leaves."""

    OTHER = "it has ended, was lost, or goes elsewhere"
    DRAINED = "it was drained"
    KILLED = "it was killed by request"


@dataclass(frozen=True, slots=True)
class Leave:
    """A group leaves; its last message.

    ``between_steps``: its last step is finished, so that no other group has to discard one.
    ``ends``: its program ends on purpose.
    """

    reason: str = ""
    between_steps: bool = False
    ends: bool = False
    departure: Departure = Departure.OTHER

    @property
    def is_orderly(self) -> bool:
        return self.between_steps or self.ends

    def check(self) -> None:
        """Raise `RequestRefused` if the reason is too long, or cannot be printed."""
        check_text("reason", self.reason, MAX_REASON_LENGTH)


SessionMessage = Beat | Question | Withdrawal | Leave


# -- from the lighthouse, besides the quorum -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first news, and sent again when it changes: the shortest time between the group's
    heartbeats. ``knows_prepared_spares``: see `Hello.is_spare`."""

    min_interval_s: float
    knows_prepared_spares: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """Question ``number`` has failed."""

    number: int
    error: TorchFTError


@dataclass(frozen=True, slots=True)
class Lost:
    """A member of quorum ``quorum_id`` is gone; it may come back in a later one."""

    replica_id: str
    reason: str
    quorum_id: int


@dataclass(frozen=True, slots=True)
class NewcomerWaits:
    """A group that is not in the last quorum asks for one."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class NoQuorumYet:
    """Why the open question has no answer yet."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the group's processes at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish the step, leave, and end; ``within_s`` seconds later, the processes are killed."""

    reason: str
    within_s: float | None = None  # not known


LighthouseNews = Lost | NewcomerWaits | TermEnds | Kill | Drain  # also for workers
News = Welcome | Refusal | NoQuorumYet | LighthouseNews
