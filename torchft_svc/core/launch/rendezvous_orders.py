"""The orders that the decisions about launched runs give, and what people are told of runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torchft_svc.core.launch.world import AgentStatus, World, WorldNews
from torchft_svc.core.streams import EndStream, ReportStandstill


@dataclass(frozen=True, slots=True)
class SendNews:
    """The same ``news`` to the agents on each of ``streams``."""

    streams: tuple[int, ...]
    news: WorldNews


class Cause(Enum):
    """Why a run gets another world."""

    START = "the nodes have come together"
    LOSS = "a node was lost"
    JOIN = "nodes have joined"


@dataclass(frozen=True, slots=True)
class ReportWorld:
    """``run`` has another world. ``joined`` and ``lost``: node ids, beside the world before."""

    run: str
    world: World
    cause: Cause
    joined: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportNode:
    """A node of ``run`` is gone, or its workers have left the world: because of ``reason``."""

    run: str
    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportRunPaused:
    """The world of ``run`` is broken, and the next one has to wait, for ``reason``."""

    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportRunClosed:
    """``run`` is over, for ``reason``."""

    run: str
    reason: str
    failed: bool


@dataclass(frozen=True, slots=True)
class ReportRunMoved:
    """``run`` goes on at another lighthouse, at ``address``."""

    run: str
    address: str


Report = (
    ReportWorld | ReportNode | ReportRunPaused | ReportRunClosed | ReportRunMoved | ReportStandstill
)
Order = SendNews | EndStream | Report
Orders = tuple[Order, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node as people see it; ``node_rank`` is None outside of the present world."""

    node_id: str
    host: str
    node_rank: int | None
    num_workers: int
    status: AgentStatus
    reached: bool
    num_restarts: int
    silent_s: float
    waits_for_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run as people see it; ``why`` says what it waits for (empty: for nothing)."""

    run: str
    round: int
    min_nodes: int
    max_nodes: int
    phase: str
    why: str
    nodes: tuple[NodeStatus, ...]
