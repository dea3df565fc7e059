"""Drives launched runs: carries what agents tell, and their worlds, between gRPC and the core."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from torchft_svc.core.rendezvous import Rendezvous, RendezvousRules
from torchft_svc.core.rendezvous_orders import Orders, RunStatus, SendNews
from torchft_svc.core.session_orders import EndStream
from torchft_svc.core.timer import DeadlineTimer
from torchft_svc.errors import NotLeader, TorchFTError
from torchft_svc.lighthouse_server.run_reports import write_run_report
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec_rendezvous import (
    agent_hello_from_wire,
    agent_message_from_wire,
    world_news_to_wire,
)
from torchft_svc.rpc.heavy_writes import HeavyWrites
from torchft_svc.rpc.outbox import Outbox, Unread, first_message
from torchft_svc.rpc.tasks import call_later


class RendezvousDriver:
    """Owns the core of launched runs; to be used on one event loop.

    ``check_leads``: as for `LighthouseDriver`, whose limits on what is unread and being written,
    ``unread`` and ``heavy_writes``, hold for agents, too.
    """

    def __init__(
        self,
        config: RendezvousRules,
        check_leads: Callable[[], None],
        unread: Unread,
        heavy_writes: HeavyWrites,
    ) -> None:
        self._check_leads = check_leads
        self._core = Rendezvous(config, time.monotonic())
        self._unread = unread
        self._heavy_writes = heavy_writes
        self._numbers = itertools.count()
        self._streams: dict[int, Outbox] = {}
        self._timer = DeadlineTimer(call_later, lambda: self._feed_last(self._core.tick))

    async def attend(
        self,
        requests: AsyncIterator[pb.AgentRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve an agent's stream to its end.

        Raises:
            RequestRefused: the agent breaks the protocol, or does not read, or cannot take part.
        """
        run, hello = agent_hello_from_wire(await first_message(requests))
        # Jobs and runs may have the same name.
        stream, outbox = next(self._numbers), Outbox(self._heavy_writes, f"run {run}", self._unread)
        self._streams[stream] = outbox
        error: TorchFTError | None = None

        def receive(request: pb.AgentRequest) -> bool:
            message = agent_message_from_wire(request)
            if message is not None:
                self._feed(lambda now: self._core.received(stream, message, now))
            return True

        try:
            self._feed(lambda now: self._core.opened(stream, run, hello, now))
            await outbox.exchange(requests, receive, context)
        except TorchFTError as caught:
            error = caught
            raise
        finally:
            self._feed_last(lambda now: self._core.closed(stream, now, error))
            del self._streams[stream]

    def status(self, run: str) -> list[RunStatus]:
        """What people want to know of ``run``, or of all (empty).

        Raises:
            RequestRefused: there is no such run.
        """
        return self._core.status(run, time.monotonic())

    def end_term(self, error: TorchFTError) -> None:
        """Another lighthouse leads: tell all who are here, and forget them."""
        self._carry_out(self._core.term_ended(error, time.monotonic()))

    def close(self) -> None:
        """Stop the timer."""
        self._timer.stop()

    def _feed(self, take: Callable[[float], Orders]) -> None:
        """Let the core ``take`` an input, if this lighthouse still leads."""
        try:
            self._check_leads()
        except NotLeader as error:
            self.end_term(error)
            raise
        self._carry_out(take(time.monotonic()))

    def _feed_last(self, take: Callable[[float], Orders]) -> None:
        """The same; whoever sent the input hears nothing any more."""
        with contextlib.suppress(NotLeader):
            self._feed(take)

    def _carry_out(self, orders: Orders) -> None:
        for order in orders:
            if isinstance(order, SendNews):
                news = world_news_to_wire(order.news)
                for stream in order.streams:
                    self._streams[stream].tell(news)
            elif isinstance(order, EndStream):
                self._end_stream(order)
            else:
                write_run_report(order)
        self._timer.set(self._core.next_deadline(), time.monotonic())

    def _end_stream(self, order: EndStream) -> None:
        outbox = self._streams[order.stream]
        if order.error is None:
            outbox.finish()
        else:
            outbox.fail(order.error)
