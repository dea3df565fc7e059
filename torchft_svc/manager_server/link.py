"""The manager's line to the lighthouse: signs of life, questions, the group's identity there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid

import grpc

from torchft_svc.core.group import AskLighthouse
from torchft_svc.core.types import Member, Quorum
from torchft_svc.errors import DeadlineExceeded, PeerError, QuorumFailed, TorchFTError, Unreachable
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import MAX_RECONNECT_MS, MIN_RECONNECT_MS, open_aio_channel
from torchft_svc.rpc.codec import JOB_KEY, member_to_wire, quorum_from_wire
from torchft_svc.rpc.status import to_error

log = logging.getLogger(__name__)

# A heartbeat is worthless when it is late; the next one is a new chance.
BEAT_TIMEOUT_S = 1.0
# Leaving is a courtesy: a lighthouse that does not answer must not hold up the end.
LEAVE_TIMEOUT_S = 1.0
_SERVICE = "/torchft.LighthouseService/"


class LighthouseLink:
    """To be used on one event loop; ``address`` is where others reach this manager."""

    def __init__(self, config: ManagerConfig) -> None:
        self._config = config
        self.address = ""
        self.replica_id = _new_incarnation(config.replica_name)
        self._seen_quorum_id = 0
        self._metadata = ((JOB_KEY, config.job_id),)
        self._channel = open_aio_channel(config.lighthouse_address)
        self._quorum = self._channel.unary_unary(
            _SERVICE + "Quorum",
            request_serializer=pb.LighthouseQuorumRequest.SerializeToString,
            response_deserializer=pb.LighthouseQuorumResponse.FromString,
        )
        self._heartbeat = self._channel.unary_unary(
            _SERVICE + "Heartbeat",
            request_serializer=pb.LighthouseHeartbeatRequest.SerializeToString,
            response_deserializer=pb.LighthouseHeartbeatResponse.FromString,
        )
        self._leave = self._channel.unary_unary(
            _SERVICE + "Leave",
            request_serializer=pb.LighthouseLeaveRequest.SerializeToString,
            response_deserializer=pb.LighthouseLeaveResponse.FromString,
        )

    async def ask(self, question: AskLighthouse, timeout_s: float) -> Quorum:
        """The quorum that this group is a member of.

        Raises:
            PeerError: there is none within ``timeout_s``, or the lighthouse was unreachable for the
                connect timeout.
            RequestRefused: the lighthouse does not accept this group.
        """
        if question.new_incarnation:
            await self.leave("a worker of the group was restarted")
            self.replica_id = _new_incarnation(self._config.replica_name)
        deadline = time.monotonic() + timeout_s
        for attempt in range(self._config.quorum_retries + 1):
            try:
                return await self._ask_while_unreachable(question, deadline)
            except PeerError as error:
                if attempt == self._config.quorum_retries or time.monotonic() >= deadline:
                    raise
                log.warning("quorum failed, asking again: %s", error)
        raise AssertionError("the last attempt returns or raises")

    async def _ask_while_unreachable(self, question: AskLighthouse, deadline: float) -> Quorum:
        """One question, repeated over a lighthouse's restart."""
        give_up_at = min(deadline, time.monotonic() + self._config.connect_timeout_s)
        pause_s = MIN_RECONNECT_MS / 1000
        while True:
            try:
                return await self._ask_once(question, deadline)
            except Unreachable:
                if time.monotonic() + pause_s >= give_up_at:
                    raise
            # Jitter: a thousand managers must not come back in the same millisecond.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            pause_s = min(2 * pause_s, MAX_RECONNECT_MS / 1000)

    async def _ask_once(self, question: AskLighthouse, deadline: float) -> Quorum:
        timeout_s = deadline - time.monotonic()
        if timeout_s <= 0:
            raise DeadlineExceeded("quorum", 0.0, "no time is left")
        member = Member(
            replica_id=self.replica_id,
            address=self.address,
            store_address=self._config.store_address,
            step=question.step,
            world_size=self._config.group_world_size,
            shrink_only=question.shrink_only,
            commit_failures=question.commit_failures,
            seen_quorum_id=self._seen_quorum_id,
        )
        request = pb.LighthouseQuorumRequest(requester=member_to_wire(member))
        try:
            answer = await self._quorum(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._to_error(error, "quorum", timeout_s) from None
        quorum = quorum_from_wire(answer.quorum)
        if all(self.replica_id != member.replica_id for member in quorum.participants):
            raise QuorumFailed(f"quorum {quorum.quorum_id} was formed without {self.replica_id!r}")
        self._seen_quorum_id = max(self._seen_quorum_id, quorum.quorum_id)
        return quorum

    async def beat_forever(self) -> None:
        """Tell the lighthouse that this group is alive, until cancelled."""
        interval_s = self._config.heartbeat_interval_s
        failure = ""
        while True:
            began_at = time.monotonic()
            request = pb.LighthouseHeartbeatRequest(replica_id=self.replica_id)
            wanted_s = interval_s
            try:
                answer = await self._heartbeat(
                    request, timeout=BEAT_TIMEOUT_S, metadata=self._metadata
                )
                wanted_s = max(interval_s, answer.min_interval_ms / 1000)
                if failure:
                    log.info("lighthouse %s answers again", self._config.lighthouse_address)
                failure = ""
            except grpc.aio.AioRpcError as error:
                reason = str(self._to_error(error, "heartbeat", BEAT_TIMEOUT_S))
                if not failure:
                    log.warning("no heartbeat: %s", reason)
                failure = reason
            spent_s = time.monotonic() - began_at
            await asyncio.sleep(max(wanted_s * random.uniform(0.9, 1.0) - spent_s, 0))  # noqa: S311

    async def leave(self, reason: str) -> None:
        """Tell the lighthouse that nobody has to wait for this group any more."""
        request = pb.LighthouseLeaveRequest(replica_id=self.replica_id, reason=reason)
        with contextlib.suppress(grpc.aio.AioRpcError):  # also: an older lighthouse without Leave
            await self._leave(request, timeout=LEAVE_TIMEOUT_S, metadata=self._metadata)

    async def close(self) -> None:
        """May be called twice."""
        await self._channel.close(grace=None)

    def _to_error(self, error: grpc.aio.AioRpcError, action: str, timeout_s: float) -> TorchFTError:
        return to_error(
            error,
            peer="lighthouse",
            address=self._config.lighthouse_address,
            action=action,
            timeout_s=timeout_s,
        )


def _new_incarnation(name: str) -> str:
    return f"{name}:{uuid.uuid4()}"
