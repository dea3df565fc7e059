"""A launched run without a network: the machines of both ends, and workers that do as told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchft_svc.core.launch import agent_orders
from torchft_svc.core.launch.agent import AgentConfig, AgentMachine
from torchft_svc.core.launch.agent_orders import (
    Broadcast,
    End,
    OpenStore,
    ReplaceWorkers,
    StartWorkers,
    StopWorkers,
    Tell,
    TellLeave,
)
from torchft_svc.core.launch.rendezvous import Rendezvous, RendezvousRules
from torchft_svc.core.launch.rendezvous_orders import Order, Orders, ReportWorld, SendNews
from torchft_svc.core.launch.restart import RestartPolicy
from torchft_svc.core.launch.world import AgentLeave, Node, RunSettings, WorkerState, World
from torchft_svc.core.streams import EndStream
from torchft_svc.errors import RequestRefused

RUN = "r"


@dataclass(slots=True)
class Agent:
    """An agent and its workers, which start and answer at once unless they are ``slow``."""

    machine: AgentMachine
    stream: int
    told: list[object] = field(default_factory=list)  # the orders that concern workers
    is_slow: bool = False
    is_silent: bool = False
    end: End | None = None
    left: AgentLeave | None = None
    refused: RequestRefused | None = None

    @property
    def names(self) -> list[str]:
        """What its workers went through, in short."""
        return [_name(order) for order in self.told]

    @property
    def round(self) -> int:
        entered = self.machine.entered
        return 0 if entered is None else entered.round


def _name(order: object) -> str:
    if isinstance(order, Broadcast):
        change = "" if order.change is None else f" {order.change.value}"
        return f"{order.state.value} {order.world.round}{change}"
    if isinstance(order, StartWorkers):
        return f"start {'expected ' if order.is_expected else ''}{order.world.round}"
    if isinstance(order, ReplaceWorkers):
        return f"replace {list(order.local_ranks)}"
    return "stop"


def _is_healthy(order: object) -> bool:
    return isinstance(order, Broadcast) and order.state is WorkerState.HEALTHY


class Launch:
    """One run, whose time passes only when it is told to."""

    def __init__(
        self,
        nodes: str = "1:4",
        policy: RestartPolicy = RestartPolicy.SOFT,
        heartbeat_timeout_s: float = 5.0,
        settle_in_s: float = 1.0,
        has_stores: bool = True,
        join_timeout_s: float = 60.0,
        limits: Mapping[str, Any] | None = None,
        **config: float,
    ) -> None:
        self.now = 100.0
        least, _, most = nodes.partition(":")
        self.settings = RunSettings(
            min_nodes=int(least),
            max_nodes=int(most or least),
            join_timeout_s=join_timeout_s,
            **limits or {},
        )
        self.policy = policy
        self.config = config
        self.rendezvous = Rendezvous(
            RendezvousRules(heartbeat_timeout_s=heartbeat_timeout_s, settle_in_s=settle_in_s),
            self.now,
        )
        self.has_stores = has_stores
        self.agents: dict[str, Agent] = {}
        self.reports: list[object] = []
        self._num_streams = 0
        self._num_ports = 1000

    # -- what happens ----------------------------------------------------------------------------

    def start(self, name: str, is_slow: bool = False, **node: Any) -> Agent:
        described = Node(**{"node_id": name, "host": f"host-{name}", "num_workers": 2, **node})
        machine = AgentMachine(
            AgentConfig(
                node=described,
                settings=self.settings,
                policy=self.policy,
                **self.config,  # type: ignore[arg-type]
            ),
            self.now,
        )
        agent = self.agents[name] = Agent(machine, 0, is_slow=is_slow)
        self._do(agent, machine.started(self.now))
        self.connect(name)
        return agent

    def connect(self, name: str) -> None:
        """Its agent opens a stream."""
        agent = self.agents[name]
        self._num_streams += 1
        agent.stream = self._num_streams
        try:
            orders = self.rendezvous.opened(agent.stream, RUN, agent.machine.hello(), self.now)
        except RequestRefused as error:
            agent.stream, agent.refused = 0, error
            return
        self.carry_out(orders)

    def disconnect(self, name: str) -> None:
        """Its stream breaks."""
        agent = self.agents[name]
        stream, agent.stream = agent.stream, 0
        self.carry_out(self.rendezvous.closed(stream, self.now))

    def kill(self, name: str) -> None:
        self.disconnect(name)
        del self.agents[name]

    def stop(self, name: str) -> None:
        """Its agent gets a signal."""
        agent = self.agents[name]
        self._do(agent, agent.machine.stopped("SIGTERM", self.now))

    def fail(self, name: str, *local_ranks: int) -> None:
        """A worker dies."""
        agent = self.agents[name]
        self._do(agent, agent.machine.workers_failed("it died", local_ranks or (0,), self.now))

    def leave_world(self, name: str) -> None:
        """Its workers' process group is broken, though nobody is lost."""
        agent = self.agents[name]
        self._do(agent, agent.machine.world_over(self.now))

    def succeed(self, name: str) -> None:
        agent = self.agents[name]
        self._do(agent, agent.machine.workers_succeeded(self.now))

    def open_store(self, name: str) -> None:
        """A store of its agent listens."""
        agent = self.agents[name]
        self._num_ports += 1
        self._do(agent, agent.machine.store_opened(self._num_ports, self.now))

    def answer(self, name: str) -> None:
        """Its slow workers do what they were to do."""
        agent = self.agents[name]
        self._do(agent, agent.machine.workers_ready(self.now))
        self._do(agent, agent.machine.workers_reached(agent.round, self.now))

    def restart_lighthouse(self) -> None:
        """All streams break, and the new one knows nothing."""
        for agent in self.agents.values():
            agent.stream = 0
        self.rendezvous = Rendezvous(self.rendezvous.config, self.now)

    def passes(self, seconds: float, step_s: float = 0.01) -> None:
        """Let time pass, with beats."""
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            for agent in list(self.agents.values()):
                self._do(agent, agent.machine.tick(self.now))
                if agent.stream and not agent.is_silent:
                    state = agent.machine.state
                    self.carry_out(self.rendezvous.received(agent.stream, state, self.now))
            self.carry_out(self.rendezvous.tick(self.now))

    # -- what came of it -------------------------------------------------------------------------

    @property
    def worlds(self) -> list[tuple[str, ...]]:
        """All that were made, by node ids."""
        made = [each.world for each in self.reports if isinstance(each, ReportWorld)]
        return [world.node_ids for world in made]

    @property
    def world(self) -> World:
        return next(each.world for each in self.reports[::-1] if isinstance(each, ReportWorld))

    # -- both shells -----------------------------------------------------------------------------

    def carry_out(self, orders: Orders) -> None:
        """Of the lighthouse."""
        for order in orders:
            self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, SendNews):
            for agent in list(self.agents.values()):
                if agent.stream in order.streams and agent.stream and not agent.is_silent:
                    self._do(agent, agent.machine.news(order.news, self.now))
        elif isinstance(order, EndStream):
            for agent in self.agents.values():
                if agent.stream == order.stream:
                    agent.stream = 0
        else:
            self.reports.append(order)

    def _do(self, agent: Agent, orders: agent_orders.Orders) -> None:
        machine = agent.machine
        for order in orders:
            if isinstance(order, OpenStore):
                if self.has_stores:
                    self.open_store(machine.config.node.node_id)
            elif isinstance(order, Tell):
                self._tell(agent, order)
            elif isinstance(order, TellLeave):
                agent.left = order.leave
                stream, agent.stream = agent.stream, 0
                self.carry_out(self.rendezvous.received(stream, order.leave, self.now))
            elif isinstance(order, End):
                agent.end = order
            else:
                agent.told.append(order)
                if isinstance(order, StopWorkers):
                    self._do(agent, machine.workers_stopped(self.now))
                elif isinstance(order, StartWorkers | ReplaceWorkers) and not agent.is_slow:
                    self._do(agent, machine.workers_ready(self.now))
                    self._do(agent, machine.workers_reached(agent.round, self.now))
                elif _is_healthy(order) and not agent.is_slow:
                    self._do(agent, machine.workers_reached(agent.round, self.now))

    def _tell(self, agent: Agent, order: Tell) -> None:
        if agent.stream and not agent.is_silent:
            self.carry_out(self.rendezvous.received(agent.stream, order.state, self.now))


def started(nodes: str, names: str, **config: Any) -> Launch:
    """A run in which these nodes are in one world, and have reached it."""
    launch = Launch(nodes, **config)
    for name in names:
        launch.start(name)
    launch.passes(2.0)
    assert launch.worlds == [tuple(names)]
    return launch
