"""A transport to lighthouses without sessions, as the public release's: each message is a call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from torchft_svc.core.link import BEAT_TIMEOUT_S, LEAVE_TIMEOUT_S, Connect, SendBeat
from torchft_svc.core.quorum.manager.lighthouse_link import ManagerLink, Message
from torchft_svc.core.quorum.session_messages import Leave, Question, Withdrawal
from torchft_svc.core.quorum.types import Quorum
from torchft_svc.errors import TorchFTError
from torchft_svc.host.tasks import Tasks
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import member_to_wire, quorum_from_wire
from torchft_svc.rpc.status import to_error

_SERVICE = "/torchft.LighthouseService/"


class UnaryTransport:
    """A lighthouse by calls (see `Transport`); to be used on one event loop.

    ``feed`` passes an input to the machine.
    """

    def __init__(
        self,
        connection: Connect,
        channel: grpc.aio.Channel,
        metadata: Sequence[tuple[str, str]],
        replica_id: str,
        feed: Callable[[Callable[[ManagerLink, float], object]], None],
    ) -> None:
        self._number = connection.connection
        self._address = connection.address
        self._channel = channel
        self._metadata = tuple(metadata)
        self._replica_id = replica_id
        self._feed = feed
        self._calls = Tasks()
        self._question: asyncio.Task[None] | None = None
        self._over: asyncio.Future[TorchFTError | None] = asyncio.get_running_loop().create_future()

    async def run(self) -> TorchFTError | None:
        """Receive until a call fails; a heartbeat that is late breaks nothing."""
        async with self._calls:
            return await self._over

    def send(self, message: Message) -> None:
        """Call the lighthouse with ``message``, soon."""
        if isinstance(message, SendBeat):
            self._start(self._beat())
        elif isinstance(message, Question):
            self._question = self._start(self._ask(message))
        elif isinstance(message, Withdrawal):
            if self._question is not None:
                self._question.cancel()
        else:
            self._start(self._leave(message))

    def _start(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._calls.start(call, "call to the lighthouse")

    async def _beat(self) -> None:
        number = self._number
        request = pb.LighthouseHeartbeatRequest(replica_id=self._replica_id)
        try:
            answer = await self._call("Heartbeat", request, BEAT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self._end(self._to_error(error, "heartbeat", BEAT_TIMEOUT_S))
            else:
                self._feed(lambda machine, now: machine.beat_was_late(number, now))
        else:
            interval_s = answer.min_interval_ms / 1000
            self._feed(lambda machine, now: machine.welcomed(number, interval_s, now))

    async def _ask(self, message: Question) -> None:
        number, question = self._number, message.number
        request = pb.LighthouseQuorumRequest(requester=member_to_wire(message.member))
        outcome: Quorum | TorchFTError
        try:
            answer = await self._call("Quorum", request, message.timeout_s)
            outcome = quorum_from_wire(answer.quorum)
        except grpc.aio.AioRpcError as error:
            outcome = self._to_error(error, "quorum", message.timeout_s)
        except TorchFTError as error:
            outcome = error
        self._feed(lambda machine, now: machine.answered(number, question, outcome, now))

    async def _leave(self, message: Leave) -> None:
        request = pb.LighthouseLeaveRequest(
            replica_id=self._replica_id,
            reason=message.reason,
            between_steps=message.between_steps,
            ends=message.ends,
        )
        with contextlib.suppress(grpc.aio.AioRpcError):  # also: a lighthouse without Leave
            await self._call("Leave", request, LEAVE_TIMEOUT_S)
        self._end(None)

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        name = f"Lighthouse{method}"
        call: Any = self._channel.unary_unary(
            _SERVICE + method,
            request_serializer=getattr(pb, f"{name}Request").SerializeToString,
            response_deserializer=getattr(pb, f"{name}Response").FromString,
        )
        return await call(request, timeout=timeout_s, metadata=self._metadata)

    def _end(self, why: TorchFTError | None) -> None:
        if not self._over.done():
            self._over.set_result(why)

    def _to_error(self, error: grpc.aio.AioRpcError, action: str, timeout_s: float) -> TorchFTError:
        return to_error(
            error,
            peer="lighthouse",
            address=self._address,
            action=action,
            timeout_s=timeout_s,
        )
