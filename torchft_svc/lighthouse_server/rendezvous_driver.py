"""Drives launched runs: messages of agents and their worlds go between gRPC and the core."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from torchft_svc.core.launch.launched_run import Order, RunStatus, SendNews
from torchft_svc.core.launch.rendezvous import Rendezvous, RendezvousRules
from torchft_svc.core.quorum.session_messages import Drain
from torchft_svc.core.streams import EndStream
from torchft_svc.errors import TorchFTError
from torchft_svc.lighthouse_server.counts import Counts
from torchft_svc.lighthouse_server.run_reports import (
    RunRecord,
    describe_change,
    write_run_report,
)
from torchft_svc.lighthouse_server.stream_driver import StreamDriver
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec_rendezvous import (
    agent_hello_from_wire,
    agent_message_from_wire,
    world_news_to_wire,
)
from torchft_svc.rpc.heavy_writes import HeavyWrites
from torchft_svc.rpc.outbox import Unread, first_message


class RendezvousDriver(StreamDriver[Rendezvous]):
    """The launched runs of a lighthouse; ``on_change`` is called for each change of one."""

    on_change: Callable[[RunRecord], None] = staticmethod(lambda change: None)

    def __init__(
        self,
        config: RendezvousRules,
        check_leads: Callable[[], None],
        unread: Unread,
        heavy_writes: HeavyWrites,
        counts: Counts,
    ) -> None:
        core = Rendezvous(config, time.monotonic())
        super().__init__(core, check_leads, unread, heavy_writes)
        self._counts = counts

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
        weighed_as = f"run {run}"
        await self._serve(run, hello, requests, agent_message_from_wire, context, weighed_as)

    def status(self, run: str) -> list[RunStatus]:
        """What people want to know of ``run``, or of all (empty).

        Raises:
            RequestRefused: there is no such run.
        """
        return self._core.status(run, time.monotonic())

    def drain(self, run: str, node: str, command: Drain) -> None:
        """Let a node of ``run`` end, or all of a host.

        Raises:
            RequestRefused: there is none.
            NotLeader: another lighthouse leads.
        """
        reason, within_s = command.reason, command.within_s
        self._feed(lambda now: self._core.drain(run, node, reason, now, within_s))

    def end_lead(self, error: TorchFTError) -> None:
        self._execute(self._core.lead_ended(error, time.monotonic()))

    def _execute_orders(self, orders: tuple[Order, ...]) -> None:
        for order in orders:
            if isinstance(order, SendNews):
                news = world_news_to_wire(order.news)
                for stream in order.streams:
                    self._streams[stream].add_news(news)
            elif isinstance(order, EndStream):
                self.end_stream(order)
            else:
                write_run_report(order)
                change = describe_change(order)
                if change is not None:
                    self.on_change(change)
                self._counts.record_run_report(order)
