"""Drives an agent's link to its lighthouses: `AgentLink`, on the services' event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from torchft_svc.core.launch.agent_link import (
    MIN_BEAT_INTERVAL_S,
    AgentLink,
    DeliverNews,
    LinkNews,
    Message,
    Order,
)
from torchft_svc.core.launch.world import (
    AgentHello,
    AgentLeave,
    AgentState,
    AgentWelcome,
    Node,
    RunMove,
    RunSettings,
    WorldNews,
)
from torchft_svc.core.limits import one_line
from torchft_svc.core.link import LEAVE_TIMEOUT_S, ConfirmLeft, Connect, LinkConfig, SendBeat
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.errors import RequestRefused, TorchFTError, Unreachable
from torchft_svc.host.address import split_addresses
from torchft_svc.host.loop import Background
from torchft_svc.host.tasks import Tasks
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.client_stream import broken_stream, is_reason_dropped
from torchft_svc.rpc.codec_rendezvous import (
    agent_hello_to_wire,
    agent_message_to_wire,
    world_news_from_wire,
)
from torchft_svc.rpc.lighthouse_stream import LighthouseStream
from torchft_svc.rpc.link_driver import LinkDriver
from torchft_svc.rpc.security import Security, security_or_environment
from torchft_svc.rpc.status import to_error

log = logging.getLogger(__name__)


class RendezvousLink:
    """An agent's way to the lighthouse: it connects with the first state that is sent.

    Its methods may be called on any thread.

    ``endpoint``: a lighthouse, or several with commas between. ``on_news`` gets `World`s and other
    news, one after the other, on the thread of the services' event loop: it must not wait. See
    `AgentLink` for their order.

    Raises:
        AddressError: ``endpoint`` cannot be parsed.
        ConfigError: the environment's TLS settings or token cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        node: Node,
        settings: RunSettings,
        on_news: Callable[[LinkNews], None],
        security: Security | None = None,
    ) -> None:
        self._config = LinkConfig(
            lighthouses=split_addresses(endpoint),
            heartbeat_interval_s=MIN_BEAT_INTERVAL_S,
            wall_offset_s=time.time() - time.monotonic(),
        )
        self._security = security_or_environment(security)
        self._run_id = run_id
        self._node = node
        self._settings = settings
        self._on_news = on_news
        self._lock = threading.Lock()
        self._background: Background[_AgentLinkDriver] | None = None
        self._is_closed = False

    def send_state(self, state: AgentState) -> None:
        """Send ``state`` soon, and again with every beat; the newest counts."""
        with self._lock:
            if self._is_closed:
                return
            if self._background is None:
                self._background = Background(self._driven())
            self._background.value.feed_from_thread(
                lambda machine, now: machine.report_state(state, now)
            )

    @contextlib.asynccontextmanager
    async def _driven(self) -> AsyncIterator[_AgentLinkDriver]:
        """Look for lighthouses and stay connected, while the block runs."""
        draw = random.SystemRandom().random
        machine = AgentLink(self._config, self._node, self._settings, draw)
        async with Tasks() as tasks:
            driver = _AgentLinkDriver(
                machine,
                self._security,
                tasks,
                self._run_id,
                self._on_news,
            )
            try:
                yield driver
            finally:
                driver.stop()

    def send_leave(self, leave: AgentLeave, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Inform the lighthouse that this node is gone for good, and close; never raises.

        A lighthouse that does not answer is waited for until ``timeout_s``.
        """
        with self._lock:
            background = None if self._is_closed else self._background
        if background is not None:
            driver = background.value
            driver.feed_from_thread(lambda machine, now: machine.leave(leave, now, timeout_s))
            driver.has_left.wait(timeout_s)
        self.close()

    def close(self) -> None:
        """End the connection without a word: for the others, this node is lost.

        May be called twice, but not by ``on_news``, which is not called any more when this returns.
        """
        with self._lock:
            self._is_closed = True
            background, self._background = self._background, None
        if background is not None:
            background.close()


class _AgentLinkDriver(LinkDriver[AgentLink]):
    def __init__(
        self,
        machine: AgentLink,
        security: Security,
        tasks: Tasks,
        run_id: str,
        on_news: Callable[[LinkNews], None],
    ) -> None:
        super().__init__(machine, DEFAULT_JOB, security, tasks)
        self.run_id = run_id
        self.has_left = threading.Event()
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()

    def feed_from_thread(self, input_: Callable[[AgentLink, float], object]) -> None:
        """Pass an input to the machine soon; may be called on any thread."""
        self._loop.call_soon_threadsafe(self.feed, input_)

    def stop(self) -> None:
        """Accept no more inputs, and let nobody wait."""
        super().stop()
        self.has_left.set()

    def _execute_own(self, order: Order) -> None:
        if isinstance(order, DeliverNews):
            try:
                self._on_news(order.news)
            except Exception:
                log.exception("the agent failed to handle %s", type(order.news).__name__)
        elif isinstance(order, ConfirmLeft):
            self.has_left.set()
        else:
            self.send(order)

    async def _talk(self, connection: Connect, channel: grpc.aio.Channel) -> TorchFTError | None:
        stream = _AgentStream(self, connection, channel, self._security)
        self._transports[connection.connection] = stream
        return await stream.run()


class _AgentStream(LighthouseStream[AgentLeave | RunMove]):
    """One stream of an agent (rule L19)."""

    def __init__(
        self,
        driver: _AgentLinkDriver,
        connection: Connect,
        channel: grpc.aio.Channel,
        security: Security,
    ) -> None:
        kinds = pb.AgentRequest, pb.AgentNews
        super().__init__(channel, connection.address, "Rendezvous", kinds, security.metadata)
        self._driver = driver
        self._number = connection.connection

    def _make_hello(self) -> pb.AgentRequest:
        hello: AgentHello = self._driver.machine.hello()
        return agent_hello_to_wire(self._driver.run_id, hello)

    def _introduced(self) -> None:
        self._driver.feed(lambda machine, now: machine.introduced(self._number, now))

    def _encode(self, message: Message) -> pb.AgentRequest:
        if isinstance(message, SendBeat):
            state = self._driver.machine.agent_state
            assert state is not None
            return agent_message_to_wire(state)
        return agent_message_to_wire(message)

    def _receive(self, news: Any, *, is_first: bool) -> None:
        received: WorldNews | None = world_news_from_wire(news)
        if is_first and not isinstance(received, AgentWelcome):
            raise RequestRefused("what the lighthouse sent begins without a welcome")
        if received is not None:
            self._driver.feed(lambda machine, now: machine.received(self._number, received, now))

    def _to_error(self, error: grpc.aio.AioRpcError) -> TorchFTError:
        """Return why the stream has ended. A refusal is one of this agent (L20), not of the
        connection as with a manager."""
        address = self._address
        if is_reason_dropped(error):
            return broken_stream(error, address)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # this agent was silent for too long
            reason = one_line(error.details() or "")
            return Unreachable("lighthouse", address, f"it ended the session: {reason}")
        peer, action = "lighthouse", "rendezvous"
        return to_error(error, peer=peer, address=address, action=action, timeout_s=0.0)
