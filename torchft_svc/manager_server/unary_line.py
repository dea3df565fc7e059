"""A line to lighthouses without sessions, such as the public release's: heartbeats and calls."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

import grpc

from torchft_svc.core.assignment import check_answer
from torchft_svc.core.types import Member, Quorum
from torchft_svc.errors import TorchFTError
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.line import LEAVE_TIMEOUT_S, Contact, beat_interval_s
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import JOB_KEY, member_to_wire, quorum_from_wire
from torchft_svc.rpc.status import to_error

# A heartbeat is worthless when it is late; the next one is a new chance.
BEAT_TIMEOUT_S = 1.0
_SERVICE = "/torchft.LighthouseService/"


class UnaryLine:
    """To be used on one event loop."""

    def __init__(self, config: ManagerConfig, contact: Contact, replica_id: str) -> None:
        self._config = config
        self._address = contact.address
        channel = contact.channel
        self._replica_id = replica_id
        self._metadata = ((JOB_KEY, config.job_id), *config.security.metadata)
        self._quorum = channel.unary_unary(
            _SERVICE + "Quorum",
            request_serializer=pb.LighthouseQuorumRequest.SerializeToString,
            response_deserializer=pb.LighthouseQuorumResponse.FromString,
        )
        self._left = False
        self._broken: TorchFTError | None = None
        self._leave = channel.unary_unary(
            _SERVICE + "Leave",
            request_serializer=pb.LighthouseLeaveRequest.SerializeToString,
            response_deserializer=pb.LighthouseLeaveResponse.FromString,
        )
        self._heartbeat = channel.unary_unary(
            _SERVICE + "Heartbeat",
            request_serializer=pb.LighthouseHeartbeatRequest.SerializeToString,
            response_deserializer=pb.LighthouseHeartbeatResponse.FromString,
        )

    async def ask(self, member: Member, timeout_s: float) -> Quorum:
        """See `Line.ask`."""
        request = pb.LighthouseQuorumRequest(requester=member_to_wire(member))
        try:
            answer = await self._quorum(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._to_error(error, "quorum", timeout_s) from None
        except asyncio.CancelledError:
            if self._broken is None:
                raise
            raise self._broken from None  # the channel was closed under this call
        quorum = quorum_from_wire(answer.quorum)
        check_answer(member, quorum, ids_grow=False)
        return quorum

    async def hold(self, on_open: Callable[[], None]) -> None:
        """Send heartbeats. One that is late breaks nothing: the next one is a new chance."""
        interval_s = self._config.heartbeat_interval_s
        while not self._left:
            began_at = time.monotonic()
            request = pb.LighthouseHeartbeatRequest(replica_id=self._replica_id)
            wanted_s = interval_s
            try:
                answer = await self._heartbeat(
                    request, timeout=BEAT_TIMEOUT_S, metadata=self._metadata
                )
                wanted_s = beat_interval_s(interval_s, answer.min_interval_ms)
                on_open()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._broken = self._to_error(error, "heartbeat", BEAT_TIMEOUT_S)
                    raise self._broken from None
            spent_s = time.monotonic() - began_at
            await asyncio.sleep(max(wanted_s * random.uniform(0.9, 1.0) - spent_s, 0))  # noqa: S311

    async def leave(self, reason: str, *, between_steps: bool, ends: bool = False) -> None:
        """See `Line.leave`."""
        if self._left:  # the channel may be closed since
            return
        self._left = True
        request = pb.LighthouseLeaveRequest(
            replica_id=self._replica_id, reason=reason, between_steps=between_steps, ends=ends
        )
        with contextlib.suppress(grpc.aio.AioRpcError):  # also: a lighthouse without Leave
            await self._leave(request, timeout=LEAVE_TIMEOUT_S, metadata=self._metadata)

    def _to_error(self, error: grpc.aio.AioRpcError, action: str, timeout_s: float) -> TorchFTError:
        return to_error(
            error,
            peer="lighthouse",
            address=self._address,
            action=action,
            timeout_s=timeout_s,
        )
