"""Decides how an agent stays in touch with the lighthouse of its run: the link of a node.

`AgentLink` is a `LinkMachine` that reports states. The protocol is declarative: over each new
connection, to the same lighthouse or another one, the agent introduces itself with its state and
its world (L19), and the newest state is sent again with every beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torchft_svc.core.launch.world import (
    AgentHello,
    AgentLeave,
    AgentState,
    AgentWelcome,
    Node,
    RunClosed,
    RunMove,
    RunSettings,
    RunWaiting,
    WarmUp,
    World,
    WorldNews,
)
from torchft_svc.core.limits import one_line
from torchft_svc.core.link import (
    LEAVE_TIMEOUT_S,
    LinkConfig,
    LinkConnection,
    LinkMachine,
    LinkOrder,
    LinkState,
    SendBeat,
)
from torchft_svc.errors import RequestRefused, TorchFTError, Unauthorized

# An agent that is refused sooner after its welcome breaks the rules. One that was refused later did
# not read what it was sent, for example because it was frozen: it may come back.
STEADY_S = 1.0
# A lighthouse that wants more beats than this is mistaken.
MIN_BEAT_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class LinkTrouble:
    """No lighthouse is connected, because of ``error``; repeated until one is.

    ``is_final``: the lighthouse refuses this node, and the link does not try again.
    """

    error: TorchFTError
    is_final: bool = False


LinkNews = WorldNews | LinkTrouble


@dataclass(frozen=True, slots=True)
class DeliverNews:
    """Pass ``news`` on to the agent."""

    news: LinkNews


Message = SendBeat | AgentLeave | RunMove  # what goes to the lighthouse after the hello
OwnOrder = AgentLeave | RunMove | DeliverNews
Order = LinkOrder | OwnOrder


class AgentLink(LinkMachine[OwnOrder]):
    """The link of an agent; `take_orders` returns `Order`s.

    It connects when the first state is reported, and a beat is the newest `agent_state`. The first
    news of each connection is an `AgentWelcome`; there are none after a `RunClosed` or a final
    `LinkTrouble`.
    """

    _looks_at_once = False  # what it finds moves its whole run, which has to arrive first (L21)

    def __init__(
        self, config: LinkConfig, node: Node, settings: RunSettings, draw: Callable[[], float]
    ) -> None:
        super().__init__(config, draw)
        self.agent_state: AgentState | None = None
        self._node = node
        self._settings = settings
        self._worlds: dict[int, World] = {}  # by round: the last two that this node received
        self._last_message: AgentLeave | None = None
        self._leave_by = math.inf

    def hello(self) -> AgentHello:
        """The first message of a stream, with the world in which the workers are."""
        state = self.agent_state
        assert state is not None
        return AgentHello(self._node, self._settings, state, self._worlds.get(state.round))

    # -- inputs of the agent ---------------------------------------------------------------------

    def report_state(self, state: AgentState, now: float) -> None:
        """Send ``state`` now, and again with every beat; the newest counts."""
        is_first = self.agent_state is None
        self.agent_state = state
        if is_first:
            self.start(now)
        else:
            self.beat_at_once(now)

    def leave(self, leave: AgentLeave, now: float, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Leave for good; `ConfirmLeft` follows within ``timeout_s``.

        The lighthouse has to know, because the run may be over for all with it: until then, another
        connection is awaited if there is none, and the message is repeated if one breaks.
        """
        # The lighthouse refuses a longer reason, and treats a stream that breaks as a loss.
        self._last_message = replace(leave, reason=one_line(leave.reason))
        self._leave_by = now + timeout_s
        if self.state is LinkState.OPEN:
            self._send_leave(self._last_message, self._leave_by)
        elif self.agent_state is None or self.state is LinkState.LEFT:
            self._finish_leaving(now)

    # -- inputs of a connection ------------------------------------------------------------------

    def received(self, number: int, news: WorldNews, now: float) -> None:
        """Record and deliver ``news`` of the lighthouse."""
        if self._current(number) is None:
            return
        if isinstance(news, RunMove):
            self._go_back(news, now)
            return
        if isinstance(news, AgentWelcome):
            self.welcomed(number, news.beat_interval_s, now)
        elif isinstance(news, World):
            newest = max(self._worlds, default=0)
            self._worlds = {
                round_: each for round_, each in self._worlds.items() if round_ == newest
            }
            self._worlds[news.round] = news
        elif isinstance(news, RunWaiting | WarmUp):
            self._worlds.clear()  # what continues without this node is no news elsewhere (L13)
        self._orders.append(DeliverNews(news))
        if isinstance(news, RunClosed):
            self._finish_leaving(now)

    def closed(self, number: int, error: TorchFTError | None, now: float) -> None:
        """Record that the connection broke because of ``error``; None: the lighthouse ended it."""
        is_current = self._current(number) is not None
        if is_current and error is not None and self.state is LinkState.LEAVING:
            self._lose_connection(error, now)  # the last message may be lost
        else:
            super().closed(number, error, now)

    # -- time ------------------------------------------------------------------------------------

    def next_deadline(self, now: float) -> float:
        """Return when to call `tick` (inf: not before another input)."""
        if self.state is LinkState.LEFT:
            return math.inf
        return min(super().next_deadline(now), self._leave_by)

    def tick(self, now: float) -> None:
        """Act on the deadlines that are over; too early is harmless."""
        if now >= self._leave_by and self.state is not LinkState.LEFT:
            self._finish_leaving(now)
        else:
            super().tick(now)

    # -- the connection --------------------------------------------------------------------------

    def _on_open(self, connection: LinkConnection, now: float) -> None:
        if self._last_message is not None:
            self._send_leave(self._last_message, self._leave_by)
        else:
            self._send_beat(connection, now)  # the state may have changed since the hello

    def _on_loss(
        self, connection: LinkConnection, error: TorchFTError, now: float, *, everywhere: bool
    ) -> None:
        """Report the trouble; the link of a node that is refused ends (L20)."""
        was_steady = now - connection.opened_at > STEADY_S
        is_refused = isinstance(error, RequestRefused) and not was_steady
        is_distrusted = isinstance(error, Unauthorized) and everywhere
        is_final = is_refused or (is_distrusted and not self._attempts.was_open)
        self._orders.append(DeliverNews(LinkTrouble(error, is_final)))
        if is_final:
            self._finish_leaving(now)

    def _on_better(self, address: str, now: float) -> None:
        """Inform the lighthouse, which sends all agents of the run there (L21)."""
        self._orders.append(RunMove(address))

    def _go_back(self, move: RunMove, now: float) -> None:
        """Connect to the earlier lighthouse; only to one of this agent's list."""
        addresses = self.config.lighthouses
        address = move.address if move.address in addresses else addresses[0]
        self._log("info", f"lighthouse {address} accepts this run again, returning to it")
        self._route.return_to(address)
        self._close_connection()
        self._connect(now)
