"""Asks a lighthouse."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from datetime import timedelta
from typing import Any

from torchft_svc.coordination.client import Answer, Client
from torchft_svc.coordination.types import Quorum, QuorumMember, Timestamp
from torchft_svc.core.limits import limited_s, whole_milliseconds
from torchft_svc.core.quorum.lighthouse.copies import HeldCopy, MembersAndCopies
from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.core.quorum.types import DEFAULT_JOB, Member
from torchft_svc.core.route import LOOK_BACK_S, Route
from torchft_svc.errors import NotLeader, Unreachable
from torchft_svc.host.address import split_addresses
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import IMPATIENT_KEEPALIVE_MS, KEEPALIVE_MS
from torchft_svc.rpc.codec import member_to_wire
from torchft_svc.rpc.codec_status import copy_to_wire, members_from_wire, status_from_wire
from torchft_svc.rpc.probing import accepts_client_blocking
from torchft_svc.rpc.security import Security

# A look at the earlier lighthouses of the list is followed by so many times its length without one.
LOOK_BACK_SHARE = 10.0


class LighthouseClient(Client):
    """Asks a lighthouse directly, as a manager does.

    ``addr`` is ``host:port``, or several of them with commas between, as for a manager: a call that
    the first cannot be asked, or that does not lead, goes to the next one or to the leader, while
    its timeout lasts; `quorum` goes back once an earlier one would take it.
    ``security``: TLS files and token (default: those of the environment).

    Raises:
        AddressError: an address cannot be parsed, or comes twice.
        Unreachable: nobody answers at ``addr`` within ``connect_timeout``.
        Unauthorized: from each call, if the lighthouse does not trust this client, or it the other.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta,
        *,
        job_id: str = DEFAULT_JOB,
        security: Security | None = None,
    ) -> None:
        addresses = split_addresses(addr)
        self._route = Route(addresses)
        self._routing = threading.Lock()
        self._look_at = 0.0
        self._job_id = job_id
        keepalive_ms = KEEPALIVE_MS if len(addresses) == 1 else IMPATIENT_KEEPALIVE_MS
        super().__init__(
            "lighthouse", addresses[0], connect_timeout, job_id, security, keepalive_ms
        )
        self._quorum = self._method("Quorum", pb.LighthouseQuorumResponse.FromString)
        self._heartbeat = self._method("Heartbeat", pb.LighthouseHeartbeatResponse.FromString)
        self._leave = self._method("Leave", pb.LighthouseLeaveResponse.FromString)
        self._kill = self._method("Kill", pb.LighthouseKillResponse.FromString)
        self._drain = self._method("Drain", pb.LighthouseDrainResponse.FromString)
        self._accept_loss = self._method("AcceptLoss", pb.AcceptLossResponse.FromString)
        self._report_copies = self._method("ReportCopies", pb.JobMembersResponse.FromString)
        self._status = self._method("Status", pb.LighthouseStatusResponse.FromString)
        self._connect()

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: dict[Hashable, object] | None = None,
    ) -> Quorum:
        """Wait for a quorum that contains this group; beat meanwhile if that may take long.

        Raises:
            DeadlineExceeded: none within ``timeout``; the error says what was waited for.
        """
        member = Member(
            replica_id=replica_id,
            address=address or "",
            store_address=store_address or "",
            step=step or 0,
            world_size=1 if world_size is None else world_size,
            shrink_only=bool(shrink_only),
            data="" if data is None else json.dumps(data),
        )
        request = pb.LighthouseQuorumRequest(requester=member_to_wire(member))
        self._look_back()
        quorum = self._quorum(request, timeout).quorum
        return Quorum(
            quorum_id=quorum.quorum_id,
            participants=[_member(message) for message in quorum.participants],
            created=Timestamp(quorum.created.seconds, quorum.created.nanos),
        )

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Report that the group is alive."""
        self._heartbeat(pb.LighthouseHeartbeatRequest(replica_id=replica_id), timeout)

    def leave(
        self, replica_id: str, reason: str = "", timeout: timedelta = timedelta(seconds=5)
    ) -> None:
        """Report that the group is gone for good, so that nobody waits for it."""
        request = pb.LighthouseLeaveRequest(replica_id=replica_id, reason=reason, ends=True)
        self._leave(request, timeout)

    def kill(
        self, replica_id: str, reason: str = "", timeout: timedelta = timedelta(seconds=5)
    ) -> None:
        """End the group with this replica id or name at once.

        Raises:
            RequestRefused: there is no such group, or no command reaches it, because it only sends
                heartbeats.
        """
        self._kill(pb.LighthouseKillRequest(replica_id=replica_id, reason=reason), timeout)

    def drain(
        self,
        replica_id: str,
        reason: str = "",
        timeout: timedelta = timedelta(seconds=5),
        *,
        within: timedelta | None = None,
    ) -> None:
        """Let the group with this replica id or name finish its step, leave, and end.

        ``within``: in what time its processes will be killed (None: not known).

        Raises:
            RequestRefused: there is no such group, or no command reaches it, because it only sends
                heartbeats.
        """
        request = pb.LighthouseDrainRequest(
            replica_id=replica_id, reason=reason, within_ms=whole_milliseconds(within)
        )
        self._drain(request, timeout)

    def status(
        self, job_id: str = "", timeout: timedelta = timedelta(seconds=5)
    ) -> list[JobStatus]:
        """The quorum and the groups of every job, sorted by name, or of ``job_id`` alone.

        Raises:
            RequestRefused: no group of that job is alive.
        """
        return status_from_wire(self._status(pb.LighthouseStatusRequest(job=job_id), timeout))

    def report_copies(
        self,
        holder: str,
        copies: Iterable[HeldCopy],
        timeout: timedelta = timedelta(seconds=5),
    ) -> MembersAndCopies:
        """Report all copies of this job's states that the process ``holder`` holds (rule B2).

        It is forgotten if it does not report for some seconds. Returns who trains, and all copies.

        Raises:
            RequestRefused: a copy, or their number, is out of bounds.
        """
        request = pb.ReportCopiesRequest(holder=holder, copies=map(copy_to_wire, copies))
        return members_from_wire(self._report_copies(request, timeout))

    def accept_loss(self, timeout: timedelta = timedelta(seconds=5)) -> int:
        """Let the job's next quorum go back to what the groups that ask have; from which step.

        Once, and only if no group with the newer state asks before.

        Raises:
            RequestRefused: no quorum is held back because it would lose committed steps.
        """
        return self._accept_loss(pb.AcceptLossRequest(), timeout).committed_step

    def _method(self, name: str, answer: Callable[[bytes], Answer]) -> Callable[..., Answer]:
        """A call that tries the lighthouses of the list in turn while its time lasts."""
        ask_one = super()._method(name, answer)

        def invoke(request: Any, timeout: timedelta) -> Answer:
            deadline = time.monotonic() + limited_s(timeout)
            while True:
                addr, left_s = self._addr, deadline - time.monotonic()
                try:
                    reply = ask_one(request, timedelta(seconds=max(left_s, 0.0)))
                except (Unreachable, NotLeader) as error:
                    leader = error.leader if isinstance(error, NotLeader) else ""
                    if not self._use_next_address(addr, leader) or time.monotonic() >= deadline:
                        raise
                else:
                    self._worked(addr)
                    return reply

        return invoke

    def _worked(self, addr: str) -> None:
        with self._routing:
            if addr == self._route.current:
                self._route.record_answer()

    def _use_next_address(self, failed: str, leader: str = "") -> bool:
        with self._routing:
            if failed != self._route.current:
                return True  # another thread has gone on already
            goes_on = self._route.choose_next(leader)
            self._move(self._route.current)
            return goes_on

    def _look_back(self) -> None:
        """The groups of a job meet at the first lighthouse of the list that takes it."""
        with self._routing:
            began_at = time.monotonic()
            if began_at < self._look_at:
                return
            for address in self._route.preferred:
                asks = functools.partial(
                    accepts_client_blocking, address, self._job_id, self.security, LOOK_BACK_S
                )
                if self._caller.call(asks):
                    self._route.return_to(address)
                    self._move(address)
                    break
            # One that is silent must not cost more than a small part of the time.
            took_s = time.monotonic() - began_at
            self._look_at = time.monotonic() + max(LOOK_BACK_S, LOOK_BACK_SHARE * took_s)


def _member(message: pb.QuorumMember) -> QuorumMember:
    return QuorumMember(
        replica_id=message.replica_id,
        address=message.address,
        store_address=message.store_address,
        step=message.step,
        world_size=message.world_size,
        shrink_only=message.shrink_only,
        data=json.loads(message.data) if message.data else None,
    )
