"""The worlds of a launched run: which nodes work together, with which ranks, from a round on.

Plain values that agents and the lighthouse exchange: `agent` and `launched_run` decide about them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property

from torchft_svc.core.limits import (
    MAX_ADDRESS_LENGTH,
    MAX_INT64,
    MAX_REASON_LENGTH,
    check_name,
    check_text,
)
from torchft_svc.errors import RequestRefused

MAX_NODES = 10_000
MAX_WORKERS_PER_NODE = 1024
_MAX_PORT = 65535
# How long failures count by default, and how many may be allowed at most.
FAILURE_WINDOW_S = 600.0
MAX_FAILURES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as its agent describes it; ``node_id`` is new at every start of an agent.

    ``host``: where the workers of other nodes reach its stores. ``num_workers``: of this node
    (torchrun's ``--nproc-per-node``). ``rank``: the node rank given by hand (None: any).
    """

    node_id: str
    host: str
    num_workers: int
    role: str = "default"
    rank: int | None = None

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        check_name("node_id", self.node_id)
        check_text("host", self.host, MAX_ADDRESS_LENGTH)
        check_text("role", self.role, MAX_ADDRESS_LENGTH)
        if not self.host:
            raise RequestRefused(f"node {self.node_id!r} names no host")
        if not 1 <= self.num_workers <= MAX_WORKERS_PER_NODE:
            raise RequestRefused(
                f"node {self.node_id!r} has {self.num_workers} workers, "
                f"must have 1 to {MAX_WORKERS_PER_NODE}"
            )
        if self.rank is not None and not 0 <= self.rank < MAX_NODES:
            raise RequestRefused(f"node rank {self.rank} is not in 0 to {MAX_NODES - 1}")

    @property
    def is_loopback(self) -> bool:
        """Whether only its own machine reaches it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def check_round(round_: int) -> None:
    """Refuse a round that no lighthouse began (0: none)."""
    if not 0 <= round_ < 2**53:
        raise RequestRefused(f"round {round_} is not in 0 to {2**53 - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """The ranks of a node's workers: worker ``i`` has ``first_rank + i``."""

    node_rank: int
    num_nodes: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int


