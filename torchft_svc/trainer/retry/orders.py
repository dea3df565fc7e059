"""The values of a trainer's decisions: its rules, and the orders for its shell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from torchft_svc.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """How a trainer deals with its workers.

    Args:
        num_workers: how many are wanted.
        min_workers: how many are enough to train.
        keeps_others: a lost worker is replaced while the others train (``per-step``); otherwise all
            workers are started anew (``restart``).
        heartbeat_timeout_s: a worker that is silent for so long is lost.
        start_timeout_s: the longest that a worker may take to start, and then to join the others.
        offer_timeout_s: how long workers of a broken world are waited for until they offer a state.
        settle_s: how long the others of them are waited for after the first offer.
        kill_timeout_s: a killed worker whose end is not noticed for so long is left alone.
        first_pause_s, max_pause_s: between two looks for resources; it doubles.
        resources_timeout_s: to wait for resources for so long costs a retry.
        grow_every_s: how often to look whether missing workers could be started.
    """

    num_workers: int
    min_workers: int = 1
    keeps_others: bool = False
    heartbeat_timeout_s: float = 5.0
    start_timeout_s: float = 120.0
    offer_timeout_s: float = 20.0
    settle_s: float = 0.3
    kill_timeout_s: float = 15.0
    first_pause_s: float = 0.5
    max_pause_s: float = 60.0
    resources_timeout_s: float = 600.0
    grow_every_s: float = 5.0

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError("num_workers", self.num_workers, "use 1 or more")
        if not 1 <= self.min_workers <= self.num_workers:
            reason = f"use 1 to num_workers={self.num_workers}"
            raise ConfigError("min_workers", self.min_workers, reason)
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name.endswith("_s") and not (math.isfinite(value) and value > 0):
                raise ConfigError(name, value, "use a finite number of seconds above 0")


class StateSource(Enum):
    """Where workers of a new world begin."""

    START = "the start"
    HELD = "the state that the trainer holds"
    CHECKPOINT = "a checkpoint"
    PEER = "the state of a worker that lived"
    GIVEN = "the state that was loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownState:
    """A state to begin with: ``handle`` is the shell's, ``checkpoint`` a path, or neither.

    Args:
        epoch, num_samples: how far it is at this step: a pass ends without another step.
    """

    source: StateSource
    step: int = 0
    epoch: int = 0
    num_samples: int = 0
    handle: object = None
    checkpoint: str = ""

    @property
    def place(self) -> tuple[int, int, int]:
        """What is further on is larger."""
        return self.step, self.epoch, self.num_samples


class Remedy(Enum):
    """What is done about an incident, the cheapest first."""

    REPLACE = "per-step"
    GROW = "growth"
    RESTART = "restart"


class IncidentCause(Enum):
    """Why there is an incident; a later one of this list explains those before it."""

    GROWTH = "workers are added"
    COLLECTIVE = "a collective failed"
    PROGRAM = "the program raised an error"
    SILENT = "a worker was silent"
    LOST = "a worker was lost"
    NO_RESOURCES = "there were no resources"

    @property
    def weight(self) -> int:
        return list(IncidentCause).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramError:
    """The user's program raised an error in a worker, or a collective failed (``is_peers``).

    Two errors are the same if ``kind`` and ``step`` are. ``payload`` is the shell's.

    Args:
        is_final: it would come again at once.
        refuses_state: the state that the worker was to begin with could not be read or loaded.
    """

    kind: str
    message: str
    step: int
    is_peers: bool
    is_final: bool = False
    refuses_state: bool = False
    payload: object = None


# -- orders --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookForResources:
    """Call `RetryMachine.found` with how many more workers could be started now."""


@dataclass(frozen=True, slots=True)
class RequestWorkers:
    """Tell whoever can add resources that so many more workers are wanted; 0: no more."""

    num: int


@dataclass(frozen=True, slots=True)
class FindCheckpoint:
    """Call `RetryMachine.checkpoint_found` with the newest good checkpoint of this run."""


@dataclass(frozen=True, slots=True)
class RejectState:
    """No worker can begin with ``state``: never offer it as a checkpoint again."""

    state: KnownState
    reason: str


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker with this number, which no other one has had."""

    worker: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LetJoin:
    """Let a worker join ``world``; an empty ``address``: it opens the store.

    ``begin``: with this state; None: it gets the state of the others.
    """

    worker: int
    world: int
    rank: int
    world_size: int
    address: str
    begin: KnownState | None


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Send the command that is carried out to a worker."""

    worker: int


@dataclass(frozen=True, slots=True)
class LetAbandon:
    """Let a worker end its step at once, offer its state, and end."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class LetEnd:
    """Let a worker end in good order."""

    worker: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End a worker at once."""

    worker: int


@dataclass(frozen=True, slots=True)
class DropHandle:
    """The state of this handle is not needed any more."""

    handle: object


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportBroken:
    """Training is interrupted (``remedy`` RESTART, GROW), or goes on without a worker (REPLACE).

    ``rank``: of the worker that was lost or failed; None: of none. ``explains``: this is a better
    reason for the incident than those that were told before.
    """

    remedy: Remedy
    cause: IncidentCause
    reason: str
    rank: int | None
    explains: bool = False


@dataclass(frozen=True, slots=True)
class ReportFormed:
    """All ``num_workers`` have joined, and go on from ``state``; ``is_first``: nothing broke.

    ``why_not_peer``: why it is not that of a worker that was left (empty: it is, or none was).
    """

    state: KnownState
    step: int
    num_workers: int
    is_first: bool
    why_not_peer: str = ""


@dataclass(frozen=True, slots=True)
class ReportNoResources:
    """There are resources for ``num`` workers, ``needed`` are; look again after ``pause_s``."""

    num: int
    needed: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class ReportLeftAlone:
    """The end of this worker, which was killed, cannot be noticed."""

    worker: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCommand:
    """The command is over; ``reason`` is empty if it was carried out.

    ``error``: of the program, if that is what ended it; ``is_repeated``: it came twice at one step.
    """

    reason: str = ""
    error: ProgramError | None = None
    is_repeated: bool = False


RetryOrder = (
    LookForResources
    | RequestWorkers
    | FindCheckpoint
    | RejectState
    | StartWorker
    | LetJoin
    | SendCommand
    | LetAbandon
    | LetEnd
    | KillWorker
    | DropHandle
    | ReportBroken
    | ReportFormed
    | ReportNoResources
    | ReportLeftAlone
    | EndCommand
)
