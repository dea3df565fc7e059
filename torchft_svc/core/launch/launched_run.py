"""One launched run: which nodes make its next world, and when (rules L1 to L14, L34 to L36).

The table in docs/design/launcher.md has a row for each state and input. Inputs carry ``at``, an
instant of the lighthouse's clock; each returns the orders for the service, in the order in which
they are executed. The sections: outputs, inputs, questions, what agents report, decisions, the
places of nodes, the pace of worlds, ranks and stores; below the class, failures and the order of
ranks.

A node is in one of these places:

* *member*: a node of the present world whose workers have not left it;
* *missing*: a member whose stream has ended a moment ago: it may come back;
* *awaited*: a member that has had no stream at this lighthouse yet: it may come, too;
* *outside*: every other node with a stream, with or without one of the run's places.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchft_svc.core.launch.world import (
    MAX_FAILURES,
    AgentHello,
    AgentLeave,
    AgentState,
    AgentStatus,
    Node,
    RunClosed,
    RunMove,
    RunSettings,
    RunWaiting,
    WarmUp,
    World,
    WorldNews,
    WorldPaused,
    WorldReached,
)
from torchft_svc.core.streams import EndStream, ReportStandstill
from torchft_svc.errors import DeadlineExceeded, RequestRefused, Unreachable

# Agents try again after up to half a second, and may ask another lighthouse of their list first.
MIN_TAKEOVER_S = 2.0
# What agents report leaves room for more worlds than a run makes.
MAX_REPORTED_ROUND = 2**52
# How many heartbeat timeouts a new lighthouse takes newer worlds over: it may receive the hello of
# a node that begins before that of a node in a world.
ADOPTION_TIMEOUTS = 2
# How long losses are collected: what breaks at one moment is noticed within this time.
SETTLE_S = 0.05
# The least time from one world to the next, if losses in quick succession lead to both: after the
# first of such worlds, after the second, and after any later one.
SPACING_S = (0.1, 0.4, 1.0)
# How long after a loss another one counts as following it. Joins wait for that long, too.
CALM_S = 1.0
# Where no member is left, nodes whose workers are being started are waited for (L1): at most for
# this part of the time that the other nodes wait.
WARMING_SHARE = 0.5
# An agent that has just come has no store yet.
MIN_JOIN_TIMEOUT_S = 1.0
# How many nodes that are gone are remembered, for each one that a run may have: they may come back,
# and their ports were used.
MAX_KNOWN_PER_NODE = 4

_MORE = "more nodes may join"
_OUTSIDE = "it is in no world yet"


# -- outputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendNews:
    """Send the same ``news`` to the agents on each of ``streams``."""

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
    """A run as people see it; ``why`` names what it waits for (empty: for nothing)."""

    run: str
    round: int
    min_nodes: int
    max_nodes: int
    phase: str
    why: str
    nodes: tuple[NodeStatus, ...]


# -- the machine -----------------------------------------------------------------------------------


class LaunchedRun:
    """Decides about one run.

    Args:
        name: of the run.
        settings: those of its first agent.
        heartbeat_timeout_s: how long an agent may be silent.
        max_nodes: how many agents may be connected.
        begins_at: when the first world may be made (L13).
    """

    def __init__(
        self,
        name: str,
        settings: RunSettings,
        heartbeat_timeout_s: float,
        max_nodes: int,
        begins_at: float,
    ) -> None:
        self.name = name
        self.settings = settings
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._max_agents = max_nodes
        self.world: World | None = None
        self.closed: RunClosed | None = None
        #: When its last agent went away; None: there are agents, or there were none yet.
        self.empty_since: float | None = None
        self._highest_round = 0
        #: Node id of the first agent whose workers have finished; empty: of none.
        self._finished_by = ""
        self._finished: set[str] = set()
        #: Until when a newer world of an earlier lighthouse replaces the present one.
        self._adopts_until = begins_at + ADOPTION_TIMEOUTS * heartbeat_timeout_s
        #: Whether it has moved to another lighthouse.
        self._is_elsewhere = False
        #: What the next world waits for, for people.
        self._why = ""
        #: When time alone changes something.
        self._due_at = math.inf

        # The places of nodes.
        #: By node id; the one that was silent for the longest time is the first.
        self.agents: dict[str, ConnectedAgent] = {}
        #: Members of the present world, also if missing or awaited.
        self.members: set[str] = set()
        self._missing: set[str] = set()
        self._awaited: set[str] = set()
        self._awaited_until = math.inf
        #: Members that have not reached the present world.
        self._unreached: set[str] = set()
        #: Agents outside, in the order of arrival.
        self._outside: dict[str, None] = {}
        #: Nodes that were lost since the present world was made.
        self._lost: list[str] = []
        #: Whether a node was lost, or its workers have left: another world is needed.
        self._is_broken = False
        #: All nodes that ever had a stream, as far as there is room.
        self._known: dict[str, None] = {}
        self._trained: dict[str, _Trained] = {}
        self._reached: dict[str, _Reached] = {}
        self._used_ports: dict[str, int] = {}
        self._failures = FailureCounts(settings, max_nodes)

        # The pace of worlds.
        self._begins_at = begins_at
        self._published_at = -math.inf
        #: Since when there are enough nodes for a first world.
        self._enough_since: float | None = None
        #: Since when too few members are left.
        self._paused_since: float | None = None
        #: When losses lead to another world; infinity: there are none.
        self._replaces_at = math.inf
        #: The earliest time at which the next loss may do so.
        self._next_replaces_at = -math.inf
        #: When a loss is the first one again, and joins need not wait any more.
        self._calm_at = -math.inf
        self._num_in_succession = 0
        #: No world is made before that.
        self._held_until = -math.inf

    # -- inputs ----------------------------------------------------------------------------------

    def opened(self, stream: int, hello: AgentHello, at: float) -> list[Order]:
        """Accept an agent's new stream.

        Raises:
            RequestRefused: the agent cannot take part.
        """
        self._check_hello(hello, at)
        self._check_round(hello.state.round if hello.world is None else hello.world.round)
        self.empty_since = None
        orders: list[Order] = []
        node_id = hello.node.node_id
        is_new = node_id not in self._known
        agent = self.agents.get(node_id)
        if agent is not None:
            newer = Unreachable("agent", node_id, "it has opened another stream")
            orders.append(EndStream(agent.stream, newer))
            agent.node, agent.stream, agent.seen_at, agent.news = hello.node, stream, at, None
        else:
            agent = ConnectedAgent(hello.node, stream, hello.state, at)
        self._connect(agent, hello)
        if self.closed is not None:
            return [*orders, SendNews((stream,), self.closed)]
        orders += self.adopt_world(hello, is_new, at)
        if node_id in self.members and self.is_of_another_lighthouse(hello):
            self._lose(node_id, at)
            orders.append(ReportNode(self.name, node_id, "another lighthouse has begun its world"))
        self._missing.discard(node_id)
        self._awaited.discard(node_id)
        orders += self._accept_state(agent, hello.state, at)
        if node_id in self._outside:
            orders += agent.send_waiting(_OUTSIDE)
        world = self.world
        if world is not None and node_id in self.members:
            if hello.state.round < world.round:
                orders.append(SendNews((stream,), world))
            elif hello.state.trained_until < world.round and self._is_reached():
                orders.append(SendNews((stream,), WorldReached(world.round)))
        return orders + self._decide(at)

    def state_received(self, node_id: str, state: AgentState, at: float) -> list[Order]:
        """Accept an agent's state, which may be the one before once more.

        Raises:
            RequestRefused: no lighthouse can have begun that round.
        """
        self._check_round(state.round)
        agent = self.agents.pop(node_id)
        self.agents[node_id] = agent
        agent.seen_at = at
        if state == agent.state or self.closed is not None:
            return []
        return self._accept_state(agent, state, at) + self._decide(at)

    def left(self, node_id: str, leave: AgentLeave, at: float) -> list[Order]:
        """Remove an agent that has left, in good order."""
        agent = self.agents[node_id]
        reason = leave.reason or "it has left"
        if leave.failed:
            self._failures.record_failures(agent.node, at)
        if self.closed is not None:
            self._disconnect(node_id, at)
            return [EndStream(agent.stream)]
        orders = self._part_with(agent, reason, at)
        if leave.closes:
            return orders + self._close(
                f"node {node_id!r}: {reason}", leave.failed, at, leave.final
            )
        return orders + self._decide(at)

    def stream_ended(self, node_id: str, reason: str, at: float) -> list[Order]:
        """Remove an agent whose stream has ended, or that was silent; a member is missing then."""
        self._disconnect(node_id, at)
        if self.closed is not None:
            return []
        orders: list[Order] = [ReportNode(self.name, node_id, reason)]
        if node_id in self.members:
            self._missing.add(node_id)
            self.schedule_replacement(at)
        return orders + self._decide(at)

    def moved(self, move: RunMove, at: float) -> list[Order]:
        """Send all agents to an earlier lighthouse, which one of them has found (L21).

        Agents that do not receive that, and come back, go on in their world (L13).
        """
        if self.closed is not None:
            return []
        streams = self._streams()
        self.agents.clear()
        self._outside.clear()
        self._missing.clear()
        self._awaited = set(self.members)
        until = at + max(self._heartbeat_timeout_s, MIN_TAKEOVER_S)
        self._awaited_until = self._adopts_until = self._begins_at = until
        self._cancel_replacement()  # but a world that is broken remains so
        self._finished_by = ""
        self._finished.clear()
        self.empty_since, self._due_at, self._is_elsewhere = at, until, True
        self._why = f"its agents have gone to lighthouse {move.address}"
        ends = map(EndStream, streams)
        return [SendNews(streams, move), *ends, ReportRunMoved(self.name, move.address)]

    def stood_still(self, settle_s: float, at: float) -> None:
        """Wait for agents that may come back from another lighthouse (L13).

        For ``settle_s`` no run begins anew.
        """
        self._adopts_until = max(self._adopts_until, at + self._heartbeat_timeout_s)
        self._begins_at = max(self._begins_at, at + settle_s)
        until = at + MIN_TAKEOVER_S
        self._held_until = until
        self._next_replaces_at = max(self._next_replaces_at, until)
        self._calm_at = max(self._calm_at, until)
        if self._has_losses():
            self._replaces_at = max(self._replaces_at, until)

    def drain(self, node: str, reason: str, within_s: float | None, at: float) -> list[Order]:
        """Dismiss the node with this id, or all nodes of this host, ``within_s`` seconds (L36).

        Raises:
            RequestRefused: there is none.
        """
        agents = [each for key, each in self.agents.items() if node in (key, each.node.host)]
        if self.closed is not None or not agents:
            raise RequestRefused(f"run {self.name!r} has no node {node!r}")
        news = RunClosed(reason, failed=False, drained=True, within_s=within_s)
        orders = [order for each in agents for order in self._dismiss(each, news, at)]
        return orders + self._decide(at)

    def tick(self, at: float) -> list[Order]:
        """Act on the time that has passed."""
        orders: list[Order] = []
        while self.agents:
            node_id, agent = next(iter(self.agents.items()))
            if agent.seen_at + self._heartbeat_timeout_s > at:
                break
            error = DeadlineExceeded("a sign of life", self._heartbeat_timeout_s)
            orders.append(EndStream(agent.stream, error))
            orders += self.stream_ended(node_id, str(error), at)
        return orders + (self._decide(at) if at >= self._due_at else [])

    # -- questions -------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """The time to `tick`; may be too early, never too late."""
        if not self.agents:
            return self._due_at
        silent = next(iter(self.agents.values()))
        return min(self._due_at, silent.seen_at + self._heartbeat_timeout_s)

    def knows(self, node_id: str) -> bool:
        """Whether this node has, or had, a stream to this run."""
        return node_id in self._known

    def has_agents(self) -> bool:
        return bool(self.agents)

    def is_over(self) -> bool:
        """Whether all that is left of it is that it was closed."""
        return not (self.agents or self._missing or self._awaited)

    def status(self, at: float) -> RunStatus:
        """What people want to know: its nodes by rank, and then those outside."""
        ids = () if self.world is None else self.world.node_ids
        ranks = {key: rank for rank, key in enumerate(ids) if key in self.members}
        keys = sorted(self.agents, key=lambda key: ranks.get(key, len(ids)))
        return RunStatus(
            run=self.name,
            round=self._round(),
            min_nodes=self.settings.min_nodes,
            max_nodes=self.settings.max_nodes,
            phase=self._phase(),
            why=self.closed.reason if self.closed is not None else self._why,
            nodes=tuple(self._node_status(key, ranks.get(key), at) for key in keys),
        )

    def _node_status(self, key: str, rank: int | None, at: float) -> NodeStatus:
        agent = self.agents[key]
        return NodeStatus(
            node_id=key,
            host=agent.node.host,
            node_rank=rank,
            num_workers=agent.node.num_workers,
            status=agent.state.status,
            reached=key in self.members and key not in self._unreached,
            num_restarts=agent.state.num_restarts,
            silent_s=at - agent.seen_at,
            waits_for_s=None if agent.waits_since is None else at - agent.waits_since,
        )

    def _phase(self) -> str:
        if self.closed is not None:
            return "closed"
        if self._finished_by:
            return "finishing"
        if not self.members:
            return "forming"
        return "running" if self._paused_since is None else "paused"

    def _round(self) -> int:
        """Round of the present world (0: there is none)."""
        return 0 if self.world is None else self.world.round

    # -- what agents report ----------------------------------------------------------------------

    def _check_hello(self, hello: AgentHello, at: float) -> None:
        node, settings = hello.node, hello.settings
        has_others = bool(self.agents.keys() - {node.node_id})
        if not has_others and self.closed is None and settings != self.settings:
            self.settings = settings
            self._failures = FailureCounts(settings, self._max_agents)
        if self.closed is None and (excluded := self._failures.why_excluded(node, at)):
            raise RequestRefused(excluded)
        if has_others:
            self._check_fits(hello)

    def _check_fits(self, hello: AgentHello) -> None:
        """Refuse a node that the connected ones cannot work with (L5, L14)."""
        node = hello.node
        others = [each.node for key, each in self.agents.items() if key != node.node_id]
        if len(others) >= self._max_agents:
            raise RequestRefused(f"run {self.name!r} has {len(others)} nodes, no more are allowed")
        if hello.settings != self.settings:
            raise RequestRefused(
                f"node {node.node_id!r} starts run {self.name!r} with "
                f"{hello.settings.beside(self.settings)}, but {others[0].node_id!r} has started "
                f"it with {self.settings.beside(hello.settings)}"
            )
        if others[0].is_loopback != node.is_loopback:  # as all others are
            raise RequestRefused(
                f"nodes {others[0].node_id!r} and {node.node_id!r} of run {self.name!r} cannot "
                f"reach each other at {others[0].host} and {node.host}: start both with the "
                "lighthouse's name or address that other hosts use (--rdzv-endpoint), or name "
                "theirs (--local-addr)"
            )
        for other in others if node.rank is not None else ():
            if other.rank == node.rank:
                raise RequestRefused(
                    f"nodes {other.node_id!r} and {node.node_id!r} of run {self.name!r} "
                    f"were both given node rank {node.rank}"
                )

    def _check_round(self, reported: int) -> None:
        if reported > max(self._highest_round, MAX_REPORTED_ROUND):
            raise RequestRefused(f"round {reported} leaves no room for the next worlds")

    def is_of_another_lighthouse(self, hello: AgentHello) -> bool:
        """Whether its world has the round of the present one, and is another one (L8)."""
        mine, theirs = self.world, hello.world
        if mine is None or theirs is None:
            return False
        return theirs.round == mine.round and theirs != mine

    def adopt_world(self, hello: AgentHello, is_new: bool, at: float) -> list[Order]:
        """Take a world over from an earlier lighthouse, and wait for its nodes (L13).

        If no member is left here, that lighthouse knows better: the run has moved there, and may
        come back in the same world, or has begun anew there with an agent that ``is_new`` here, or
        was not in the last world of this one.
        """
        world, state = hello.world, hello.state
        self._highest_round = max(self._highest_round, state.round)
        if world is None:
            return []
        self._highest_round = max(self._highest_round, world.round)
        mine = self._round()
        if not self.members and (is_new or self._is_elsewhere):
            was_in = self.world is not None and hello.node.node_id in self.world.node_ids
            mine = 0 if is_new or not was_in else mine - 1
        if world.round <= mine or (self.members and at >= self._adopts_until):
            return []
        self._adopts_until = at + self._heartbeat_timeout_s
        self._enter(world, at)
        self._awaited_until = self.awaits_members_until(at)
        self._lost.clear()
        self._cancel_replacement()
        others = self._streams_of_members(besides=hello.node.node_id)
        orders: list[Order] = [SendNews(others, world)] if others else []
        there = [self.agents[key] for key in sorted(self.members & self.agents.keys())]
        for each in there:
            if not each.may_be_in(world):
                self._lose(each.node.node_id, at)
                orders += self._move_outside(each, at)
        return orders

    def awaits_members_until(self, at: float) -> float:
        """How long members of a world that was taken over are waited for (L13)."""
        return at + max(self._heartbeat_timeout_s, MIN_TAKEOVER_S)

    def _accept_state(self, agent: ConnectedAgent, state: AgentState, at: float) -> list[Order]:
        """Record an agent's state, and where that puts its node."""
        node_id, before = agent.node.node_id, agent.state
        agent.state = state
        self._highest_round = max(self._highest_round, state.round)
        if state.status is AgentStatus.FINISHED:
            self._finished_by = self._finished_by or node_id
            if self.world is not None and node_id in self.world.node_ids:
                self._finished.add(node_id)
        num_failures = state.num_failures - before.num_failures
        if num_failures > 0:
            self._failures.record_failures(agent.node, at, num_failures)
        world = self.world
        if world is not None and node_id in self.members:
            if agent.may_be_in(world):
                return self._accept_state_of_member(agent, world, at)
            self._lose(node_id, at)  # and keeps its place
            left = ReportNode(self.name, node_id, f"its workers are {state.status.value}")
            return [left, *self._move_outside(agent, at)]
        if node_id not in self._outside:
            return self._move_outside(agent, at)
        if state.status is not before.status:
            agent.waits_since = at
        if state.status is AgentStatus.WARMING:
            agent.waits_since = None
        return agent.send_waiting(_OUTSIDE) if num_failures > 0 else []

    def _accept_state_of_member(
        self, agent: ConnectedAgent, world: World, at: float
    ) -> list[Order]:
        """Record where a member's workers are; the last one that reaches the world completes it."""
        node_id, state = agent.node.node_id, agent.state
        if state.paused and state.round == world.round and not self._is_broken:
            self._is_broken = True  # at a lighthouse before this one
            self.schedule_replacement(at)
        agent.has_place, agent.waits_since = True, None
        if not (agent.is_working and state.round == world.round and state.reached):
            self._unreached.add(node_id)
            return []
        if node_id not in self._unreached:
            return []
        self._unreached.discard(node_id)
        if self._first_reached(node_id) is None:
            self._record_reached(node_id, world.round, state)
        if not self._is_reached():
            return []
        for key in sorted(self.members & self.agents.keys()):
            self._record_trained(key)
        return [SendNews(self._streams_of_members(), WorldReached(world.round))]

    # -- decisions -------------------------------------------------------------------------------

    def _decide(self, at: float) -> list[Order]:
        """Make the next world, end the run, or dismiss nodes, if that is due."""
        if self.closed is not None:
            self._due_at = math.inf
            return []
        self._act_on_losses(at)
        orders = self._apply_failure_limits(at)
        if self.closed is None:
            orders += self._advance_run(at)
        if self.closed is None and (dismissed := self.dismiss_late_nodes(at)):
            orders += dismissed + self._advance_run(at)
        if self.closed is None and not self._finished_by:
            orders += self._inform_outsiders()
        self._due_at = math.inf if self.closed is not None else self._next_due(at)
        return orders

    def _act_on_losses(self, at: float) -> None:
        nodes = () if self.world is None else self.world.nodes
        if self._awaited and at >= self._awaited_until:
            for node in nodes:
                if node.node_id in self._awaited:
                    self._lose(node.node_id, at)
            self._replaces_at = at
        if not self._awaited:
            self._awaited_until = math.inf
        if not self.members or not (self._missing or self._is_broken):
            self._cancel_replacement()
        if at >= self._replaces_at:
            for node in nodes:
                if node.node_id in self._missing:
                    self._lose(node.node_id, at)
                    self._failures.record_failures(node, at)
            self._space_replacements(at)

    def _apply_failure_limits(self, at: float) -> list[Order]:
        """End the run (L34), or exclude nodes that have failed too often (L35)."""
        failed = self._failures.pop_new()
        if not failed or self._finished_by:
            return []
        if over := self._failures.why_over(at):
            return self._close(f"{over}; {failed[-1]!r} was the last one", True, at)
        orders: list[Order] = []
        for node_id in failed:
            agent = self.agents.get(node_id)
            if agent is not None and (excluded := self._failures.why_excluded(agent.node, at)):
                orders += self._dismiss(agent, RunClosed(excluded, failed=True), at)
        return orders

    def _advance_run(self, at: float) -> list[Order]:
        """Make the next world, or finish the run."""
        if self._finished_by:
            return self._finish(at)
        self.assign_places(self.settings.max_nodes)
        return self._next_world(at)

    def _finish(self, at: float) -> list[Order]:
        """Close the run when all nodes of the last world have finished (L11)."""
        self._why = f"node {self._finished_by!r} has finished, the others are waited for"
        waited_for = self.members
        if self.settings.waits_for_lost and self.world is not None:
            waited_for = set(self.world.node_ids)
        if waited_for <= self._finished:
            return self._close("all nodes have finished", False, at)
        waiting = f"node {self._finished_by!r} has finished, no node can join any more"
        return [order for each in self._outsiders() for order in each.send_waiting(waiting)]

    def _next_world(self, at: float) -> list[Order]:
        """Make the next world if it is due; else `_why` names what it waits for."""
        self._why = ""
        joiners = self._joiners()
        if self._awaited or self._has_losses() or at < self._held_until:
            self._why = "nodes that are missing may come back"
            return []
        if not self.members:
            return self._make_first_world(joiners, at)
        self._enough_since = None
        if self.needs_replacement():
            return self._replace_world(joiners, at)
        if joiners and at >= self.joins_at(joiners):
            return self.publish_world(Cause.JOIN, joiners, at)
        if joiners:
            is_late = self.has_unreached_members()
            self._why = "not all nodes have reached the present world" if is_late else _MORE
        return []

    def _make_first_world(self, joiners: list[ConnectedAgent], at: float) -> list[Order]:
        """Make a world of the nodes that have come together, as no member is left (L1)."""
        self._paused_since = None
        if len(joiners) < self.settings.min_nodes:
            self._enough_since = None
            self._why = f"fewer than {self.settings.min_nodes} nodes are there"
            return []
        if self._enough_since is None:
            self._enough_since = at
        if at < self._first_world_at(joiners):
            self._why = _MORE
            return []
        return self.publish_world(Cause.START, joiners, at)

    def needs_replacement(self) -> bool:
        """Whether the present world is broken (L2)."""
        return self._is_broken

    def _replace_world(self, joiners: list[ConnectedAgent], at: float) -> list[Order]:
        """Make a world without the lost nodes (L2), if enough are left (L9)."""
        if self.enough_are_left(joiners):
            return self.publish_world(Cause.LOSS, joiners, at)
        few = f"fewer than {self.settings.min_nodes} nodes are left"
        if at >= self._pauses_until(at):
            return self._close(f"{few}, and no others came in time", True, at)
        return self._pause(few)

    def enough_are_left(self, joiners: list[ConnectedAgent]) -> bool:
        """Whether members and ``joiners`` are enough for a world (L9)."""
        return len(self.members) + len(joiners) >= self.settings.min_nodes

    def _pause(self, reason: str) -> list[Order]:
        """Send the pause to those members that it was not sent to yet."""
        self._why = reason
        news = WorldPaused(reason)
        members = [self.agents[node_id] for node_id in sorted(self.members)]
        uninformed = [agent for agent in members if agent.news != news]
        for agent in uninformed:
            agent.news = news
        if not uninformed:
            return []
        streams = tuple(agent.stream for agent in uninformed)
        return [SendNews(streams, news), ReportRunPaused(self.name, reason)]

    def publish_world(self, cause: Cause, joiners: list[ConnectedAgent], at: float) -> list[Order]:
        """Make the next world of the members and ``joiners``, if its rank 0 has a store (L7)."""
        nodes = self._order_by_rank(joiners)
        first = nodes[0].node_id
        port = self.agents[first].state.store_port
        if not port or not self.is_unused_store(first, port):
            reason = f"node {first!r} has no store for the next world yet"
            if self._is_broken:
                return self._pause(reason)
            self._why = reason
            return []
        self._highest_round += 1
        before = () if self.world is None else self.world.node_ids
        world = World(self._highest_round, nodes, port)
        self._enter(world, at)
        lost, self._lost = tuple(self._lost), []
        self._why = ""
        streams = tuple(self.agents[node.node_id].stream for node in nodes)
        joined = tuple(each for each in world.node_ids if each not in before)
        return [
            SendNews(streams, world),
            ReportWorld(self.name, world, cause, joined, lost),
        ]

    def dismiss_late_nodes(self, at: float) -> list[Order]:
        """Dismiss nodes outside that have waited for too long (L10)."""
        orders: list[Order] = []
        for agent in self._outsiders():
            if self._gives_up_at(agent) > at:
                continue
            error = DeadlineExceeded(f"joining run {self.name!r}", self._join_timeout_s, self._why)
            orders += self._dismiss(agent, RunClosed(str(error), failed=True), at)
        return orders

    def _inform_outsiders(self) -> list[Order]:
        """Order nodes outside to start their workers (L4), or send them what they wait for."""
        orders: list[Order] = []
        for agent in self._outsiders():
            status = agent.state.status
            if not agent.has_place:
                orders += agent.send_waiting(f"all {self.settings.max_nodes} places are taken")
            elif status is AgentStatus.JOINING and agent.state.can_warm_up and self.members:
                if not isinstance(agent.news, WarmUp):
                    orders += agent.send_news(WarmUp(self._expected_world(agent)))
            elif status is not AgentStatus.WARMING:
                orders += agent.send_waiting(self._why or "it joins soon")
        return orders

    def _expected_world(self, joiner: ConnectedAgent) -> World:
        """The next world as it may be, with ``joiner``."""
        assert self.world is not None
        others = [each for each in self._joiners() if each is not joiner]
        nodes = self._order_by_rank([*others, joiner])
        first = self.agents[nodes[0].node_id]
        port = first.state.store_port or self.world.master_port
        return World(self._highest_round + 1, nodes, port)

    def _dismiss(self, agent: ConnectedAgent, news: RunClosed, at: float) -> list[Order]:
        """Order a node to end; the others go on without it."""
        return [SendNews((agent.stream,), news), *self._part_with(agent, news.reason, at)]

    def _part_with(self, agent: ConnectedAgent, reason: str, at: float) -> list[Order]:
        node_id = agent.node.node_id
        self._disconnect(node_id, at)
        if node_id in self.members:
            self._lose(node_id, at)
        return [EndStream(agent.stream), ReportNode(self.name, node_id, reason)]

    def _close(self, reason: str, failed: bool, at: float, final: bool = False) -> list[Order]:
        self.closed = RunClosed(reason, failed, final=final)
        streams = self._streams()
        orders: list[Order] = [SendNews(streams, self.closed)] if streams else []
        self._missing.clear()
        self._awaited.clear()
        if not self.agents:
            self.empty_since = at
        return [*orders, ReportRunClosed(self.name, reason, failed)]

    # -- the places of nodes ---------------------------------------------------------------------

    def _connect(self, agent: ConnectedAgent, hello: AgentHello) -> None:
        """Record that ``agent`` has a stream."""
        node_id, state = agent.node.node_id, hello.state
        self.agents.pop(node_id, None)
        self.agents[node_id] = agent
        is_elsewhere = node_id not in self._known or state.round != self._round()
        if state.reached and (is_elsewhere or self.is_of_another_lighthouse(hello)):
            self._record_reached(node_id, 0, state)
        _put_last(self._known, node_id, None, MAX_KNOWN_PER_NODE * self._max_agents)

    def _disconnect(self, node_id: str, at: float) -> None:
        """Record that an agent has no stream any more."""
        del self.agents[node_id]
        self._outside.pop(node_id, None)
        if not self.agents:
            self.empty_since = at

    def _enter(self, world: World, at: float) -> None:
        """Make the nodes of ``world`` the members."""
        self.world, self._is_elsewhere, self._is_broken = world, False, False
        self.members = set(world.node_ids)
        self._unreached = set(world.node_ids)
        self._awaited = self.members - self.agents.keys()
        self._missing.clear()
        self._outside = {
            key: None for key in [*self._outside, *self.agents] if key not in self.members
        }
        for key in self.members - self._awaited:
            agent = self.agents[key]
            agent.has_place, agent.waits_since, agent.news = True, None, None
        first, most = world.nodes[0].node_id, MAX_KNOWN_PER_NODE * self._max_agents
        _put_last(self._used_ports, first, world.master_port, most)
        self._published_at = at
        self._enough_since = self._paused_since = None

    def _move_outside(self, agent: ConnectedAgent, at: float) -> list[Order]:
        """Put a node outside, with its place if it has one.

        Its agent is notified before the next world is sent (L17).
        """
        self._outside[agent.node.node_id] = None
        agent.news = None
        agent.waits_since = None if agent.state.status is AgentStatus.WARMING else at
        return agent.send_waiting(_OUTSIDE)

    def _lose(self, node_id: str, at: float) -> None:
        """Remove a member for good."""
        for each in (self.members, self._missing, self._awaited, self._unreached):
            each.discard(node_id)
        self._lost.append(node_id)
        self._is_broken = True
        self.schedule_replacement(at)

    def assign_places(self, num_places: int) -> None:
        """Give the places to the nodes outside that came first, as long as there are any (L9).

        A world that is taken over may leave too few of them: then they are withdrawn, from nodes
        without workers first.
        """
        placed = [agent for agent in self._outsiders() if agent.has_place]
        num_free = num_places - len(self.members) - len(placed)
        placed.sort(key=lambda agent: agent.state.status is AgentStatus.JOINING)  # it is stable
        for agent in placed[len(placed) + min(num_free, 0) :]:
            agent.has_place, agent.news = False, None
        for agent in self._outsiders():
            if num_free <= 0:
                break
            if not agent.has_place:
                agent.has_place = True
                num_free -= 1

    def _outsiders(self) -> list[ConnectedAgent]:
        """Nodes outside, in the order of their arrival."""
        return [self.agents[key] for key in self._outside]

    def _joiners(self) -> list[ConnectedAgent]:
        """Nodes outside that can be in a world at once."""
        return [each for each in self._outsiders() if each.has_place and self._can_join(each)]

    def _can_join(self, agent: ConnectedAgent) -> bool:
        if agent.state.status is AgentStatus.JOINING:
            return not (self.members and agent.state.can_warm_up)
        return agent.state.status in (AgentStatus.READY, AgentStatus.WORKING)

    def _is_warming(self) -> bool:
        """Whether a node that has a place starts its workers."""
        return any(
            agent.has_place and agent.state.status is AgentStatus.WARMING
            for agent in self._outsiders()
        )

    def _is_reached(self) -> bool:
        """Whether all nodes of the present world have reported that they have reached it."""
        if self.world is None or self._unreached:
            return False
        return len(self.members) == len(self.world.nodes)

    def has_unreached_members(self) -> bool:
        """Whether a member has not reached the present world: joins wait for that (L3)."""
        return bool(self._unreached)

    def _streams(self) -> tuple[int, ...]:
        return tuple(agent.stream for agent in self.agents.values())

    def _streams_of_members(self, besides: str = "") -> tuple[int, ...]:
        """Streams of the members that are connected."""
        there = self.members & self.agents.keys() - {besides}
        return tuple(self.agents[key].stream for key in sorted(there))

    # -- the pace of worlds ----------------------------------------------------------------------

    def schedule_replacement(self, at: float) -> None:
        """Plan the next world, as something is lost, perhaps for a moment only (L2)."""
        if not self._has_losses():
            self._replaces_at = max(at + SETTLE_S, self._next_replaces_at)

    def _has_losses(self) -> bool:
        return self._replaces_at < math.inf

    def _cancel_replacement(self) -> None:
        """Plan no world: all have come back, or no member is left to wait for another one."""
        self._replaces_at = math.inf

    def _space_replacements(self, at: float) -> None:
        """Delay what the next losses lead to, as some have led to a world or to a wait for nodes.

        A storm of losses makes few worlds (L2).
        """
        if at >= self._calm_at:
            self._num_in_succession = 0
        spacing_s = SPACING_S[min(self._num_in_succession, len(SPACING_S) - 1)]
        self._num_in_succession += 1
        self._replaces_at = math.inf
        self._next_replaces_at, self._calm_at = at + spacing_s, at + CALM_S

    def _first_world_at(self, joiners: Sequence[ConnectedAgent]) -> float:
        """The time to make the first world of ``joiners`` (L1); infinity: they are not enough."""
        since = self._enough_since
        if since is None:
            return math.inf
        if len(joiners) == self.settings.max_nodes:
            return max(since, self._begins_at)
        is_idle = not any(each.is_working or each.state.reached for each in joiners)
        if is_idle and self._is_warming():
            at = since + WARMING_SHARE * self._join_timeout_s
        else:
            at = max(since + self.settings.join_window_s, self._begins_at)
        return min((at, *map(self._gives_up_at, joiners)))

    def joins_at(self, joiners: Sequence[ConnectedAgent]) -> float:
        """The time at which ``joiners`` join the members in a world (L3)."""
        if self.has_unreached_members():
            return self._published_at + self._join_timeout_s
        since = -math.inf
        if len(self.members) + len(joiners) < self.settings.max_nodes:  # more may come along
            waits = (each.waits_since for each in joiners if each.waits_since is not None)
            since = min(waits, default=-math.inf)
        at = max(since + self.settings.join_window_s, self._calm_at)
        return min((at, *map(self._gives_up_at, joiners)))

    def _pauses_until(self, at: float) -> float:
        """The time at which members that are too few have waited for long enough (L9)."""
        if self._paused_since is None:
            self._paused_since = at
        return self._paused_since + self._join_timeout_s

    def _gives_up_at(self, agent: ConnectedAgent) -> float:
        """The time to dismiss a node outside (L10), counted from when the run may begin."""
        if agent.waits_since is None:
            return math.inf
        return max(agent.waits_since, self._begins_at) + self._join_timeout_s

    @property
    def _join_timeout_s(self) -> float:
        return max(self.settings.join_timeout_s, MIN_JOIN_TIMEOUT_S)

    def _next_due(self, at: float) -> float:
        """The time at which time alone changes something."""
        dues = [self._replaces_at, self._held_until, self._awaited_until]
        if not self._finished_by:
            joiners = self._joiners()
            if not self.members:
                dues.append(self._first_world_at(joiners))
            elif joiners and not self._is_broken:
                dues.append(self.joins_at(joiners))
            if self._paused_since is not None:
                dues.append(self._pauses_until(at))
        dues += map(self._gives_up_at, self._outsiders())
        return min((due for due in dues if due > at), default=math.inf)

    # -- ranks and stores ------------------------------------------------------------------------

    def _order_by_rank(self, joiners: Iterable[ConnectedAgent]) -> tuple[Node, ...]:
        """The members and ``joiners`` by the rank that they get after the present world."""
        ids = () if self.world is None else self.world.node_ids
        last_ranks = {node_id: rank for rank, node_id in enumerate(ids)}
        survivors = [self.agents[key].node for key in self.members if key in self.agents]
        joining = [each.node for each in joiners]
        return order_nodes(survivors, joining, last_ranks, self.holders_of_state())

    def holders_of_state(self) -> set[str]:
        """Ids of the nodes that have the run's state, of which one gets rank 0 (L6)."""
        joiners = self._joiners()
        together = self.members | {each.node.node_id for each in joiners}
        trained = {key: self._rounds_trained(key) for key in together}
        newest = max((last for _, last in trained.values()), default=0)
        if newest:
            fresh = {key: first for key, (first, last) in trained.items() if last == newest}
            return {key for key, first in fresh.items() if first == min(fresh.values())}
        reached = {
            key: first for key in together if (first := self._first_reached(key)) is not None
        }
        if reached:
            return {key for key, first in reached.items() if first == min(reached.values())}
        working = {each.node.node_id for each in joiners if each.is_working}
        return working or set(self.members)

    def _record_reached(self, node_id: str, round_: int, state: AgentState) -> None:
        reached = _Reached(round_, state.num_restarts)
        _put_last(self._reached, node_id, reached, MAX_KNOWN_PER_NODE * self._max_agents)

    def _record_trained(self, node_id: str) -> None:
        first = self._rounds_trained(node_id)[0] or self._round()
        trained = _Trained(first, self._round(), self.agents[node_id].state.num_restarts)
        _put_last(self._trained, node_id, trained, MAX_KNOWN_PER_NODE * self._max_agents)

    def _rounds_trained(self, node_id: str) -> tuple[int, int]:
        """Rounds of the first and the last world that all nodes have reached with its workers."""
        agent, known = self.agents.get(node_id), self._trained.get(node_id)
        if agent is None:
            return 0, 0
        state = agent.state
        reported = state.trained_since, state.trained_until
        if known is None or known.num_restarts != state.num_restarts or known.last < reported[1]:
            return reported
        return known.first, known.last

    def _first_reached(self, node_id: str) -> int | None:
        """The round of the first world that its workers have reached, as far as is known."""
        agent, reached = self.agents.get(node_id), self._reached.get(node_id)
        if agent is None or reached is None or reached.num_restarts != agent.state.num_restarts:
            return None
        return reached.first

    def is_unused_store(self, node_id: str, port: int) -> bool:
        """Whether no world has used this store of a node (L7)."""
        return port != self._used_ports.get(node_id)


