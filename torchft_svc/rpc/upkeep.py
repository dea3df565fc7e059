"""Keeps a service's memory flat: what is not in use goes back to the system (rule S8).

It changes what the whole process does with memory, so nothing happens in a program that only hosts
a service: the command line switches it on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from typing import Any

import grpc

from torchft_svc.rpc.status import Handler

# So many streams, and this part of those that were open, leave something behind worth a look: it
# takes 0.1 s for a thousand sessions.
MIN_ENDED, ENDED_PART = 32, 0.25
# Streams end together; one look, when so long none has ended, or they go on ending for longer.
LOOK_AFTER_S, MAX_QUIET_WAITS = 1.0, 10
# One more: gRPC frees the memory of a connection some time after its streams.
LAST_LOOK_AFTER_S = 3.0


class Upkeep:
    """Collects garbage when streams have ended; for one event loop."""

    def __init__(self) -> None:
        self._is_on = False
        self._num_open = 0
        self._num_ended = 0  # since the last look
        self._timer: asyncio.TimerHandle | None = None

    def switch_on(self) -> None:
        """Set up the collector for a service.

        What was imported stays, and a round of a thousand groups makes many objects but few
        cycles: looking through all of them again and again costs a lighthouse a tenth of its time.
        Young ones are looked at often, because gRPC leaves a cycle of five objects behind every
        call. Imports leave a few hundred objects behind, which are not worth a look (10 ms)."""
        gc.freeze()
        gc.set_threshold(5_000, 50, 100)
        gc.enable()  # a program that imports a lot may have switched it off
        self._is_on = True

    def counting(self, handler: Handler) -> Handler:
        """Wrap the ``handler`` of a stream, so that its garbage is collected when it has ended.

        What has lived for long would otherwise be collected hours later.
        """

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
            self._num_open += 1
            try:
                return await handler(request, context)
            finally:
                self._num_open -= 1
                self._num_ended += 1
                self._collect_if_worth_it()

        return answer

    def _collect_if_worth_it(self) -> None:
        enough = max(MIN_ENDED, ENDED_PART * self._num_open)
        if self._is_on and self._timer is None and self._num_ended >= enough:
            self._wait(MAX_QUIET_WAITS)

    def _wait(self, num_waits: int) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_AFTER_S, self._waited, self._num_ended, num_waits)

    def _waited(self, num_ended: int, num_waits: int) -> None:
        if self._num_ended > num_ended and num_waits:
            self._wait(num_waits - 1)
            return
        self._collect()
        self._timer = asyncio.get_running_loop().call_later(LAST_LOOK_AFTER_S, self._collect_again)

    def _collect_again(self) -> None:
        self._collect()
        self._timer = None

    def _collect(self) -> None:
        self._num_ended = 0
        gc.collect()
        _trim()


def _trim() -> None:
    """glibc keeps what is freed, unless asked; other libraries are not asked."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# One for the process, as memory is.
UPKEEP = Upkeep()