@dataclass(frozen=True)
class World:
    """``nodes`` by node rank. ``master_port``: a store on the first one, used by no other world."""

    round: int
    nodes: tuple[Node, ...]
    master_port: int

    @property
    def master_addr(self) -> str:
        return self.nodes[0].host

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        check_round(self.round)
        if not 1 <= len(self.nodes) <= MAX_NODES:
            raise RequestRefused(f"a world has {len(self.nodes)} nodes, must have 1 to {MAX_NODES}")
        if not 1 <= self.master_port <= _MAX_PORT:
            raise RequestRefused(f"port {self.master_port} is not in 1 to {_MAX_PORT}")
        for node in self.nodes:
            node.check()
        if len(set(self.node_ids)) < len(self.nodes):
            raise RequestRefused("a world has one node twice")

    @cached_property
    def node_ids(self) -> tuple[str, ...]:
        return tuple(node.node_id for node in self.nodes)

    @property
    def world_size(self) -> int:
        return sum(node.num_workers for node in self.nodes)

    def ranks(self, node_id: str) -> LocalRanks:
        """The ranks of a node's workers, in the order of node ranks, all roles together."""
        node_rank = self.node_ids.index(node_id)
        node, before = self.nodes[node_rank], self.nodes[:node_rank]
        return LocalRanks(
            node_rank=node_rank,
            num_nodes=len(self.nodes),
            first_rank=sum(each.num_workers for each in before),
            world_size=self.world_size,
            first_role_rank=sum(each.num_workers for each in before if each.role == node.role),
            role_world_size=sum(each.num_workers for each in self.nodes if each.role == node.role),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run, which are the same for all of its agents.

    ``join_timeout_s``: how long fewer than ``min_nodes`` are waited for, and how long a node waits
    for a free place. ``join_window_s``: those that come within this time of the first one join
    together. ``max_run_failures``, ``max_node_failures``: with more failures within
    ``failure_window_s`` the run is closed, or that node excluded (None: never).
    ``waits_for_lost``: the run ends when all nodes have finished, also those that are lost.
    ``is_soft``: workers that live receive their next world; else all are restarted.
    """

    min_nodes: int
    max_nodes: int
    join_timeout_s: float = 600.0
    join_window_s: float = 0.5
    max_run_failures: int | None = None
    max_node_failures: int | None = None
    failure_window_s: float = FAILURE_WINDOW_S
    waits_for_lost: bool = False
    is_soft: bool = False

    def beside(self, others: RunSettings) -> str:
        """The settings that differ from ``others``, in words."""
        names = (field.name for field in fields(self))
        return ", ".join(
            f"{name}={getattr(self, name)}"
            for name in names
            if getattr(self, name) != getattr(others, name)
        )

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        if not 1 <= self.min_nodes <= self.max_nodes <= MAX_NODES:
            raise RequestRefused(
                f"{self.min_nodes}:{self.max_nodes} nodes: 1 <= min <= max <= {MAX_NODES} is needed"
            )
        for field in ("join_timeout_s", "join_window_s", "failure_window_s"):
            if not 0 <= getattr(self, field) <= 1e7:
                raise RequestRefused(f"{field} is {getattr(self, field)}, must be 0 to 1e7 seconds")
        if not self.failure_window_s:
            raise RequestRefused("failure_window_s is 0, must be more")
        for field in ("max_run_failures", "max_node_failures"):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= MAX_FAILURES:
                raise RequestRefused(f"{field} is {value}, must be 0 to {MAX_FAILURES}")


class AgentStatus(Enum):
    """What an agent's workers do."""

    JOINING = "joining"  # not started: it needs a world first
    WARMING = "warming"  # being started, for a place that the lighthouse keeps
    READY = "ready"  # started, and waiting for their first world
    WORKING = "working"  # in a world
    FINISHED = "finished"  # all have ended well


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """The state of an agent, sent again and again: the newest replaces the one before.

    ``round``: of the newest world that the agent has received (0: none yet), also if its workers
    are not in it: a node of world 5 that reports another status than `WORKING` with round 4 has not
    received that world yet, with round 5 it has left it. ``reached``: all its workers have reported
    that they are there; of `READY`, that these workers were in a world before. ``store_port``: of a
    store that no world uses (0: none yet). ``can_warm_up``: its workers may be started before they
    have a world. ``num_failures``: how often its workers have failed. ``trained_since``,
    ``trained_until``: rounds of the first and the last world that all its nodes have reached, with
    the workers that this node has now (0: none). ``paused``: of `WORKING`, that its workers wait
    for another world, because the lighthouse has reported theirs as broken.
    """

    status: AgentStatus
    round: int = 0
    reached: bool = False
    store_port: int = 0
    can_warm_up: bool = False
    num_restarts: int = 0
    num_failures: int = 0
    trained_since: int = 0
    trained_until: int = 0
    paused: bool = False

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        for round_ in (self.round, self.trained_since, self.trained_until):
            check_round(round_)
        for field in ("num_restarts", "num_failures"):
            if not 0 <= getattr(self, field) <= MAX_INT64:
                raise RequestRefused(f"{field} is {getattr(self, field)}, must be 0 or more")
        if not 0 <= self.store_port <= _MAX_PORT:
            raise RequestRefused(f"port {self.store_port} is not in 0 to {_MAX_PORT}")


# -- from an agent ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentHello:
    """The first message of a stream.

    ``world``: the newest that the agent has received, for a new lighthouse; None: it is in none.
    """

    node: Node
    settings: RunSettings
    state: AgentState
    world: World | None = None


@dataclass(frozen=True, slots=True)
class AgentLeave:
    """The last message. ``failed``: its workers have. ``closes``: the run is over for all.

    ``final``: a restart would not help.
    """

    reason: str = ""
    failed: bool = False
    closes: bool = False
    final: bool = False

    def check(self) -> None:
        """Raise `RequestRefused` if the reason is too long, or cannot be printed."""
        check_text("reason", self.reason, MAX_REASON_LENGTH)


@dataclass(frozen=True, slots=True)
class RunMove:
    """All agents of the run go back to the lighthouse at ``address``, as it stands in their list.

    The agent that has found it sends this, and its lighthouse sends it to all of them.
    """

    address: str

    def check(self) -> None:
        """Raise `RequestRefused` if the address is too long, or cannot be printed."""
        check_text("address", self.address, MAX_ADDRESS_LENGTH)


AgentMessage = AgentState | AgentLeave | RunMove


# -- from the lighthouse, besides a `World` and a `RunMove` ----------------------------------------


@dataclass(frozen=True, slots=True)
class AgentWelcome:
    """The first news: how often the agent should send its state at the least."""

    beat_interval_s: float


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A place is kept: start the workers, then be `READY`. ``expected``: a world as it may be."""

    expected: World


@dataclass(frozen=True, slots=True)
class WorldReached:
    """All nodes have reached the world of this round: each has the run's state from now on."""

    round: int

    def check(self) -> None:
        """Raise `RequestRefused` if no lighthouse began that round."""
        check_round(self.round)


@dataclass(frozen=True, slots=True)
class WorldPaused:
    """The present world is broken, and the next one has to wait, for ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunWaiting:
    """No world has this node yet, for ``reason`` (for people).

    ``num_failures``: how often its workers have failed, as far as the lighthouse knows.
    """

    reason: str
    num_failures: int = 0


@dataclass(frozen=True, slots=True)
class RunClosed:
    """The run is over: all workers end. ``drained``: for this node, as an operator wants it.

    ``within_s``: how long the workers of a drained node may take (None: as long as usual).
    ``final``: a restart would not help.
    """

    reason: str
    failed: bool
    drained: bool = False
    within_s: float | None = None
    final: bool = False


WorldNews = (
    AgentWelcome | World | WorldReached | WarmUp | WorldPaused | RunWaiting | RunClosed | RunMove
)
