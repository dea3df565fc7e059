"""An agent's link to its lighthouses in a simulated world: a driver of `AgentLink`."""

from __future__ import annotations

from collections.abc import Callable

from tools.sim.launch_lighthouse import IN_GOOD_ORDER, LaunchLighthouse
from tools.sim.network import MAX_SERVER_KEEPALIVE_S, Network, Reason, Stream
from tools.sim.simulated_link import SimulatedLink
from tools.sim.world import Process
from torchft_svc.core.launch.agent import AgentConfig
from torchft_svc.core.launch.agent_link import (
    MIN_BEAT_INTERVAL_S,
    AgentLink,
    DeliverNews,
    LinkNews,
    OwnOrder,
)
from torchft_svc.core.launch.world import AgentLeave, WorldNews
from torchft_svc.core.link import ConfirmLeft, Connect, LinkConfig, LinkState, SendBeat
from torchft_svc.errors import Unreachable

# As the real channels to a list of lighthouses: asked after 2 s, and waited for as long.
MAX_IMPATIENT_KEEPALIVE_S = 4.0


class AgentLinkActor(SimulatedLink[AgentLink]):
    """The link of one life of an agent; ``on_news`` receives news, after this has returned."""

    def __init__(
        self,
        process: Process,
        config: AgentConfig,
        network: Network,
        lighthouses: dict[str, LaunchLighthouse],
        on_news: Callable[[LinkNews], None],
    ) -> None:
        settings = LinkConfig(
            lighthouses=tuple(lighthouses), heartbeat_interval_s=MIN_BEAT_INTERVAL_S
        )
        machine = AgentLink(settings, config.node, config.settings, process.chance.random)
        super().__init__(process, network, lighthouses, machine)
        self._lighthouses = lighthouses
        self._on_news = on_news
        self._is_leaving = False

    def finish(self) -> None:
        """End, as soon as the lighthouse knows that this node leaves, if it leaves."""
        if self.machine.state is LinkState.LEFT or not self._is_leaving:
            self.close()

    def leave(self, leave: AgentLeave) -> None:
        """Leave for good."""
        self._is_leaving = True
        self.feed(lambda machine, now: machine.leave(leave, now))

    def await_frozen(self, lighthouse: LaunchLighthouse) -> None:
        """Let the keepalive end a stream to ``lighthouse``, which stands still from now on."""
        number = self._number
        if number not in self._streams or self._lighthouses[self._host] is not lighthouse:
            return
        is_only_one = len(self._lighthouses) == 1
        longest_s = MAX_SERVER_KEEPALIVE_S if is_only_one else MAX_IMPATIENT_KEEPALIVE_S
        delay_s = self._process.chance.uniform(longest_s / 2, longest_s)
        self._process.after(delay_s, self._end_silence, number, lighthouse, self._process.world.now)

    def _end_silence(self, number: int, lighthouse: LaunchLighthouse, since: float) -> None:
        process = lighthouse.process
        if number in self._streams and process.is_frozen and process.thawed_at < since:
            silent = Unreachable("lighthouse", lighthouse.name, "it does not answer")
            self.feed(lambda machine, now: machine.closed(number, silent, now))

    def _introduce(self, connection: Connect, stream: Stream) -> None:
        stream.to_server(self.machine.hello())

    def _receive(self, number: int, news: WorldNews) -> None:
        if number in self._streams:
            self.feed(lambda machine, now: machine.received(number, news, now))

    def _ended(self, order: Connect, reason: Reason) -> None:
        if reason == IN_GOOD_ORDER:
            self.feed(lambda machine, now: machine.closed(order.connection, None, now))
        else:
            super()._ended(order, reason)

    def _execute_own(self, order: SendBeat | ConfirmLeft | OwnOrder) -> None:
        if isinstance(order, DeliverNews):
            self._process.after(0.0, self._on_news, order.news)
        elif isinstance(order, SendBeat):
            self.send(self.machine.agent_state)
        elif not isinstance(order, ConfirmLeft):
            self.send(order)
