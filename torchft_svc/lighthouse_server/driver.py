"""Drives a lighthouse: its inputs come from gRPC, and its orders go there and to the log."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc

from torchft_svc.core.launch.rendezvous import SETTLE_IN_S, RendezvousRules
from torchft_svc.core.launch.world import MAX_NODES
from torchft_svc.core.quorum.lighthouse.copies import HeldCopies, HeldCopy
from torchft_svc.core.quorum.lighthouse.incidents import Goodput, Incident
from torchft_svc.core.quorum.lighthouse.lighthouse import (
    ID_STRIDE,
    Lighthouse,
    Orders,
    Publish,
    RefuseCall,
    Report,
    Send,
    execute,
    first_quorum_id,
)
from torchft_svc.core.quorum.lighthouse.overview import JobSample, JobStatus
from torchft_svc.core.quorum.lighthouse.pace import Pace
from torchft_svc.core.quorum.session_messages import Drain, Kill, Leave
from torchft_svc.core.quorum.types import Member, QuorumConfig
from torchft_svc.errors import TorchFTError
from torchft_svc.host.tasks import in_turns
from torchft_svc.lighthouse_server.counts import Counts
from torchft_svc.lighthouse_server.rendezvous_driver import RendezvousDriver
from torchft_svc.lighthouse_server.reports import Reports
from torchft_svc.lighthouse_server.run_reports import RunRecord
from torchft_svc.lighthouse_server.stream_driver import StreamDriver
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import answers, quorum_answer
from torchft_svc.rpc.codec_session import (
    hello_from_wire,
    session_message_from_wire,
    session_news_to_wire,
)
from torchft_svc.rpc.codec_status import copy_to_wire
from torchft_svc.rpc.heavy_writes import HeavyWrites
from torchft_svc.rpc.outbox import Unread, first_message
from torchft_svc.telemetry.rpc_errors import RpcErrors


class LighthouseDriver(StreamDriver[Lighthouse]):
    """The `Shell` of the jobs of a lighthouse; ``runs``: of launchers, besides them."""

    def __init__(
        self,
        config: QuorumConfig,
        check_leads: Callable[[], None] = lambda: None,
        settle_in_s: float = SETTLE_IN_S,
    ) -> None:
        now = time.monotonic()
        core = Lighthouse(config, _first_id(), now, time.time() - now)
        super().__init__(core, check_leads, Unread(), HeavyWrites())
        self.config = config
        self._copies = HeldCopies(config.max_jobs, now)
        self._reports = Reports(config.max_jobs)
        self.counts = Counts(config.max_jobs)
        self.rpc_errors = RpcErrors()
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self.runs = RendezvousDriver(
            RendezvousRules(
                heartbeat_timeout_s=config.heartbeat_timeout_s,
                settle_in_s=settle_in_s,
                max_runs=config.max_jobs,
                max_nodes_per_run=min(config.max_members_per_job, MAX_NODES),
            ),
            check_leads,
            self._unread,
            self.heavy_writes,
            self.counts,
        )
        self.runs.on_change = self._record_run_change
        #: Called with each record that is new, or has changed.
        self.on_incident: Callable[[Incident], None] = lambda incident: None

    # -- what clients and operators ask ----------------------------------------------------------

    async def session(
        self,
        job: str,
        requests: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve a manager's stream to its end.

        Raises:
            RequestRefused: the manager breaks the protocol, or does not read.
        """
        hello = hello_from_wire(await first_message(requests))
        await self._serve(job, hello, requests, session_message_from_wire, context, job)

    async def quorum(self, job: str, member: Member, timeout_s: float) -> bytes:
        """Wait for a quorum with ``member``; the encoded answer.

        Raises:
            DeadlineExceeded: none within ``timeout_s``; names what was waited for.
        """
        call = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        try:
            self._feed(lambda now: self._core.called(call, job, member, timeout_s, now))
            return await answer
        finally:
            if not answer.done() or answer.cancelled():
                self._feed_last(lambda now: self._core.cancelled(call, now))
            del self._calls[call]

    def heartbeat(self, job: str, replica_id: str) -> float:
        """Record a sign of life; returns how long the group may stay silent, in seconds."""
        self._feed(lambda now: self._core.heartbeat(job, replica_id, now))
        return self._core.jobs.beat_interval_s(job)

    def leave(self, job: str, replica_id: str, leave: Leave) -> None:
        """Remove a group without a session, which is gone."""
        self._feed(lambda now: self._core.left(job, replica_id, leave, now))

    def command(self, job: str, name: str, command: Kill | Drain) -> None:
        """Send an operator's ``command`` to the group with this replica id or name.

        Raises:
            RequestRefused: there is no such group, or it has no session.
        """
        self._feed(lambda now: self._core.commanded(job, name, command, now))

    def accept_loss(self, job: str) -> int:
        """Let the next quorum of ``job`` lose committed steps; up to which step it does.

        Raises:
            RequestRefused: none is held back for that reason.
        """
        committed_step = self._core.jobs.committed_step(job)
        self._feed(lambda now: self._core.loss_accepted(job, now))
        return committed_step

    def check_room(self, job: str) -> None:
        """Raise `RequestRefused` if there is no room for another group of ``job``."""
        self._core.jobs.check_room(job)

    def members(self, job: str) -> pb.JobMembersResponse:
        """The members of ``job`` that live, and copies of its newest whole states."""
        now = time.monotonic()
        members, step = self._core.jobs.members(job)
        return pb.JobMembersResponse(
            manager_addresses=[each.address for each in members],
            replica_ids=[each.replica_id for each in members],
            committed_step=step,
            copies=map(copy_to_wire, self._copies.whole_copies(job, now)),
            knows_copies=self._copies.knows_all(now),
            is_finished=self._core.jobs.is_finished(job),
        )

    def record_copies(self, job: str, holder: str, copies: tuple[HeldCopy, ...]) -> None:
        """Record which copies of the states of ``job`` the process ``holder`` holds.

        Also while another lighthouse leads: this one knows all copies when it is elected.

        Raises:
            RequestRefused: there are too many, or this lighthouse does not lead.
        """
        self._copies.record_report(job, holder, copies, time.monotonic())
        self._check_leads()

    def status(self, job: str, *, with_paces: bool = True) -> list[JobStatus]:
        """What people want to know of ``job``, or of all (empty)."""
        now = time.monotonic()
        jobs = self._core.status(job, now, with_paces=with_paces)
        return [self._with_copies(each, now) for each in jobs]

    async def gather_status(self, job: str, *, with_paces: bool = True) -> list[JobStatus]:
        """See `status`, in pieces between which the groups that train go first."""
        now = time.monotonic()
        jobs = await in_turns(self._core.status_in_pieces(job, now, with_paces=with_paces))
        return [self._with_copies(each, now) for each in jobs]

    async def gather_samples(self) -> dict[str, JobSample | None]:
        """Each job that `status` shows (None: it has ended), in pieces as `gather_status`."""
        return await in_turns(self._core.samples_in_pieces(time.monotonic()))

    def _with_copies(self, status: JobStatus, now: float) -> JobStatus:
        copies = self._copies.summarize(status.job, now)
        if copies is None:
            return status
        return replace(
            status,
            copy_step=copies.newest_step,
            num_holders=copies.num_holders,
            copy_age_s=copies.age_s,
        )

    def paces(self, job: str, replica_ids: Iterable[str]) -> dict[str, tuple[Pace, ...]]:
        """See `Jobs.paces`."""
        return self._core.jobs.paces(job, replica_ids)

    def incidents(self, job: str, after: int = 0) -> list[Incident]:
        """The records of ``job`` with numbers above ``after``, the oldest first.

        Raises:
            RequestRefused: nothing is known of it.
        """
        return self._core.incidents(job, after)

    def goodput(self, job: str) -> Goodput:
        """How much of the time of ``job`` ended in committed steps.

        Raises:
            RequestRefused: there is no such job.
        """
        return self._core.goodput(job, time.monotonic())

    def end_lead(self, error: TorchFTError) -> None:
        self.counts.forget()
        self.runs.end_lead(error)
        self._execute(self._core.lead_ended(error, _first_id(), time.monotonic()))

    def close(self) -> None:
        super().close()
        self.runs.close()

    # -- the orders ------------------------------------------------------------------------------

    def _execute_orders(self, orders: Orders) -> None:
        execute(orders, self)
        for incident in self._core.pop_incidents():
            self.on_incident(incident)

    def _record_run_change(self, change: RunRecord) -> None:
        now = time.monotonic()
        self._core.record_run_change(
            change.run, change.cause, change.nodes, now, is_over=change.is_over
        )
        self._execute_orders(())

    def send(self, order: Send) -> None:
        """Send news over the streams of an order."""
        news = session_news_to_wire(order.news)
        for stream in order.streams:
            self._streams[stream].add_news(news)

    def publish(self, order: Publish) -> None:
        """Answer the streams and calls of an order, with a quorum that is encoded once."""
        encoded = quorum_answer(order.quorum, time.time())
        for stream, number in order.answers:
            self._streams[stream].add_news(encoded, answers(number))
        for call in order.calls:
            self._end_call(call, encoded)
        self._reports.write_quorum(order)
        now = time.monotonic() - self._core.clock.missed_s
        self.counts.record_quorum(order, max(0.0, now - order.waited_since))

    def refuse_call(self, order: RefuseCall) -> None:
        """Answer a call with an error."""
        self._end_call(order.call, order.error)

    def report(self, report: Report) -> None:
        """Write a report to the log, and count it."""
        self._reports.write(report)
        self.counts.record_report(report)

    def _end_call(self, call: int, outcome: bytes | TorchFTError) -> None:
        answer = self._calls[call]
        if answer.done():  # its caller was cancelled in this moment
            return
        if isinstance(outcome, bytes):
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)


def _first_id() -> int:
    return first_quorum_id(time.time(), secrets.randbelow(ID_STRIDE))
