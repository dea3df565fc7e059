"""Agents of a launched run without workers: they report a state, and record what they receive."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchft_svc.coordination import LighthouseServer
from torchft_svc.core.launch.agent_link import LinkNews
from torchft_svc.core.launch.world import (
    AgentLeave,
    AgentState,
    AgentStatus,
    Node,
    RunSettings,
    World,
)
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.elastic.rendezvous.link import RendezvousLink
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.commands import ask
from torchft_svc.rpc.security import Security

WAIT_S = 30.0
_ports = itertools.count(20_000)


@contextlib.contextmanager
def lighthouse(bind: str = "127.0.0.1:0", heartbeat_timeout_ms: int = 5000) -> Iterator[str]:
    """A lighthouse in this process; its address."""
    with LighthouseServer(bind, 1, heartbeat_timeout_ms=heartbeat_timeout_ms) as server:
        yield server.address().removeprefix("http://")


def runs_at(address: str) -> Sequence[pb.RunStatus]:
    """Return the runs of the lighthouse there."""
    request, answer = pb.LighthouseStatusRequest(), pb.LighthouseStatusResponse
    return ask("lighthouse", address, Security(), DEFAULT_JOB, request, answer).runs


class Agent:
    """One node of run ``run``; leaving the block closes its link, and sends nothing."""

    def __init__(
        self,
        address: str,
        name: str,
        *,
        run: str = "run",
        min_nodes: int = 1,
        max_nodes: int = 4,
        join_timeout_s: float = 60.0,
        join_window_s: float = 0.2,
        rank: int | None = None,
        host: str = "127.0.0.1",
        security: Security | None = None,
    ) -> None:
        node = Node(node_id=name, host=host, num_workers=2, rank=rank)
        settings = RunSettings(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            join_timeout_s=join_timeout_s,
            join_window_s=join_window_s,
        )
        self.name = name
        self.received: list[LinkNews] = []
        self._has_received = threading.Condition()
        self.link = RendezvousLink(address, run, node, settings, self._receive, security)

    def _receive(self, news: LinkNews) -> None:
        with self._has_received:
            self.received.append(news)
            self._has_received.notify_all()

    def report(self, status: AgentStatus, world: World | None = None) -> None:
        """Report ``status``; ``world``: the one that it is in, and has reached."""
        state = AgentState(
            status=status,
            round=0 if world is None else world.round,
            reached=world is not None,
            store_port=next(_ports),
        )
        self.link.send_state(state)

    def await_news(self, kind: type[Any], holds: Callable[[Any], bool] = lambda _: True) -> Any:
        """The first news of this kind for which ``holds``, of all that has come or comes soon."""
        deadline = time.monotonic() + WAIT_S
        with self._has_received:
            while True:
                for news in self.received:
                    if isinstance(news, kind) and holds(news):
                        return news
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"{self.name} received {self.received}, no such {kind.__name__}"
                self._has_received.wait(left_s)

    def work(self, after: int = 0) -> World:
        """Wait for a world later than round ``after``, and report that it is reached."""
        world: World = self.await_news(World, lambda world: world.round > after)
        self.report(AgentStatus.WORKING, world)
        return world

    def leave(self, **kind: Any) -> None:
        self.link.send_leave(AgentLeave("it has enough", **kind), WAIT_S)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
