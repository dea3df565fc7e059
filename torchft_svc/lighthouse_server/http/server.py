"""Serves the dashboard and the HTTP API with uvicorn, in the event loop that runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from torchft_svc.host.address import HostPort, listen
from torchft_svc.host.tasks import Tasks
from torchft_svc.lighthouse_server.http.connection import KEEP_ALIVE_S, LimitedConnection
from torchft_svc.rpc.security import Security

# Of connections that nobody has accepted yet.
BACKLOG = 128
# The head of a request; a token has up to 1 KB.
MAX_HEAD_BYTES = 16 * 1024
# What the system buffers for a reader; ten updates of a large job.
SEND_BUFFER_BYTES = 256 * 1024
# A peer that acknowledges nothing for so long is gone.
DEAD_AFTER_MS = 20_000
# Answers that are nearly out at the end may go out.
GRACE_S = 1
_TICK_S = 1.0


class _Embedded(uvicorn.Server):
    """A server whose process has other things to do: signals are the service's, and the time is
    looked at once a second, for the header Date, instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ends = asyncio.Event()

    def end(self) -> None:
        """End the server soon."""
        self.should_exit = True
        self._ends.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ends.wait(), _TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_http(app: ASGIApp, bind: HostPort, security: Security) -> AsyncIterator[HostPort]:
    """Serve until the block is left; gives the address with the port that was bound.

    Raises:
        AddressError: nothing can be bound there.
        ConfigError: ``security`` has a CA and no certificate.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it reports its start, else
    config = uvicorn.Config(
        app,
        http=LimitedConnection,
        ws="none",
        lifespan="off",
        loop="none",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    config.load()
    config.ssl = security.server_context()
    listener = _listen(bind)
    server = _Embedded(config)
    async with Tasks() as tasks:
        running = tasks.start(server.serve(sockets=[listener]), "http")
        try:
            yield HostPort(bind.host, listener.getsockname()[1])
        finally:
            server.end()
            await asyncio.wait([running], timeout=3 * GRACE_S)
            listener.close()


def _listen(bind: HostPort) -> socket.socket:
    """Return a socket that listens there; connections inherit its options."""
    listener = listen(bind, BACKLOG)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_MS)
    listener.setblocking(False)
    return listener
