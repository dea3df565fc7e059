"""The orders that an agent's decisions give, for its shell to carry out in their order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torchft_svc.core.launch.world import (
    AgentLeave,
    AgentState,
    WorkerState,
    World,
    WorldChangeEvent,
)


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Open a store that no world uses; `AgentMachine.store_opened` hears of its port.

    The stores before have to stay open: workers of earlier worlds may still use them.
    """


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the lighthouse ``state``, now and with every beat."""

    state: AgentState


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start all local workers with the environment of ``world``; none runs.

    ``is_expected``: that world may come to be another one. The first event in their channel is
    PAUSED then, otherwise HEALTHY. `AgentMachine.workers_ready` hears when each of them has called
    the runtime's API, `AgentMachine.workers_reached` that they are in a world.
    """

    world: World
    is_expected: bool
    num_restarts: int


@dataclass(frozen=True, slots=True)
class ReplaceWorkers:
    """Start the workers with these local ranks anew, as in `StartWorkers` with ``is_expected``."""

    local_ranks: tuple[int, ...]
    world: World
    num_restarts: int


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """End all local workers within the grace time; `AgentMachine.workers_stopped` hears of it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Tell the local workers about ``world``; ``change`` is None for their first event."""

    state: WorkerState
    world: World
    change: WorldChangeEvent | None


@dataclass(frozen=True, slots=True)
class TellLeave:
    """Tell the lighthouse that this agent ends, as its last message."""

    leave: AgentLeave


class Outcome(Enum):
    """How an agent ends."""

    SUCCEEDED = "succeeded"
    WORKERS_FAILED = "its workers failed"
    RENDEZVOUS_FAILED = "there was no world in time"
    RUN_CLOSED = "the run was closed"
    DRAINED = "an operator wants it to end"
    STOPPED = "it was told to end"


@dataclass(frozen=True, slots=True)
class End:
    """The last order: no worker runs any more."""

    outcome: Outcome
    reason: str


Order = OpenStore | Tell | StartWorkers | ReplaceWorkers | StopWorkers | Broadcast | TellLeave | End
Orders = tuple[Order, ...]
