"""An agent's link to the lighthouses: it tells its state, and hears of the worlds of its run.

The protocol is declarative: after each reconnect, to the same lighthouse or another one, the whole
state is told again. Pauses and the order of addresses are those of a manager's link (rule F2).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

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
from torchft_svc.core.quorum.manager.lighthouse_link import (
    LEAVE_TIMEOUT_S,
    LOG_AGAIN_S,
    MAX_WANTED_INTERVAL_S,
    WELCOME_TIMEOUT_S,
)
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.core.route import LOOK_BACK_S, Backoff, Route
from torchft_svc.errors import NotLeader, RequestRefused, TorchFTError, Unauthorized, Unreachable
from torchft_svc.host.address import split_addresses
from torchft_svc.host.loop import Background
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import keepalive_of_beating_ms, open_aio_channel
from torchft_svc.rpc.client_stream import (
    BROKEN,
    EOF,
    MAX_OPENINGS,
    Stream,
    broken_stream,
    is_untold,
    raise_status,
)
from torchft_svc.rpc.codec_rendezvous import (
    agent_hello_to_wire,
    agent_message_to_wire,
    world_news_from_wire,
)
from torchft_svc.rpc.parsing import checked, parser
from torchft_svc.rpc.probing import would_take
from torchft_svc.rpc.security import Security, security_or_environment
from torchft_svc.rpc.status import to_error

log = logging.getLogger(__name__)

# A beat comes so much before it is due: what is late for a moment is not taken for silence.
_BEAT_SHARE = 0.9
# An agent that is refused sooner after its welcome breaks the rules.
STEADY_S = 1.0
# A connection that was told to end, and goes on, is told again.
CANCEL_AGAIN_S = 0.5
_ANSWER = "what the lighthouse said"


@dataclass(frozen=True, slots=True)
class LinkTrouble:
    """No lighthouse is connected, because of ``error``; told again and again until one is.

    ``is_final``: the lighthouse refuses this node, and the link does not try again.
    """

    error: TorchFTError
    is_final: bool = False


LinkNews = WorldNews | LinkTrouble


class RendezvousLink:
    """Connects when it is first told a state; its methods may be called on any thread.

    ``endpoint``: a lighthouse, or several with commas between. ``on_news`` gets `World`s and other
    news, one after the other, on the thread of the services' event loop: it must not wait. The
    first news of each connection is an `AgentWelcome`. After a `RunClosed` and after a final
    `LinkTrouble` there are no more news.

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
        self._addresses = split_addresses(endpoint)
        self._security = security_or_environment(security)
        self._run_id = run_id
        self._node = node
        self._settings = settings
        self._on_news = on_news
        self._lock = threading.Lock()
        self._background: Background[_Connections] | None = None
        self._is_closed = False

    def send_state(self, state: AgentState) -> None:
        """The lighthouse is told ``state`` soon, and again with every beat; the newest counts."""
        with self._lock:
            if self._is_closed:
                return
            if self._background is not None:
                self._background.value.tell(state)
                return
            self._background = Background(self._connected(state))

    @contextlib.asynccontextmanager
    async def _connected(self, state: AgentState) -> AsyncIterator[_Connections]:
        """While the block runs, the link looks for lighthouses and stays connected."""
        greeting = AgentHello(self._node, self._settings, state)
        connections = _Connections(
            self._addresses, self._security, self._run_id, greeting, self._on_news
        )
        running = asyncio.create_task(connections.run())
        try:
            yield connections
        finally:
            while not running.done():  # `wait_for` may lose a cancellation, before Python 3.12
                running.cancel()
                await asyncio.wait([running], timeout=CANCEL_AGAIN_S)

    def send_leave(self, leave: AgentLeave, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Tell the lighthouse that this node is gone for good, and close; never raises.

        A lighthouse that does not answer is waited for until ``timeout_s``.
        """
        with self._lock:
            background = None if self._is_closed else self._background
        if background is not None:
            background.value.leave(leave)
            background.value.over.wait(timeout_s)
        self.close()

    def close(self) -> None:
        """End the connection without a word: the others take this node for lost. May be called
        twice, but not by ``on_news``, which is not called any more when this returns."""
        with self._lock:
            self._is_closed = True
            background, self._background = self._background, None
        if background is not None:
            background.close()


class _Connections:
    """One connection after the other, on the event loop; `tell` and `leave` on any thread."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        security: Security,
        run_id: str,
        hello: AgentHello,
        on_news: Callable[[LinkNews], None],
    ) -> None:
        self.over = threading.Event()  # it is not connected, and will not be
        self._route = Route(addresses)
        self._backoff = Backoff(random.random)
        self._security = security
        self._run_id = run_id
        self._hello = hello
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._state = hello.state
        self._leave: AgentLeave | None = None
        self._is_leaving = False  # the lighthouse was told, or will be
        self._has_left = False  # and has ended the stream
        self._worlds: dict[int, World] = {}  # by round: the last two that were told
        self._found: str | None = None  # an earlier lighthouse, for all agents of the run
        self._move: RunMove | None = None
        self._has_more = asyncio.Event()
        self._is_closed_run = False
        self._is_open = False
        self._was_open = False
        self._opened_at: float | None = None  # the connection that was the last to be welcomed
        self._failing_since: float | None = None
        self._logged_at = 0.0

    def tell(self, state: AgentState) -> None:
        self._state = state
        self._loop.call_soon_threadsafe(self._has_more.set)

    def leave(self, leave: AgentLeave) -> None:
        self._leave = leave
        self._loop.call_soon_threadsafe(self._has_more.set)

    async def run(self) -> None:
        """Stay connected until there is nothing more to be said."""
        try:
            while not self._is_closed_run:
                error = await self._connection(self._route.current)
                if self._is_closed_run or self._has_left:
                    return
                if self._move is not None:
                    self._go_back(self._move)
                    continue
                if self._lose(error):
                    return
                await asyncio.sleep(self._backoff.pause_s())
        finally:
            self.over.set()

    # -- one connection --------------------------------------------------------------------------

    async def _connection(self, address: str) -> TorchFTError:
        """From its beginning to its end; returns why it is over."""
        patience_ms = keepalive_of_beating_ms(len(self._route.addresses))
        channel = open_aio_channel(address, self._security, patience_ms)
        try:
            await self._session_or_reason(channel)
        except grpc.aio.AioRpcError as error:
            traceback.clear_frames(error.__traceback__)  # in them is the stream, which is over
            return _to_error(error, address)
        except (*BROKEN, RequestRefused) as error:  # refused: it does not talk as a lighthouse
            return broken_stream(error, address)
        except asyncio.TimeoutError:
            return Unreachable("lighthouse", address, "it does not answer")
        except Exception as error:
            log.exception("the connection to %s failed", address)
            return Unreachable("lighthouse", address, f"this agent failed: {error!r}")
        finally:
            self._is_open = False
            await channel.close(grace=None)
        return Unreachable("lighthouse", address, "it ended the session")

    async def _session_or_reason(self, channel: grpc.aio.Channel) -> None:
        for _ in range(MAX_OPENINGS - 1):
            try:
                return await self._session(channel)
            except grpc.aio.AioRpcError as error:
                if not is_untold(error) or self._is_open:
                    raise
        return await self._session(channel)

    async def _session(self, channel: grpc.aio.Channel) -> None:
        """One stream, from hello to its end."""
        open_stream: Any = channel.stream_stream(
            "/torchft.LighthouseService/Rendezvous",
            request_serializer=pb.AgentRequest.SerializeToString,
            response_deserializer=parser(pb.AgentNews),
        )
        stream = open_stream(metadata=self._security.metadata)
        tasks: list[asyncio.Task[None]] = []
        try:
            welcome = await self._introduce(stream)
            self._opened(welcome)
            tasks.append(asyncio.create_task(self._keep_sending(stream, welcome.beat_interval_s)))
            tasks.append(asyncio.create_task(self._look_back()))
            while not self._is_closed_run:
                message = checked(await stream.read(), _ANSWER)
                if message is EOF:
                    break
                self._receive(world_news_from_wire(message))
            else:
                return
            await raise_status(stream)
            self._has_left = self._is_leaving and self._move is None
        except asyncio.InvalidStateError:  # it ended before the hello was sent: say why
            await raise_status(stream)
        finally:
            for task in tasks:
                task.cancel()
            stream.cancel()

    async def _introduce(self, stream: Stream) -> AgentWelcome:
        state = self._state
        world = self._worlds.get(state.round)
        hello = AgentHello(self._hello.node, self._hello.settings, state, world)
        told = stream.write(agent_hello_to_wire(self._run_id, hello))
        await asyncio.wait_for(told, WELCOME_TIMEOUT_S)
        first = checked(await asyncio.wait_for(stream.read(), WELCOME_TIMEOUT_S), _ANSWER)
        if first is EOF:
            await raise_status(stream)
            raise RequestRefused("it ended the session")
        news = world_news_from_wire(first)
        if not isinstance(news, AgentWelcome):
            raise RequestRefused("what the lighthouse said begins without a welcome")
        return news

    async def _keep_sending(self, stream: Stream, interval_s: float) -> None:
        """Tell what has changed at once, and the state again with every beat."""
        wait_s = _BEAT_SHARE * min(max(interval_s, 0.01), MAX_WANTED_INTERVAL_S)
        with contextlib.suppress(*BROKEN):  # whoever reads learns why
            while True:
                if self._leave is not None:
                    self._is_leaving = True
                    await stream.write(agent_message_to_wire(self._leave))
                    await stream.done_writing()
                    return
                await stream.write(agent_message_to_wire(self._state))
                if self._found is not None:
                    await stream.write(agent_message_to_wire(RunMove(self._found)))
                    self._found = None
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._has_more.wait(), wait_s)
                self._has_more.clear()

    async def _look_back(self) -> None:
        """While it is not with the first lighthouse of the list: whether an earlier one would take
        the run, so that nodes that are new and nodes that are here meet (rule L21)."""
        while addresses := self._route.preferred:
            await asyncio.sleep(LOOK_BACK_S * (1 + random.random()) / 2)  # noqa: S311
            looks = (would_take(at, DEFAULT_JOB, self._security, LOOK_BACK_S) for at in addresses)
            takes = await asyncio.gather(*looks)
            for address, is_taken in zip(addresses, takes, strict=True):
                if is_taken:
                    self._found = address
                    self._has_more.set()
                    return

    def _receive(self, news: WorldNews | None) -> None:
        if news is None:
            return
        if isinstance(news, RunMove):
            self._move = news
            return
        if isinstance(news, World):
            newest = max(self._worlds, default=0)
            self._worlds = {
                round_: world for round_, world in self._worlds.items() if round_ == newest
            }
            self._worlds[news.round] = news
        elif isinstance(news, RunWaiting | WarmUp):
            self._worlds.clear()  # what goes on without this node is no news elsewhere (L13)
        self._is_closed_run = isinstance(news, RunClosed)
        self._pass_on(news)

    def _pass_on(self, news: LinkNews) -> None:
        try:
            self._on_news(news)
        except Exception:
            log.exception("the agent failed to take %s", type(news).__name__)

    # -- connecting again ------------------------------------------------------------------------

    def _opened(self, welcome: AgentWelcome) -> None:
        self._is_open = True
        self._opened_at = time.monotonic()
        self._route.worked()
        self._backoff.tried(failed=False)
        if self._failing_since is not None:
            log.warning("connected to lighthouse %s", self._route.current)
        self._was_open, self._failing_since = True, None
        self._pass_on(welcome)

    def _go_back(self, move: RunMove) -> None:
        """All agents of the run go to an earlier lighthouse; only to one of this agent's list."""
        self._move = None
        addresses = self._route.addresses
        address = move.address if move.address in addresses else addresses[0]
        log.info("lighthouse %s accepts this run again, returning to it", address)
        self._route.go_back(address)

    def _lose(self, error: TorchFTError) -> bool:
        """Choose whom to try next; whether there is no use in trying again."""
        all_failed = not self._route.go_on(error.leader if isinstance(error, NotLeader) else "")
        if all_failed:
            self._backoff.tried(failed=True)
        is_distrusted = isinstance(error, Unauthorized) and all_failed and not self._was_open
        is_final = is_distrusted or (isinstance(error, RequestRefused) and not self._was_steady())
        self._log_trouble(error)
        self._pass_on(LinkTrouble(error, is_final))
        return is_final

    def _was_steady(self) -> bool:
        """Whether the connection that has just ended was good for a while: an agent that did not
        read what it was told is refused, but not for good."""
        opened_at, self._opened_at = self._opened_at, None
        return opened_at is not None and time.monotonic() - opened_at > STEADY_S

    def _log_trouble(self, error: TorchFTError) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = self._logged_at = now
            what = "lost the lighthouse" if self._was_open else "there is no lighthouse"
            log.warning("%s: %s", what, error)
        elif now - self._logged_at >= LOG_AGAIN_S:
            self._logged_at = now
            log.warning("no lighthouse for %.0f s: %s", now - self._failing_since, error)


def _to_error(error: grpc.aio.AioRpcError, address: str) -> TorchFTError:
    if is_untold(error):
        return broken_stream(error, address)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # it has not heard this agent in time
        told = one_line(error.details() or "")
        return Unreachable("lighthouse", address, f"it ended the session: {told}")
    return to_error(error, peer="lighthouse", address=address, action="rendezvous", timeout_s=0.0)
