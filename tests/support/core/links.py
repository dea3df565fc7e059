"""Plays links to lighthouses: a machine, its orders as they come, and a clock that tests move."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torchft_svc.core.launch.agent_link import MIN_BEAT_INTERVAL_S, AgentLink
from torchft_svc.core.launch.world import (
    AgentLeave,
    AgentState,
    AgentStatus,
    AgentWelcome,
    Node,
    RunSettings,
)
from torchft_svc.core.link import LinkConfig, LinkMachine, Log, SendBeat
from torchft_svc.core.quorum.manager.lighthouse_link import ManagerLink, ManagerLinkConfig
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.core.quorum.types import GroupRequest, Quorum, Resumed
from torchft_svc.errors import TorchFTError, Unreachable

CONFIG = ManagerLinkConfig(
    lighthouses=("a",),
    store_address="store",
    group_world_size=2,
    heartbeat_interval_s=0.1,
    connect_timeout_s=3.0,
    quorum_retries=0,
    min_replicas=0,
)
ASK = GroupRequest(
    round=7, step=3, shrink_only=False, commit_failures=0, new_incarnation=False, has_history=True
)
REFUSED = Unreachable("lighthouse", "a", "refused")
NODE = Node(node_id="n", host="here", num_workers=2)
SETTINGS = RunSettings(min_nodes=1, max_nodes=4)
STATE = AgentState(status=AgentStatus.JOINING)


class LinkPlay(ABC):
    """A link of any kind; log lines are kept apart, in ``log``."""

    interval_s: float  # of its beats, if the lighthouse wants none
    looks_at_once: bool

    def __init__(self, machine: LinkMachine[Any]) -> None:
        self.machine: Any = machine
        self.log: list[str] = []
        self.now = 0.0

    def __call__(self, act: Callable[[Any], object]) -> list[Any]:
        act(self.machine)
        orders = self.machine.take_orders()
        self.log += [order.text for order in orders if isinstance(order, Log)]
        return [order for order in orders if not isinstance(order, Log)]

    def until(self, at: float) -> list[Any]:
        """The orders that the time alone brings."""
        found = []
        while (due := self.machine.next_deadline(self.now)) <= at:
            assert due < math.inf
            self.now = max(self.now, due)
            found += self(lambda machine: machine.tick(self.now))
        self.now = at
        return found

    @abstractmethod
    def start(self) -> list[Any]:
        """Begin to connect."""

    @abstractmethod
    def open(self, number: int = 1, interval_s: float = 0.0) -> list[Any]:
        """Welcome the client, over connection ``number``."""

    @abstractmethod
    def leave(self) -> list[Any]:
        """Leave for good."""

    def opened(self) -> LinkPlay:
        """Connect with the first lighthouse."""
        self.start()
        self.open()
        return self

    def close(self, number: int = 1, error: TorchFTError | None = REFUSED) -> list[Any]:
        return self(lambda machine: machine.closed(number, error, self.now))

    def probed(self, *accepting: str, number: int = 1) -> list[Any]:
        return self(lambda machine: machine.probed(number, accepting, self.now))


class ManagerPlay(LinkPlay):
    """The link of a group's manager."""

    interval_s = CONFIG.heartbeat_interval_s
    looks_at_once = True

    def __init__(
        self,
        *lighthouses: str,
        retries: int = 0,
        chance: float = 1.0,
        resumed: Resumed | None = None,
        wall_offset_s: float = 0.0,
        is_spare: bool = False,
    ) -> None:
        self.num_incarnations = 0
        config = dataclasses.replace(
            CONFIG,
            lighthouses=lighthouses or ("a",),
            quorum_retries=retries,
            resumed=resumed,
            wall_offset_s=wall_offset_s,
            is_spare=is_spare,
        )
        super().__init__(ManagerLink(config, self._name, lambda: chance, address="me"))

    def _name(self) -> str:
        self.num_incarnations += 1
        return f"g:{self.num_incarnations}"

    def start(self) -> list[Any]:
        return self(lambda machine: machine.start(self.now))

    def open(self, number: int = 1, interval_s: float = 0.0) -> list[Any]:
        return self(lambda machine: machine.welcomed(number, interval_s, self.now))

    def opened(self) -> ManagerPlay:
        super().opened()
        return self

    def leave(self) -> list[Any]:
        leave = Leave("it is ordered to", ends=True)
        return self(lambda machine: machine.leave(leave, self.now))

    def ask(self, ask: GroupRequest = ASK, timeout_s: float = 60.0) -> list[Any]:
        return self(lambda machine: machine.ask_quorum(ask, timeout_s, self.now))

    def answer(
        self, outcome: Quorum | TorchFTError, question: int = 1, number: int = 1
    ) -> list[Any]:
        return self(lambda machine: machine.answered(number, question, outcome, self.now))


class AgentPlay(LinkPlay):
    """The link of an agent of a launched run."""

    interval_s = MIN_BEAT_INTERVAL_S
    looks_at_once = False

    def __init__(self, *lighthouses: str, chance: float = 1.0, wall_offset_s: float = 0.0) -> None:
        config = LinkConfig(
            lighthouses=lighthouses or ("a",),
            heartbeat_interval_s=MIN_BEAT_INTERVAL_S,
            wall_offset_s=wall_offset_s,
        )
        super().__init__(AgentLink(config, NODE, SETTINGS, lambda: chance))

    def start(self) -> list[Any]:
        return self.report()

    def report(self, state: AgentState = STATE) -> list[Any]:
        """Report a state of the agent; the first one starts the link."""
        return self(lambda machine: machine.report_state(state, self.now))

    def open(self, number: int = 1, interval_s: float = 0.0) -> list[Any]:
        return self.receive(AgentWelcome(interval_s), number)

    def opened(self) -> AgentPlay:
        super().opened()
        return self

    def receive(self, news: Any, number: int = 1) -> list[Any]:
        return self(lambda machine: machine.received(number, news, self.now))

    def leave(self, **kind: Any) -> list[Any]:
        return self(lambda machine: machine.leave(AgentLeave("it has enough", **kind), self.now))


def without_beats(orders: list[Any]) -> list[Any]:
    return [order for order in orders if not isinstance(order, SendBeat)]
