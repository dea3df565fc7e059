"""The nodes of a launched run: where each of them is, and which one has a place.

A node is in one of these places:

* *in the world*: a node of the present one, whose workers have not left it: a member;
* *missing*: a member of which nothing is known for a moment: it may come back;
* *awaited*: the same, since a lighthouse before this one;
* *outside*: with or without one of the run's seats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchft_svc.core.launch.node_ranks import order_nodes
from torchft_svc.core.launch.rendezvous_orders import NodeStatus, Order, SendNews
from torchft_svc.core.launch.world import (
    AgentHello,
    AgentState,
    AgentStatus,
    Node,
    RunSettings,
    RunWaiting,
    WarmUp,
    World,
    WorldNews,
)
from torchft_svc.errors import RequestRefused

# A node that is gone and comes back is known, and so is the port of its store that a world used.
MAX_KNOWN_PER_NODE = 4


@dataclass(slots=True)
class Agent:
    """A node whose agent has a stream."""

    node: Node
    stream: int
    state: AgentState
    heard_at: float
    has_seat: bool = False
    waits_since: float | None = None  # for a world; None: it is in one, or starts its workers
    news: WorldNews | None = None  # the last that was about its waiting

    def tell(self, news: WorldNews) -> list[Order]:
        """About its waiting, unless that is what it was told last."""
        if self.news == news:
            return []
        self.news = news
        return [SendNews((self.stream,), news)]

    def tell_waiting(self, reason: str) -> list[Order]:
        """That it is outside, and with which state."""
        return self.tell(RunWaiting(reason, self.state.num_failures))

    @property
    def is_working(self) -> bool:
        return self.state.status in (AgentStatus.WORKING, AgentStatus.FINISHED)

    def may_be_in(self, world: World) -> bool:
        """Its workers work in ``world``, or it has told its state before it heard of it."""
        return (self.is_working and self.state.round == world.round) or (
            self.state.round < world.round
        )


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


class RunNodes:
    """All nodes of a run, by their ids."""

    def __init__(self, max_agents: int) -> None:
        self._max_agents = max_agents
        self.agents: dict[str, Agent] = {}  # the one that was silent the longest first
        self.members: set[str] = set()  # of the present world, also if missing or awaited
        self.missing: set[str] = set()
        self.awaited: set[str] = set()
        self.unreached: set[str] = set()  # members that have not reached the present world
        self.outside: dict[str, None] = {}  # agents, in the order of arrival
        self._round = self._num_nodes = 0  # of the present world
        self._trained: dict[str, _Trained] = {}
        self._reached: dict[str, _Reached] = {}
        self._used_ports: dict[str, int] = {}
        self._known: dict[str, None] = {}  # all that were here

    @property
    def streams(self) -> tuple[int, ...]:
        return tuple(agent.stream for agent in self.agents.values())

    def tell_members(self, news: WorldNews) -> list[Order]:
        """Tell it those members that were told something else last."""
        members = [self.agents[node_id] for node_id in sorted(self.members)]
        untold = [agent for agent in members if agent.news != news]
        for agent in untold:
            agent.news = news
        return [SendNews(tuple(agent.stream for agent in untold), news)] if untold else []

    def outsiders(self) -> list[Agent]:
        """In the order of their arrival."""
        return [self.agents[key] for key in self.outside]

    def members_that_left(self, world: World) -> list[Agent]:
        """Those that are here, but not in ``world`` any more."""
        there = [self.agents[key] for key in sorted(self.members & self.agents.keys())]
        return [each for each in there if not each.may_be_in(world)]

    def enter(self, world: World) -> None:
        """Its nodes are the members now."""
        self._round, self._num_nodes = world.round, len(world.nodes)
        self.members = set(world.node_ids)
        self.unreached = set(world.node_ids)
        self.awaited = self.members - self.agents.keys()
        self.missing.clear()
        self.outside = {
            key: None for key in [*self.outside, *self.agents] if key not in self.members
        }
        for key in self.members - self.awaited:
            agent = self.agents[key]
            agent.has_seat, agent.waits_since, agent.news = True, None, None
        self.use_port(world.nodes[0].node_id, world.master_port)

    def streams_of_members(self, besides: str = "") -> tuple[int, ...]:
        """Of all that are there."""
        there = self.members & self.agents.keys() - {besides}
        return tuple(self.agents[key].stream for key in sorted(there))

    def take_state_of_member(self, agent: Agent) -> bool:
        """It has told where its workers are; whether all have reached the present world, now."""
        node_id, state = agent.node.node_id, agent.state
        agent.has_seat, agent.waits_since = True, None
        if not (agent.is_working and state.round == self._round and state.reached):
            self.unreached.add(node_id)
            return False
        if node_id not in self.unreached:
            return False
        self.unreached.discard(node_id)
        if self._first_reached(node_id) is None:
            self._note_reached(node_id, self._round, state)
        if not self.is_reached():
            return False
        for key in self.members & self.agents.keys():
            self._train(key)
        return True

    def is_reached(self) -> bool:
        """Whether all nodes of the present world have reached it, as far as was heard."""
        return not self.unreached and 0 < len(self.members) == self._num_nodes

    def _note_reached(self, node_id: str, round_: int, state: AgentState) -> None:
        self._reached.pop(node_id, None)
        self._reached[node_id] = _Reached(round_, state.num_restarts)
        _trim(self._reached, MAX_KNOWN_PER_NODE * self._max_agents)

    def _train(self, node_id: str) -> None:
        first = self._rounds_trained(node_id)[0] or self._round
        num_restarts = self.agents[node_id].state.num_restarts
        self._trained.pop(node_id, None)
        self._trained[node_id] = _Trained(first, self._round, num_restarts)
        _trim(self._trained, MAX_KNOWN_PER_NODE * self._max_agents)

    def connect(self, agent: Agent, told: AgentState, is_apart: bool) -> None:
        """It has a stream, on which it has ``told`` its state; ``is_apart``: the world of this
        round that it knows was made by another lighthouse."""
        node_id = agent.node.node_id
        self.agents.pop(node_id, None)
        self.agents[node_id] = agent
        is_apart |= node_id not in self._known or told.round != self._round
        if is_apart and told.reached:
            self._note_reached(node_id, 0, told)
        self._known.pop(node_id, None)
        self._known[node_id] = None
        _trim(self._known, MAX_KNOWN_PER_NODE * self._max_agents)

    def missing_of(self, world: World | None) -> list[Node]:
        """Those members of the present world that are missing."""
        return [node for node in (world.nodes if world else ()) if node.node_id in self.missing]

    def check_fits(self, hello: AgentHello, run: str, settings: RunSettings) -> None:
        """Refuse a node that the others, which have these ``settings``, cannot work with."""
        node = hello.node
        others = [each.node for key, each in self.agents.items() if key != node.node_id]
        if len(others) >= self._max_agents:
            raise RequestRefused(f"run {run!r} has {len(others)} nodes, no more are allowed")
        if hello.settings != settings:
            raise RequestRefused(
                f"node {node.node_id!r} starts run {run!r} with {hello.settings.beside(settings)}, "
                f"but {others[0].node_id!r} has started it with {settings.beside(hello.settings)}"
            )
        if others[0].is_loopback != node.is_loopback:  # as all others are
            raise RequestRefused(
                f"nodes {others[0].node_id!r} and {node.node_id!r} of run {run!r} cannot "
                f"reach each other at {others[0].host} and {node.host}: start both with the "
                "lighthouse's name or address that other hosts use (--rdzv-endpoint), or name "
                "theirs (--local-addr)"
            )
        for other in others if node.rank is not None else ():
            if other.rank == node.rank:
                raise RequestRefused(
                    f"nodes {other.node_id!r} and {node.node_id!r} of run {run!r} "
                    f"were both given node rank {node.rank}"
                )

    def knows(self, node_id: str) -> bool:
        """Whether it has, or had, to do with this run."""
        return node_id in self._known

    def step_outside(self, agent: Agent, at: float) -> None:
        """It is in no world, and keeps its seat if it has one."""
        self.outside[agent.node.node_id] = None
        agent.news = None
        agent.waits_since = None if agent.state.status is AgentStatus.WARMING else at

    def lose(self, node_id: str) -> None:
        """It is no member any more."""
        for each in (self.members, self.missing, self.awaited, self.unreached):
            each.discard(node_id)

    def await_all(self) -> None:
        """All agents have gone to another lighthouse, and may come back."""
        self.agents.clear()
        self.outside.clear()
        self.missing.clear()
        self.awaited = set(self.members)

    def forget(self, node_id: str) -> None:
        """Its agent has no stream any more."""
        del self.agents[node_id]
        self.outside.pop(node_id, None)

    def give_seats(self, num_seats: int) -> None:
        """To those outside that came first, as long as there are any (rule L9).

        Those that were given too many, before a world was taken over, are taken back: from nodes
        without workers first.
        """
        seated = [agent for agent in self.outsiders() if agent.has_seat]
        num_free = num_seats - len(self.members) - len(seated)
        seated.sort(key=lambda agent: agent.state.status is AgentStatus.JOINING)  # it is stable
        for agent in seated[len(seated) + min(num_free, 0) :]:
            agent.has_seat, agent.news = False, None
        for agent in self.outsiders():
            if num_free <= 0:
                break
            if not agent.has_seat:
                agent.has_seat = True
                num_free -= 1

    def joiners(self) -> list[Agent]:
        """Those outside that can be in a world at once."""
        return [agent for agent in self.outsiders() if agent.has_seat and self._can_join(agent)]

    def _can_join(self, agent: Agent) -> bool:
        if agent.state.status is AgentStatus.JOINING:
            return not (self.members and agent.state.can_warm_up)
        return agent.state.status in (AgentStatus.READY, AgentStatus.WORKING)

    def is_warming(self) -> bool:
        """Whether a node that has a seat starts its workers."""
        return any(
            agent.has_seat and agent.state.status is AgentStatus.WARMING
            for agent in self.outsiders()
        )

    def order(self, world: World | None, joiners: Iterable[Agent]) -> tuple[Node, ...]:
        """The members and ``joiners`` by the rank that they get after ``world``."""
        ids = () if world is None else world.node_ids
        last_ranks = {node_id: rank for rank, node_id in enumerate(ids)}
        survivors = [self.agents[key].node for key in self.members if key in self.agents]
        joining = [each.node for each in joiners]
        return order_nodes(survivors, joining, last_ranks, self._seniors())

    def tell_outside(
        self, world: World | None, round_: int, num_seats: int, why: str
    ) -> list[Order]:
        """Tell those outside where they stand: to start their workers for the world ``round_``
        after ``world`` (L4), or what they wait for: one of ``num_seats``, or ``why``."""
        orders: list[Order] = []
        for agent in self.outsiders():
            status = agent.state.status
            if not agent.has_seat:
                orders += agent.tell_waiting(f"all {num_seats} places are taken")
            elif status is AgentStatus.JOINING and agent.state.can_warm_up and self.members:
                if not isinstance(agent.news, WarmUp):
                    assert world is not None
                    orders += agent.tell(WarmUp(self._expected(world, round_, agent)))
            elif status is not AgentStatus.WARMING:
                orders += agent.tell_waiting(why or "it joins soon")
        return orders

    def _expected(self, world: World, round_: int, joiner: Agent) -> World:
        """The one after ``world`` as it may be, with ``joiner``."""
        others = [each for each in self.joiners() if each is not joiner]
        nodes = self.order(world, [*others, joiner])
        first = self.agents[nodes[0].node_id]
        return World(round_, nodes, first.state.store_port or world.master_port)

    def _seniors(self) -> set[str]:
        """Those that have the run's state, if anybody has it: rank 0 is one of them (rule L6)."""
        joiners = self.joiners()
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

    def _rounds_trained(self, node_id: str) -> tuple[int, int]:
        """Of the first and the last world that all nodes had reached, its workers among them."""
        agent, heard = self.agents.get(node_id), self._trained.get(node_id)
        if agent is None:
            return 0, 0
        told = agent.state.trained_since, agent.state.trained_until
        if heard is None or heard.num_restarts != agent.state.num_restarts or heard.last < told[1]:
            return told
        return heard.first, heard.last

    def _first_reached(self, node_id: str) -> int | None:
        """The round of the first world that its workers have reached, as far as is known."""
        agent, reached = self.agents.get(node_id), self._reached.get(node_id)
        if agent is None or reached is None or reached.num_restarts != agent.state.num_restarts:
            return None
        return reached.first

    def free_port(self, node_id: str) -> int:
        """Of a store that no world used (0: none yet; rule L7)."""
        port = self.agents[node_id].state.store_port
        return 0 if port == self._used_ports.get(node_id) else port

    def use_port(self, node_id: str, port: int) -> None:
        self._used_ports.pop(node_id, None)
        self._used_ports[node_id] = port
        _trim(self._used_ports, MAX_KNOWN_PER_NODE * self._max_agents)

    def status(self, world: World | None, at: float) -> tuple[NodeStatus, ...]:
        """What people want to know; by rank, and then those outside."""
        ids = () if world is None else world.node_ids
        ranks = {key: rank for rank, key in enumerate(ids) if key in self.members}
        keys = sorted(self.agents, key=lambda key: ranks.get(key, len(ids)))
        return tuple(
            NodeStatus(
                node_id=key,
                host=agent.node.host,
                node_rank=ranks.get(key),
                num_workers=agent.node.num_workers,
                status=agent.state.status,
                reached=key in self.members and key not in self.unreached,
                num_restarts=agent.state.num_restarts,
                silent_s=at - agent.heard_at,
                waits_for_s=None if agent.waits_since is None else at - agent.waits_since,
            )
            for key, agent in ((key, self.agents[key]) for key in keys)
        )


def _trim(entries: dict[str, Any], most: int) -> None:
    """Forget the oldest, as long as there are too many."""
    while len(entries) > most:
        del entries[next(iter(entries))]
