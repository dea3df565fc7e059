"""One launched run: which nodes make its next world, and when (rules L1 to L14, L34 to L36).

Inputs carry ``at``, an instant of the lighthouse's clock; each returns orders.
"""

from __future__ import annotations

import math

from torchft_svc.core.launch.rendezvous_orders import (
    Cause,
    Order,
    ReportNode,
    ReportRunClosed,
    ReportRunMoved,
    ReportRunPaused,
    ReportWorld,
    RunStatus,
    SendNews,
)
from torchft_svc.core.launch.run_failures import RunFailures
from torchft_svc.core.launch.run_nodes import Agent, RunNodes
from torchft_svc.core.launch.world import (
    AgentHello,
    AgentLeave,
    AgentState,
    AgentStatus,
    RunClosed,
    RunMove,
    RunSettings,
    World,
    WorldPaused,
    WorldReached,
)
from torchft_svc.core.launch.world_pace import WorldPace
from torchft_svc.core.streams import EndStream
from torchft_svc.errors import DeadlineExceeded, RequestRefused, Unreachable

# Agents try again after up to half a second, and may ask another lighthouse of their list first.
MIN_TAKEOVER_S = 2.0
# What agents tell leaves room for more worlds than a run makes.
MAX_TOLD_ROUND = 2**52
# A lighthouse that has just started may hear first of a node that begins, and then of a world.
ADOPTION_TIMEOUTS = 2

_MORE = "more nodes may join"
_OUTSIDE = "it is in no world yet"