@dataclass(slots=True)
class ConnectedAgent:
    """A node whose agent has a stream."""

    node: Node
    stream: int
    state: AgentState
    seen_at: float
    has_place: bool = False
    waits_since: float | None = None  # for a world; None: it is in one, or starts its workers
    news: WorldNews | None = None  # the last that was about its waiting

    def send_news(self, news: WorldNews) -> list[Order]:
        """Send ``news`` about its waiting, unless it was sent last."""
        if self.news == news:
            return []
        self.news = news
        return [SendNews((self.stream,), news)]

    def send_waiting(self, reason: str) -> list[Order]:
        """Send that it is outside, why, and how many of its failures were counted."""
        return self.send_news(RunWaiting(reason, self.state.num_failures))

    @property
    def is_working(self) -> bool:
        return self.state.status in (AgentStatus.WORKING, AgentStatus.FINISHED)

    def may_be_in(self, world: World) -> bool:
        """Whether its workers are in ``world``, or it has not received that world yet."""
        is_in = self.is_working and self.state.round == world.round
        return is_in or self.state.round < world.round


@dataclass(frozen=True, slots=True)
class _Trained:
    """A node was in worlds that all their nodes had reached, from the first to the last round."""

    first: int
    last: int
    num_restarts: int  # of its workers by then


