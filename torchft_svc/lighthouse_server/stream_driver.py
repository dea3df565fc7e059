"""What the drivers of both cores of a lighthouse share: streams, inputs, and one timer."""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from torchft_svc.core.streams import EndStream
from torchft_svc.core.timer import DeadlineTimer
from torchft_svc.errors import NotLeader, TorchFTError
from torchft_svc.host.tasks import call_later
from torchft_svc.rpc.heavy_writes import HeavyWrites
from torchft_svc.rpc.outbox import Outbox, Unread

_Request = TypeVar("_Request")


class StreamCore(Protocol):
    """Decides about streams, which are numbers; each input returns orders."""

    def opened(self, stream: int, name: str, hello: Any, now: float, /) -> tuple[Any, ...]: ...
    def received(self, stream: int, message: Any, now: float, /) -> tuple[Any, ...]: ...
    def closed(self, stream: int, now: float, error: TorchFTError | None, /) -> tuple[Any, ...]: ...
    def tick(self, now: float, /) -> tuple[Any, ...]: ...
    def next_deadline(self) -> float | None: ...


_Core = TypeVar("_Core", bound=StreamCore)


class StreamDriver(ABC, Generic[_Core]):
    """Owns a core; to be used on one event loop.

    For each input it calls the core, executes the orders, and sets the timer. ``check_leads``
    raises `NotLeader` where another lighthouse may lead: it is called before every input, for this
    process may just have been thawed. ``unread`` and ``heavy_writes`` bound what the streams of all
    drivers of a lighthouse have not read, and are being sent.
    """

    def __init__(
        self,
        core: _Core,
        check_leads: Callable[[], None],
        unread: Unread,
        heavy_writes: HeavyWrites,
    ) -> None:
        self._core = core
        self._check_leads = check_leads
        self._unread = unread
        self.heavy_writes = heavy_writes
        self._numbers = itertools.count()  # of streams and calls
        self._streams: dict[int, Outbox] = {}
        self._timer = DeadlineTimer(call_later, lambda: self._feed_last(self._core.tick))

    @abstractmethod
    def end_lead(self, error: TorchFTError) -> None:
        """Inform all clients that another lighthouse leads, and forget them."""

    @abstractmethod
    def _execute_orders(self, orders: tuple[Any, ...]) -> None:
        """Execute the orders of one input of the core, in their order."""

    @property
    def num_streams(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def close(self) -> None:
        """Stop the timer; callers that still wait are cancelled by the server's stop."""
        self._timer.stop()

    def end_stream(self, order: EndStream) -> None:
        """End a stream: with an error, or in good order after what was sent."""
        outbox = self._streams[order.stream]
        if order.error is None:
            outbox.finish()
        else:
            outbox.fail(order.error)

    async def _serve(
        self,
        name: str,
        hello: object,
        requests: AsyncIterator[_Request],
        parse: Callable[[_Request], object],
        context: grpc.aio.ServicerContext[Any, Any],
        weighed_as: str,
    ) -> None:
        """Serve a stream of ``name``, which began with ``hello``, to its end.

        ``parse`` makes a message for the core of a request; ``weighed_as``: whose news these are.

        Raises:
            RequestRefused: the client breaks the protocol, does not read, or cannot take part.
        """
        stream, outbox = next(self._numbers), Outbox(self.heavy_writes, weighed_as, self._unread)
        self._streams[stream] = outbox
        error: TorchFTError | None = None

        def receive(request: _Request) -> bool:
            message = parse(request)
            self._feed(lambda now: self._core.received(stream, message, now))
            return True

        try:
            self._feed(lambda now: self._core.opened(stream, name, hello, now))
            await outbox.exchange(requests, receive, context)
        except TorchFTError as caught:
            error = caught
            raise
        finally:
            self._feed_last(lambda now: self._core.closed(stream, now, error))
            del self._streams[stream]

    def _feed(self, call_core: Callable[[float], tuple[Any, ...]]) -> None:
        """Pass an input to the core, if this lighthouse still leads, and execute its orders."""
        try:
            self._check_leads()
        except NotLeader as error:
            self.end_lead(error)
            raise
        self._execute(call_core(time.monotonic()))

    def _feed_last(self, call_core: Callable[[float], tuple[Any, ...]]) -> None:
        """Pass an input from somebody who cannot receive an error any more."""
        with contextlib.suppress(NotLeader):
            self._feed(call_core)

    def _execute(self, orders: tuple[Any, ...]) -> None:
        self._execute_orders(orders)
        self._timer.set(self._core.next_deadline(), time.monotonic())
