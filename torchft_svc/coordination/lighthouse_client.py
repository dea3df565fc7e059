"""Asks a lighthouse."""

from __future__ import annotations

import json
from collections.abc import Hashable
from datetime import timedelta

from torchft_svc.coordination.client import Client
from torchft_svc.coordination.types import Quorum, QuorumMember, Timestamp
from torchft_svc.core.overview import JobStatus
from torchft_svc.core.types import DEFAULT_JOB, Member
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import member_to_wire
from torchft_svc.rpc.codec_status import status_from_wire
from torchft_svc.rpc.security import Security


class LighthouseClient(Client):
    """Asks a lighthouse directly, as a manager does.

    ``security``: TLS files and token (default: those of the environment).

    Raises:
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
        super().__init__("lighthouse", addr, connect_timeout, job_id, security)
        self._quorum = self._method("Quorum", pb.LighthouseQuorumResponse.FromString)
        self._heartbeat = self._method("Heartbeat", pb.LighthouseHeartbeatResponse.FromString)
        self._leave = self._method("Leave", pb.LighthouseLeaveResponse.FromString)
        self._kill = self._method("Kill", pb.LighthouseKillResponse.FromString)
        self._drain = self._method("Drain", pb.LighthouseDrainResponse.FromString)
        self._accept_loss = self._method("AcceptLoss", pb.AcceptLossResponse.FromString)
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
        quorum = self._quorum(request, timeout).quorum
        return Quorum(
            quorum_id=quorum.quorum_id,
            participants=[_member(message) for message in quorum.participants],
            created=Timestamp(quorum.created.seconds, quorum.created.nanos),
        )

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Tell that the group is alive."""
        self._heartbeat(pb.LighthouseHeartbeatRequest(replica_id=replica_id), timeout)

    def leave(
        self, replica_id: str, reason: str = "", timeout: timedelta = timedelta(seconds=5)
    ) -> None:
        """Tell that the group is gone for good, so that nobody waits for it."""
        self._leave(pb.LighthouseLeaveRequest(replica_id=replica_id, reason=reason), timeout)

    def kill(
        self, replica_id: str, reason: str = "", timeout: timedelta = timedelta(seconds=5)
    ) -> None:
        """End the group with this replica id or name at once.

        Raises:
            RequestRefused: there is no such group, or it cannot be told (it only sends heartbeats).
        """
        self._kill(pb.LighthouseKillRequest(replica_id=replica_id, reason=reason), timeout)

    def drain(
        self, replica_id: str, reason: str = "", timeout: timedelta = timedelta(seconds=5)
    ) -> None:
        """Let the group with this replica id or name finish its step, leave, and end.

        Raises:
            RequestRefused: there is no such group, or it cannot be told (it only sends heartbeats).
        """
        self._drain(pb.LighthouseDrainRequest(replica_id=replica_id, reason=reason), timeout)

    def status(
        self, job_id: str = "", timeout: timedelta = timedelta(seconds=5)
    ) -> list[JobStatus]:
        """The quorum and the groups of every job, sorted by name, or of ``job_id`` alone.

        Raises:
            RequestRefused: no group of that job is alive.
        """
        return status_from_wire(self._status(pb.LighthouseStatusRequest(job=job_id), timeout))

    def accept_loss(self, timeout: timedelta = timedelta(seconds=5)) -> int:
        """Let the job's next quorum go back to what the groups that ask have; from which step.

        Once, and only if no group with the newer state asks before.

        Raises:
            RequestRefused: no quorum is held back because it would lose committed steps.
        """
        return self._accept_loss(pb.AcceptLossRequest(), timeout).committed_step


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
