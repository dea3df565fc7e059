"""A launched run without a network: the machines of both ends, and obedient workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchft_svc.core.launch.agent import (
    AgentConfig,
    AgentMachine,
    Broadcast,
    End,
    OrderQueue,
    ReplaceWorkers,
    StartWorkers,
    StopWorkers,
)
from torchft_svc.core.launch.agent import Orders as AgentOrders
from torchft_svc.core.launch.agent_link import MIN_BEAT_INTERVAL_S, AgentLink
from torchft_svc.core.launch.launched_run import Order, Orders, ReportWorld, SendNews
from torchft_svc.core.launch.rendezvous import Rendezvous, RendezvousRules
from torchft_svc.core.launch.restart import RestartPolicy
from torchft_svc.core.launch.worker_events import WorkerState
from torchft_svc.core.launch.world import (
    AgentHello,
    AgentLeave,
    AgentState,
    Node,
    RunSettings,
    World,
    WorldNews,
)
from torchft_svc.core.link import Connect, LinkConfig
from torchft_svc.core.streams import EndStream
from torchft_svc.errors import RequestRefused

RUN = "r"


@dataclass(eq=False)
class Agent:
    """An agent and its workers, which start and answer at once unless they are ``slow``.

    Its link keeps one connection whatever becomes of the streams: only its hello is of interest.
    """

    launch: Launch
    machine: AgentMachine
    stream: int
    worker_orders: list[object] = field(default_factory=list)
    is_slow: bool = False
    is_silent: bool = False
    end: End | None = None
    left: AgentLeave | None = None
    refused: RequestRefused | None = None

    def __post_init__(self) -> None:
        self._queue = OrderQueue(self)
        link = LinkConfig(lighthouses=("first",), heartbeat_interval_s=MIN_BEAT_INTERVAL_S)
        config = self.machine.config
        self._link = AgentLink(link, config.node, config.settings, lambda: 1.0)
        self._connection = 0

    def execute(self, orders: AgentOrders) -> None:
        self._queue.execute(orders)

    def hello(self) -> AgentHello:
        """The hello of its link, with the present state."""
        self._link.report_state(self.machine.state, self.launch.now)
        self._find_connection()
        return self._link.hello()

    def receive(self, news: WorldNews) -> None:
        """Accept news of the lighthouse: first the link, then the machine."""
        self._link.received(self._connection, news, self.launch.now)
        self._find_connection()
        self.execute(self.machine.news_received(news, self.launch.now))

    def _find_connection(self) -> None:
        for order in self._link.take_orders():
            if isinstance(order, Connect):
                self._connection = order.connection

    @property
    def names(self) -> list[str]:
        """What its workers went through, in short."""
        return [_name(order) for order in self.worker_orders]

    @property
    def round(self) -> int:
        entered = self.machine.entered
        return 0 if entered is None else entered.round

    # -- its shell -------------------------------------------------------------------------------

    def open_store(self) -> None:
        if self.launch.has_stores:
            self.launch.open_store(self.machine.config.node.node_id)

    def send_state(self, state: AgentState) -> None:
        if self.stream and not self.is_silent:
            launch = self.launch
            launch.execute(launch.rendezvous.received(self.stream, state, launch.now))

    def start_workers(self, order: StartWorkers) -> None:
        self._start(order)

    def replace_workers(self, order: ReplaceWorkers) -> None:
        self._start(order)

    def stop_workers(self, order: StopWorkers) -> None:
        self.worker_orders.append(order)
        self.execute(self.machine.workers_stopped(self.launch.now))

    def broadcast(self, order: Broadcast) -> None:
        self.worker_orders.append(order)
        if order.state is WorkerState.HEALTHY and not self.is_slow:
            self.execute(self.machine.workers_reached(self.round, self.launch.now))

    def send_leave(self, leave: AgentLeave) -> None:
        self.left = leave
        stream, self.stream = self.stream, 0
        self.launch.execute(self.launch.rendezvous.received(stream, leave, self.launch.now))

    def finish(self, end: End) -> None:
        self.end = end

    def _start(self, order: StartWorkers | ReplaceWorkers) -> None:
        self.worker_orders.append(order)
        if not self.is_slow:
            self.answer()

    def answer(self) -> None:
        """Let its workers call the API, and reach their world."""
        self.execute(self.machine.workers_ready(self.launch.now))
        self.execute(self.machine.workers_reached(self.round, self.launch.now))


def _name(order: object) -> str:
    if isinstance(order, Broadcast):
        change = "" if order.change is None else f" {order.change.value}"
        return f"{order.state.value} {order.world.round}{change}"
    if isinstance(order, StartWorkers):
        return f"start {'expected ' if order.is_expected else ''}{order.world.round}"
    if isinstance(order, ReplaceWorkers):
        return f"replace {list(order.local_ranks)}"
    return "stop"


class Launch:
    """One run, whose time passes only by `passes`."""

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
        agent = self.agents[name] = Agent(self, machine, 0, is_slow=is_slow)
        agent.execute(machine.started(self.now))
        self.connect(name)
        return agent

    def connect(self, name: str) -> None:
        """Open a stream of the node's agent."""
        agent = self.agents[name]
        agent.launch = self  # it may come from another lighthouse
        self._num_streams += 1
        agent.stream = self._num_streams
        try:
            orders = self.rendezvous.opened(agent.stream, RUN, agent.hello(), self.now)
        except RequestRefused as error:
            agent.stream, agent.refused = 0, error
            return
        self.execute(orders)

    def disconnect(self, name: str) -> None:
        """Break the stream of the node's agent."""
        agent = self.agents[name]
        stream, agent.stream = agent.stream, 0
        self.execute(self.rendezvous.closed(stream, self.now))

    def kill(self, name: str) -> None:
        self.disconnect(name)
        del self.agents[name]

    def stop(self, name: str) -> None:
        """Send the node's agent a signal."""
        agent = self.agents[name]
        agent.execute(agent.machine.stop_requested("SIGTERM", self.now))

    def fail(self, name: str, *local_ranks: int) -> None:
        """A worker dies."""
        agent = self.agents[name]
        agent.execute(agent.machine.workers_failed("it died", local_ranks or (0,), self.now))

    def leave_world(self, name: str) -> None:
        """Break the process group of the node's workers, though nobody is lost."""
        agent = self.agents[name]
        agent.execute(agent.machine.world_over(self.now))

    def succeed(self, name: str) -> None:
        agent = self.agents[name]
        agent.execute(agent.machine.workers_succeeded(self.now))

    def open_store(self, name: str) -> None:
        """A store of its agent listens."""
        agent = self.agents[name]
        self._num_ports += 1
        agent.execute(agent.machine.store_opened(self._num_ports, self.now))

    def answer(self, name: str) -> None:
        """Make the node's slow workers do what they were to do."""
        self.agents[name].answer()

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
                agent.execute(agent.machine.tick(self.now))
                if agent.stream and not agent.is_silent:
                    state = agent.machine.state
                    self.execute(self.rendezvous.received(agent.stream, state, self.now))
            self.execute(self.rendezvous.tick(self.now))

    # -- what came of it -------------------------------------------------------------------------

    @property
    def worlds(self) -> list[tuple[str, ...]]:
        """All that were made, by node ids."""
        made = [each.world for each in self.reports if isinstance(each, ReportWorld)]
        return [world.node_ids for world in made]

    @property
    def world(self) -> World:
        return next(each.world for each in self.reports[::-1] if isinstance(each, ReportWorld))

    # -- the lighthouse's shell ------------------------------------------------------------------

    def execute(self, orders: Orders) -> None:
        for order in orders:
            self._execute(order)

    def _execute(self, order: Order) -> None:
        if isinstance(order, SendNews):
            for agent in list(self.agents.values()):
                if agent.stream in order.streams and agent.stream and not agent.is_silent:
                    agent.receive(order.news)
        elif isinstance(order, EndStream):
            for agent in self.agents.values():
                if agent.stream == order.stream:
                    agent.stream = 0
        else:
            self.reports.append(order)


def started(nodes: str, names: str, **config: Any) -> Launch:
    """A run in which these nodes are in one world, and have reached it."""
    launch = Launch(nodes, **config)
    for name in names:
        launch.start(name)
    launch.passes(2.0)
    assert launch.worlds == [tuple(names)]
    return launch