@dataclass(frozen=True, slots=True)
class _Reached:
    """A node has reached worlds, whether or not all their nodes had."""

    first: int  # round; 0: one of which this lighthouse does not know all
    num_restarts: int  # of its workers by then


# -- failures --------------------------------------------------------------------------------------

_Place = tuple[str, int | None]


class FailureCounts:
    """The times at which nodes of a run have failed, as far as its limits need that (L34, L35).

    A node is known by its host, and by the rank that was given to it by hand: its id is new at
    every start of its agent. Of too many nodes, the one that failed the longest ago is dropped.
    """

    def __init__(self, settings: RunSettings, max_nodes: int) -> None:
        self._settings = settings
        self._max_nodes = max_nodes
        self._of_run: deque[float] = deque(maxlen=(settings.max_run_failures or 0) + 1)
        self._of_nodes: dict[_Place, deque[float]] = {}
        self._new: dict[str, None] = {}

    def record_failures(self, node: Node, at: float, num_failures: int = 1) -> None:
        """Record that the node's workers have failed, or that it was lost."""
        self._new[node.node_id] = None
        instants = [at] * min(num_failures, MAX_FAILURES + 1)
        self._of_run.extend(instants)
        limit, place = self._settings.max_node_failures, _place(node)
        if limit is not None:
            known = self._of_nodes.get(place, deque(maxlen=limit + 1))
            known.extend(instants)
            _put_last(self._of_nodes, place, known, self._max_nodes)

    def pop_new(self) -> list[str]:
        """The ids of the nodes that have failed since the last call, the last one at the end."""
        failed, self._new = list(self._new), {}
        return failed

    def why_over(self, at: float) -> str:
        """Why the run has to end (L34); empty: it has not."""
        limit = self._settings.max_run_failures
        if limit is None or self._counts_for_s(self._of_run, limit, at) <= 0:
            return ""
        return f"its nodes have failed {self._shown(limit)}, --max-run-failures is {limit}"

    def why_excluded(self, node: Node, at: float) -> str:
        """Why this node cannot take part for a while (L35); empty: it can."""
        limit, of_node = self._settings.max_node_failures, self._of_nodes.get(_place(node))
        if limit is None or of_node is None:
            return ""
        for_s = self._counts_for_s(of_node, limit, at)
        if for_s <= 0:
            return ""
        return (
            f"node {node.node_id!r} on {node.host} is excluded for {for_s:.0f} s: it has failed "
            f"{self._shown(limit)}, --max-node-failures is {limit}"
        )

    def _shown(self, limit: int) -> str:
        times = "once" if limit == 0 else f"{limit + 1} times"
        return f"{times} within {self._settings.failure_window_s:g} s"

    def _counts_for_s(self, failures: deque[float], limit: int, at: float) -> float:
        """How long they will have been more than ``limit``; 0 or less: they are not."""
        if len(failures) <= limit:
            return 0.0
        return failures[0] + self._settings.failure_window_s - at