class LaunchedRun:
    """The decisions about one run."""

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
        self._nodes = RunNodes(max_nodes)
        self._failures = RunFailures(settings, max_nodes)
        self.world: World | None = None
        self.closed: RunClosed | None = None
        self.empty_since: float | None = None
        self._awaited_until = math.inf
        self._lost: list[str] = []  # since the present world
        self._finished_by = ""
        self._finished: set[str] = set()
        self._highest_round = 0
        # So long a newer world of an earlier lighthouse replaces the present one.
        self._adopts_until = begins_at + ADOPTION_TIMEOUTS * heartbeat_timeout_s
        self._is_elsewhere = False  # it has moved to another lighthouse
        self._is_broken = False
        self._pace = WorldPace(settings, begins_at)
        self._due_at = math.inf
        self._why = ""

    # -- inputs ----------------------------------------------------------------------------------

    def opened(self, stream: int, hello: AgentHello, at: float) -> list[Order]:
        """An agent has a new stream.

        Raises:
            RequestRefused: it cannot take part.
        """
        self._check(hello, at)
        self._check_round(hello.state.round if hello.world is None else hello.world.round)
        self.empty_since = None
        orders: list[Order] = []
        node_id = hello.node.node_id
        is_new = not self._nodes.knows(node_id)
        agent = self._nodes.agents.get(node_id)
        if agent is not None:
            newer = Unreachable("agent", node_id, "it has opened another stream")
            orders.append(EndStream(agent.stream, newer))
            agent.node, agent.stream, agent.heard_at, agent.news = hello.node, stream, at, None
        else:
            agent = Agent(hello.node, stream, hello.state, at)
        self._nodes.connect(agent, hello.state, self._is_apart(hello))
        if self.closed is not None:
            return [*orders, SendNews((stream,), self.closed)]
        orders += self._take_over(hello, is_new, at)
        if node_id in self._nodes.members and self._is_apart(hello):
            self._lose(node_id, at)
            orders.append(ReportNode(self.name, node_id, "another lighthouse has begun its world"))
        self._nodes.missing.discard(node_id)
        self._nodes.awaited.discard(node_id)
        orders += self._take_state(agent, hello.state, at)
        if node_id in self._nodes.outside:
            orders += agent.tell_waiting(_OUTSIDE)
        world = self.world
        if world is not None and node_id in self._nodes.members:
            if hello.state.round < world.round:
                orders.append(SendNews((stream,), world))
            elif hello.state.trained_until < world.round and self._nodes.is_reached():
                orders.append(SendNews((stream,), WorldReached(world.round)))
        return orders + self._settle(at)

    def told(self, node_id: str, state: AgentState, at: float) -> list[Order]:
        """An agent has told its state, maybe once more.

        Raises:
            RequestRefused: no lighthouse can have told it that round.
        """
        self._check_round(state.round)
        agent = self._nodes.agents.pop(node_id)
        self._nodes.agents[node_id] = agent
        agent.heard_at = at
        if state == agent.state or self.closed is not None:
            return []
        return self._take_state(agent, state, at) + self._settle(at)

    def left(self, node_id: str, leave: AgentLeave, at: float) -> list[Order]:
        """An agent has left, in good order."""
        agent = self._nodes.agents[node_id]
        reason = leave.reason or "it has left"
        if leave.failed:
            self._failures.note(agent.node, at)
        if self.closed is not None:
            self._forget(node_id, at)
            return [EndStream(agent.stream)]
        orders = self._part_with(agent, reason, at)
        if leave.closes:
            return orders + self._close(f"node {node_id!r}: {reason}", leave.failed, at)
        return orders + self._settle(at)

    def gone(self, node_id: str, reason: str, at: float) -> list[Order]:
        """An agent's stream has ended, or it was not heard any more."""
        self._forget(node_id, at)
        if self.closed is not None:
            return []
        orders: list[Order] = [ReportNode(self.name, node_id, reason)]
        if node_id in self._nodes.members:
            self._nodes.missing.add(node_id)
            self._pace.note_loss(at)
        return orders + self._settle(at)

    def moved(self, move: RunMove, at: float) -> list[Order]:
        """All agents go to an earlier lighthouse, which one of them has found (L21).

        Those that have not heard of it, and come back, go on in their world (L13).
        """
        if self.closed is not None:
            return []
        streams = self._nodes.streams
        self._nodes.await_all()
        until = at + max(self._heartbeat_timeout_s, MIN_TAKEOVER_S)
        self._awaited_until = self._adopts_until = self._pace.begins_at = until
        self._pace.forget_losses()  # but a world that is broken remains so
        self._finished_by = ""
        self._finished.clear()
        self.empty_since, self._due_at, self._is_elsewhere = at, until, True
        self._why = f"its agents have gone to lighthouse {move.address}"
        ends = map(EndStream, streams)
        return [SendNews(streams, move), *ends, ReportRunMoved(self.name, move.address)]

    def stood_still(self, settle_s: float, at: float) -> None:
        """Agents may come back from another lighthouse (L13); for ``settle_s`` none begins anew."""
        self._adopts_until = max(self._adopts_until, at + self._heartbeat_timeout_s)
        self._pace.begins_at = max(self._pace.begins_at, at + settle_s)
        self._pace.hold(at + MIN_TAKEOVER_S)

    def drain(self, node: str, reason: str, at: float) -> list[Order]:
        """The node with this id, or all nodes of this host, are to end (L36).

        Raises:
            RequestRefused: there is none.
        """
        agents = [each for key, each in self._nodes.agents.items() if node in (key, each.node.host)]
        if self.closed is not None or not agents:
            raise RequestRefused(f"run {self.name!r} has no node {node!r}")
        news = RunClosed(reason, failed=False, drained=True)
        orders = [order for each in agents for order in self._dismiss(each, news, at)]
        return orders + self._settle(at)

    def tick(self, at: float) -> list[Order]:
        """Time has passed."""
        orders: list[Order] = []
        while self._nodes.agents:
            node_id, agent = next(iter(self._nodes.agents.items()))
            if agent.heard_at + self._heartbeat_timeout_s > at:
                break
            error = DeadlineExceeded("a sign of life", self._heartbeat_timeout_s)
            orders.append(EndStream(agent.stream, error))
            orders += self.gone(node_id, str(error), at)
        return orders + (self._settle(at) if at >= self._due_at else [])

    # -- questions -------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When to `tick`; may be too early, never too late."""
        if not self._nodes.agents:
            return self._due_at
        silent = next(iter(self._nodes.agents.values()))
        return min(self._due_at, silent.heard_at + self._heartbeat_timeout_s)

    def knows(self, node_id: str) -> bool:
        """Whether it has, or had, to do with this run."""
        return self._nodes.knows(node_id)

    def has_agents(self) -> bool:
        return bool(self._nodes.agents)

    def is_over(self) -> bool:
        """Whether nothing is left of it but that it was closed."""
        return not (self._nodes.agents or self._nodes.missing or self._nodes.awaited)

    def status(self, at: float) -> RunStatus:
        """What people want to know."""
        return RunStatus(
            run=self.name,
            round=0 if self.world is None else self.world.round,
            min_nodes=self.settings.min_nodes,
            max_nodes=self.settings.max_nodes,
            phase=self._phase(),
            why=self.closed.reason if self.closed is not None else self._why,
            nodes=self._nodes.status(self.world, at),
        )

    def _phase(self) -> str:
        if self.closed is not None:
            return "closed"
        if self._finished_by:
            return "finishing"
        if not self._nodes.members:
            return "forming"
        return "paused" if self._pace.is_paused else "running"

    # -- what agents tell ------------------------------------------------------------------------

    def _check(self, hello: AgentHello, at: float) -> None:
        node, settings = hello.node, hello.settings
        others = self._nodes.agents.keys() - {node.node_id}
        if not others and self.closed is None and settings != self.settings:
            self.settings = self._pace.settings = settings
            self._failures = RunFailures(settings, self._max_agents)
        if self.closed is None and (excluded := self._failures.why_excluded(node, at)):
            raise RequestRefused(excluded)
        if others:
            self._nodes.check_fits(hello, self.name, self.settings)

    def _check_round(self, told: int) -> None:
        if told > max(self._highest_round, MAX_TOLD_ROUND):
            raise RequestRefused(f"round {told} leaves no room for the next worlds")

    def _is_apart(self, hello: AgentHello) -> bool:
        """Whether it is in a world that has the round of the present one, and is another one."""
        mine, told = self.world, hello.world
        return mine is not None and told is not None and told.round == mine.round and told != mine

    def _take_over(self, hello: AgentHello, is_new: bool, at: float) -> list[Order]:
        """Go on with the world of a lighthouse before this one, and wait for its nodes (L13).

        If nobody is left here, that lighthouse knows better: the run has moved there, and may come
        back in the same world, or has begun anew there with an agent that ``is_new`` here, or was
        not in the last world of this one.
        """
        world, state = hello.world, hello.state
        self._highest_round = max(self._highest_round, state.round)
        if world is None:
            return []
        self._highest_round = max(self._highest_round, world.round)
        mine = 0 if self.world is None else self.world.round
        if not self._nodes.members and (is_new or self._is_elsewhere):
            was_in = self.world is not None and hello.node.node_id in self.world.node_ids
            mine = 0 if is_new or not was_in else mine - 1
        if world.round <= mine or (self._nodes.members and at >= self._adopts_until):
            return []
        self.world, self._is_elsewhere = world, False
        self._adopts_until = at + self._heartbeat_timeout_s
        self._nodes.enter(world)
        self._awaited_until = at + max(self._heartbeat_timeout_s, MIN_TAKEOVER_S)
        self._lost.clear()
        self._is_broken = False
        self._pace.forget_losses()
        self._pace.published(at)
        others = self._nodes.streams_of_members(besides=hello.node.node_id)
        orders: list[Order] = [SendNews(others, world)] if others else []
        for each in self._nodes.members_that_left(world):
            self._lose(each.node.node_id, at)
            orders += self._step_outside(each, at)
        return orders

    def _take_state(self, agent: Agent, state: AgentState, at: float) -> list[Order]:
        """Where its node is now."""
        node_id, before = agent.node.node_id, agent.state
        agent.state = state
        self._highest_round = max(self._highest_round, state.round)
        if state.status is AgentStatus.FINISHED:
            self._finished_by = self._finished_by or node_id
            if self.world is not None and node_id in self.world.node_ids:
                self._finished.add(node_id)
        if state.num_failures > before.num_failures:
            self._failures.note(agent.node, at, state.num_failures - before.num_failures)
        world = self.world
        if world is not None and node_id in self._nodes.members:
            if agent.may_be_in(world):
                return self._take_state_of_member(agent, world, at)
            self._lose(node_id, at)  # and keeps its seat
            left = ReportNode(self.name, node_id, f"its workers are {state.status.value}")
            return [left, *self._step_outside(agent, at)]
        if node_id not in self._nodes.outside:
            return self._step_outside(agent, at)
        if state.status is not before.status:
            agent.waits_since = at
        if state.status is AgentStatus.WARMING:
            agent.waits_since = None
        return agent.tell_waiting(_OUTSIDE) if state.num_failures > before.num_failures else []

    def _take_state_of_member(self, agent: Agent, world: World, at: float) -> list[Order]:
        state = agent.state
        if state.paused and state.round == world.round and not self._is_broken:
            self._is_broken = True  # at a lighthouse before this one
            self._pace.note_loss(at)
        if not self._nodes.take_state_of_member(agent):
            return []
        return [SendNews(self._nodes.streams_of_members(), WorldReached(world.round))]

    def _step_outside(self, agent: Agent, at: float) -> list[Order]:
        """It hears of that before it hears of another world (L17)."""
        self._nodes.step_outside(agent, at)
        return agent.tell_waiting(_OUTSIDE)

    def _forget(self, node_id: str, at: float) -> None:
        self._nodes.forget(node_id)
        if not self._nodes.agents:
            self.empty_since = at

    def _lose(self, node_id: str, at: float) -> None:
        """For good."""
        self._nodes.lose(node_id)
        self._lost.append(node_id)
        self._is_broken = True
        self._pace.note_loss(at)

    def _dismiss(self, agent: Agent, news: RunClosed, at: float) -> list[Order]:
        """It has to end, and the others go on without it."""
        return [SendNews((agent.stream,), news), *self._part_with(agent, news.reason, at)]

    def _part_with(self, agent: Agent, reason: str, at: float) -> list[Order]:
        node_id = agent.node.node_id
        self._forget(node_id, at)
        if node_id in self._nodes.members:
            self._lose(node_id, at)
        return [EndStream(agent.stream), ReportNode(self.name, node_id, reason)]

    # -- the rules -------------------------------------------------------------------------------

    def _settle(self, at: float) -> list[Order]:
        """Decide what can be decided."""
        if self.closed is not None:
            self._due_at = math.inf
            return []
        self._act_on_losses(at)
        orders = self._apply_limits(at)
        if self.closed is None:
            orders += self._go_on(at)
        if self.closed is None and (given_up := self._give_up(at)):
            orders += given_up + self._go_on(at)
        if self.closed is None and not self._finished_by:
            next_round, num_seats = self._highest_round + 1, self.settings.max_nodes
            orders += self._nodes.tell_outside(self.world, next_round, num_seats, self._why)
        self._due_at = math.inf if self.closed is not None else self._next_due(at)
        return orders

    def _go_on(self, at: float) -> list[Order]:
        """With the next world, or to the end of the run."""
        if self._finished_by:
            return self._finish(at)
        self._nodes.give_seats(self.settings.max_nodes)
        return self._next_world(at)

    def _apply_limits(self, at: float) -> list[Order]:
        """End the run (L34), or exclude those that have failed too often (L35)."""
        failed = self._failures.take_new()
        if not failed or self._finished_by:
            return []
        if over := self._failures.why_over(at):
            return self._close(f"{over}; {failed[-1]!r} was the last one", True, at)
        orders: list[Order] = []
        for node_id in failed:
            agent = self._nodes.agents.get(node_id)
            if agent is not None and (excluded := self._failures.why_excluded(agent.node, at)):
                orders += self._dismiss(agent, RunClosed(excluded, failed=True), at)
        return orders

    def _act_on_losses(self, at: float) -> None:
        if self._nodes.awaited and at >= self._awaited_until:
            for node_id in list(self._nodes.awaited):
                self._lose(node_id, at)
            self._nodes.awaited.clear()
            self._pace.act_at(at)
        if not self._nodes.awaited:
            self._awaited_until = math.inf
        if not self._nodes.members or not (self._nodes.missing or self._is_broken):
            self._pace.forget_losses()
        if at >= self._pace.due_at:
            for node in self._nodes.missing_of(self.world):
                self._lose(node.node_id, at)
                self._failures.note(node, at)
            self._pace.acted(at)

    def _finish(self, at: float) -> list[Order]:
        """One has finished: there is no other world, and the run ends with the last one (L11)."""
        self._why = f"node {self._finished_by!r} has finished, the others are waited for"
        waited_for = self._nodes.members
        if self.settings.waits_for_lost and self.world is not None:
            waited_for = set(self.world.node_ids)
        if waited_for <= self._finished:
            return self._close("all nodes have finished", False, at)
        waiting = f"node {self._finished_by!r} has finished, no node can join any more"
        return [order for each in self._nodes.outsiders() for order in each.tell_waiting(waiting)]

    def _next_world(self, at: float) -> list[Order]:
        """Make it, if it is due; else `_why` says what it waits for."""
        self._why = ""
        joiners = self._nodes.joiners()
        if self._nodes.awaited or self._pace.is_waiting() or at < self._pace.held_until:
            self._why = "nodes that are missing may come back"
            return []
        if not self._nodes.members:
            return self._form(joiners, at)
        self._pace.note_members()
        if self._is_broken:
            return self._replace(joiners, at)
        if joiners and at >= self._join_at(joiners):
            return self._publish(Cause.JOIN, joiners, at)
        if joiners:
            is_late = bool(self._nodes.unreached)
            self._why = "not all nodes have reached the present world" if is_late else _MORE
        return []

    def _form(self, joiners: list[Agent], at: float) -> list[Order]:
        """A world of those that have come together, as nobody is in one (L1)."""
        if not self._pace.note_joiners(joiners, at):
            self._why = f"fewer than {self.settings.min_nodes} nodes are there"
            return []
        if at < self._pace.forms_at(joiners, self._nodes.is_warming()):
            self._why = _MORE
            return []
        return self._publish(Cause.START, joiners, at)

    def _replace(self, joiners: list[Agent], at: float) -> list[Order]:
        """A world without those that were lost (L2), if enough are left (L9)."""
        if len(self._nodes.members) + len(joiners) >= self.settings.min_nodes:
            return self._publish(Cause.LOSS, joiners, at)
        few = f"fewer than {self.settings.min_nodes} nodes are left"
        if at >= self._pace.pauses_until(at):
            return self._close(f"{few}, and no others came in time", True, at)
        return self._pause(few)

    def _pause(self, reason: str) -> list[Order]:
        self._why = reason
        told = self._nodes.tell_members(WorldPaused(reason))
        return [*told, ReportRunPaused(self.name, reason)] if told else []

    def _join_at(self, joiners: list[Agent]) -> float:
        return self._pace.joins_at(joiners, len(self._nodes.members), not self._nodes.unreached)

    def _publish(self, cause: Cause, joiners: list[Agent], at: float) -> list[Order]:
        nodes = self._nodes.order(self.world, joiners)
        first = nodes[0].node_id
        port = self._nodes.free_port(first)
        if not port:
            reason = f"node {first!r} has no store for the next world yet"
            if self._is_broken:
                return self._pause(reason)
            self._why = reason
            return []
        self._highest_round += 1
        before = () if self.world is None else self.world.node_ids
        self.world = world = World(self._highest_round, nodes, port)
        self._is_elsewhere = False
        self._nodes.enter(world)
        lost, self._lost = tuple(self._lost), []
        self._is_broken, self._why = False, ""
        self._pace.published(at)
        streams = tuple(self._nodes.agents[node.node_id].stream for node in nodes)
        joined = tuple(each for each in world.node_ids if each not in before)
        return [
            SendNews(streams, world),
            ReportWorld(self.name, world, cause, joined, lost),
        ]

    def _give_up(self, at: float) -> list[Order]:
        """Those outside that have waited for too long have to end (L10)."""
        orders: list[Order] = []
        for agent in self._nodes.outsiders():
            if self._pace.gives_up_at(agent) > at:
                continue
            error = DeadlineExceeded(
                f"joining run {self.name!r}", self._pace.join_timeout_s, self._why
            )
            orders += self._dismiss(agent, RunClosed(str(error), failed=True), at)
        return orders

    def _next_due(self, at: float) -> float:
        """When time alone changes something."""
        dues = [self._pace.due_at, self._pace.held_until, self._awaited_until]
        if not self._finished_by:
            joiners = self._nodes.joiners()
            if not self._nodes.members:
                dues.append(self._pace.forms_at(joiners, self._nodes.is_warming()))
            elif joiners and not self._is_broken:
                dues.append(self._join_at(joiners))
            if self._pace.is_paused:
                dues.append(self._pace.pauses_until(at))
        dues += map(self._pace.gives_up_at, self._nodes.outsiders())
        return min((due for due in dues if due > at), default=math.inf)

    def _close(self, reason: str, failed: bool, at: float) -> list[Order]:
        self.closed = RunClosed(reason, failed)
        streams = self._nodes.streams
        orders: list[Order] = [SendNews(streams, self.closed)] if streams else []
        self._nodes.missing.clear()
        self._nodes.awaited.clear()
        if not self._nodes.agents:
            self.empty_since = at
        return [*orders, ReportRunClosed(self.name, reason, failed)]
