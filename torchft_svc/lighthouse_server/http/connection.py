"""A connection of the HTTP server, with limits that uvicorn's does not have."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# Browsers open up to six each; one with nothing but its first bytes costs 10 KB and a descriptor,
# of which the training needs its own.
MAX_CONNECTIONS = 2000
# Until the head of a request is there.
REQUEST_S = 10.0
# The next request of a page comes within this time, and an answer has been read by then.
KEEP_ALIVE_S = 15
# The name under which an endpoint finds the transport, to end it while it does not read.
TRANSPORT = "transport"


class LimitedConnection(H11Protocol):
    """Ends without a word what sends no request, reads no answer, or comes when there are too
    many."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, TRANSPORT: transport}
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._await_request(KEEP_ALIVE_S + REQUEST_S)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait until it is read
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _await_request(self, limit_s: float = REQUEST_S) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(limit_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