def _place(node: Node) -> _Place:
    return node.host, node.rank


# -- the order of ranks ----------------------------------------------------------------------------


def order_nodes(
    survivors: Sequence[Node],
    joiners: Sequence[Node],
    last_ranks: dict[str, int],
    holders_of_state: Container[str],
) -> tuple[Node, ...]:
    """Return all of them by node rank (L5, L6).

    ``last_ranks``: of the world before, by node id. A rank that was given by hand is kept, then the
    last one, as far as there are so many nodes; what is left is filled by survivors first. One of
    ``holders_of_state`` is rank 0, if one is there: the others get the state of rank 0.
    """
    places: list[Node | None] = [None] * (len(survivors) + len(joiners))
    survivors = sorted(survivors, key=lambda node: last_ranks.get(node.node_id, len(places)))
    rest = _assign_ranks(places, [*survivors, *joiners], lambda node: node.rank)
    rest = _assign_ranks(places, rest, lambda node: last_ranks.get(node.node_id))
    for node in rest:
        places[places.index(None)] = node
    nodes = [node for node in places if node is not None]
    ranks = [rank for rank, node in enumerate(nodes) if node.node_id in holders_of_state]
    if ranks:
        nodes[0], nodes[ranks[0]] = nodes[ranks[0]], nodes[0]
    return tuple(nodes)


def _assign_ranks(
    places: list[Node | None], nodes: Iterable[Node], wish: Callable[[Node], int | None]
) -> list[Node]:
    """Give each node the rank that it wishes, if that is free; return those without one."""
    rest = []
    for node in nodes:
        rank = wish(node)
        if rank is not None and rank < len(places) and places[rank] is None:
            places[rank] = node
        else:
            rest.append(node)
    return rest


def _put_last(entries: dict[Any, Any], key: object, value: object, most: int) -> None:
    """Set ``key`` as the newest entry, and drop the oldest ones above ``most``."""
    entries.pop(key, None)
    entries[key] = value
    while len(entries) > most:
        del entries[next(iter(entries))]
