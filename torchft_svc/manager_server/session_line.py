"""A line that is one stream: while it is open the group is alive, and news come over it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import time
import traceback
from collections.abc import Callable
from typing import Any

import grpc

from torchft_svc.core.assignment import check_answer
from torchft_svc.core.types import Member, Quorum, one_line
from torchft_svc.errors import (
    DeadlineExceeded,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unreachable,
)
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.line import (
    LEAVE_TIMEOUT_S,
    Contact,
    NotSupported,
    beat_interval_s,
)
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import JOB_KEY, fit_for_logs, member_to_wire, quorum_from_wire
from torchft_svc.rpc.parsing import checked, parser
from torchft_svc.rpc.status import cause_of, error_from_wire, to_distrust, to_not_leader
from torchft_svc.rpc.tasks import Tasks
from torchft_svc.rpc.tls_reasons import closing_hint

log = logging.getLogger(__name__)

# A lighthouse that takes the connection but does not answer is as good as none.
WELCOME_TIMEOUT_S = 2.0
# What gRPC says instead of the reason, if the other side ends a call while it is being written to;
# of sessions that a lighthouse refuses at once, that were 5 in 100.
_UNTOLD = "Internal error from Core"
# So often a session is opened to learn the reason.
MAX_OPENINGS = 4
# The lighthouse's own refusal, which knows the reason, should be here before we stop waiting.
REFUSAL_GRACE_S = 0.25

Stream = Any  # grpc.aio's stream call; its stubs lack reading and writing
# What using a stream raises when it has ended, or does not move.
_BROKEN = (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.TimeoutError)
_ANSWER = "what the lighthouse said"
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class SessionLine:
    """To be used on one event loop; ``on_news`` hears what is not an answer: losses, orders.

    ``beat`` makes the next beat.
    """

    def __init__(
        self,
        config: ManagerConfig,
        contact: Contact,
        hello: pb.SessionHello,
        tasks: Tasks,
        on_news: Callable[[pb.SessionNews], None],
        beat: Callable[[], pb.SessionBeat],
    ) -> None:
        self._make_beat = beat
        self._config = config
        self._address = contact.address
        self._hello = hello
        self._tasks = tasks
        self._on_news = on_news
        self._metadata = ((JOB_KEY, config.job_id), *config.security.metadata)
        self._open_stream: Any = contact.channel.stream_stream(
            "/torchft.LighthouseService/Session",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=parser(pb.SessionNews),
        )
        self._stream: Stream | None = None
        self._over = asyncio.Event()  # no stream is open
        self._writing = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._number = 0
        self._answer: asyncio.Future[Quorum] | None = None
        self._timeout_s = 0.0
        self._asked_at = -math.inf
        self._left = False

    async def hold(self, on_open: Callable[[], None]) -> None:
        """See `Line.hold`."""
        broken: TorchFTError = Unreachable("lighthouse", self._address, "it ended the session")
        try:
            await self._session_or_reason(on_open)
        except (
            *_BROKEN,
            RequestRefused,
        ) as error:  # refused: it does not talk as a lighthouse does
            broken = self._to_error(error)
            # In them is the stream, and as long as that is kept, gRPC goes on connecting a channel
            # that is closed.
            traceback.clear_frames(error.__traceback__)
        finally:
            self._stream = None
            self._fail(broken)
            self._over.set()
        if not self._left:
            raise broken

    async def ask(self, member: Member, timeout_s: float) -> Quorum:
        """See `Line.ask`."""
        stream = self._stream
        if stream is None:
            raise Unreachable("lighthouse", self._address, "there is no session yet")
        self._number = number = next(self._numbers)
        self._timeout_s = timeout_s
        self._asked_at = time.monotonic()
        answer: asyncio.Future[Quorum] = asyncio.get_running_loop().create_future()
        self._answer = answer
        question = pb.SessionQuestion(
            requester=member_to_wire(member),
            number=number,
            timeout_ms=max(1, int(timeout_s * 1000)),
        )
        try:
            await self._send(stream, pb.SessionRequest(question=question))
            quorum = await asyncio.wait_for(answer, timeout_s + REFUSAL_GRACE_S)
            check_answer(member, quorum, ids_grow=True)
            return quorum
        except DeadlineExceeded:
            raise  # a TimeoutError too, but the lighthouse's own, with the reason
        except asyncio.TimeoutError:
            raise DeadlineExceeded("quorum", timeout_s, "the lighthouse is silent") from None
        except _BROKEN as error:
            raise self._to_error(error) from None
        finally:
            if not answer.done() or answer.cancelled():
                self._tasks.start(self._withdraw(stream, number), "withdraw a question")
            else:
                answer.exception()  # seen: the stream may break while the question is being sent
            if self._answer is answer:
                self._answer = None

    def _to_error(self, error: Exception) -> TorchFTError:
        if isinstance(error, grpc.aio.AioRpcError):
            known = to_not_leader(error) or to_distrust(error, "lighthouse", self._address)
            if known is not None:
                return known
        return Unreachable("lighthouse", self._address, _why(error))

    async def _withdraw(self, stream: Stream, number: int) -> None:
        with contextlib.suppress(*_BROKEN):
            withdrawal = pb.SessionWithdrawal(number=number)
            await self._send(stream, pb.SessionRequest(withdrawal=withdrawal))

    async def leave(self, reason: str, *, between_steps: bool, ends: bool = False) -> None:
        """See `Line.leave`; without a session the group is out already."""
        self._left = True
        if self._stream is None:
            return
        request = pb.SessionRequest(
            leave=pb.SessionLeave(reason=reason, between_steps=between_steps, ends=ends)
        )
        stream = self._stream
        with contextlib.suppress(*_BROKEN):
            await asyncio.wait_for(self._send(stream, request), LEAVE_TIMEOUT_S)
            # The lighthouse ends it; what it had told before has been read then.
            await asyncio.wait_for(self._over.wait(), LEAVE_TIMEOUT_S)

    async def _session_or_reason(self, on_open: Callable[[], None]) -> None:
        for _ in range(MAX_OPENINGS - 1):
            try:
                return await self._session(on_open)
            except grpc.aio.AioRpcError as error:
                if error.details() != _UNTOLD or self._stream is not None:
                    raise
        return await self._session(on_open)

    async def _session(self, on_open: Callable[[], None]) -> None:
        """One stream, from hello to its end."""
        stream = self._open_stream(metadata=self._metadata)
        try:
            await asyncio.wait_for(
                self._send(stream, pb.SessionRequest(hello=self._hello)), WELCOME_TIMEOUT_S
            )
            first = checked(await asyncio.wait_for(stream.read(), WELCOME_TIMEOUT_S), _ANSWER)
            if first is _EOF:
                await _raise_status(stream)
            if self._left:  # while it was opened; the cancellation may have been lost on the way
                return
            wanted_ms = first.welcome.min_interval_ms
            self._stream = stream
            self._over.clear()
            on_open()
            beats = asyncio.create_task(self._beat(stream, wanted_ms))
            try:
                while (news := checked(await stream.read(), _ANSWER)) is not _EOF:
                    self._hear(news)
                await _raise_status(stream)
            finally:
                beats.cancel()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotSupported from None
            raise
        except asyncio.InvalidStateError:  # it ended before the hello was sent: say why
            await _raise_status(stream)
        finally:
            stream.cancel()

    async def _beat(self, stream: Stream, wanted_ms: int) -> None:
        interval_s = beat_interval_s(self._config.heartbeat_interval_s, wanted_ms)
        with contextlib.suppress(*_BROKEN):
            while True:
                silent_s = time.monotonic() - self._asked_at  # a question is a sign of life, too
                wait_s = interval_s - silent_s if silent_s < interval_s else interval_s
                await asyncio.sleep(wait_s * random.uniform(0.9, 1.0))  # noqa: S311
                if time.monotonic() - self._asked_at >= 0.9 * interval_s:
                    await self._send(stream, pb.SessionRequest(beat=self._make_beat()))

    async def _send(self, stream: Stream, request: pb.SessionRequest) -> None:
        # To gRPC a cancelled write is a cancelled stream: who gives up lets it end by itself.
        await asyncio.shield(self._write(stream, request))

    async def _write(self, stream: Stream, request: pb.SessionRequest) -> None:
        async with self._writing:  # a stream takes one message at a time
            await stream.write(request)

    def _hear(self, news: pb.SessionNews) -> None:
        fit_for_logs(news)
        kind = news.WhichOneof("kind")
        if kind in ("lost", "kill", "drain", "waiting", "no_quorum_yet"):
            self._on_news(news)
        elif kind == "refusal" and news.refusal.number == self._number:
            refusal = news.refusal
            self._fail(error_from_wire(refusal.error, refusal.reason, "quorum", self._timeout_s))
        elif kind == "quorum" and news.answers not in (0, self._number):  # 0: not told
            # The others may go on with a quorum that this group gave up; the next reunites them.
            log.info("dropped the answer to question %d, which was given up", news.answers)
        elif kind == "quorum" and self._answer is not None and not self._answer.done():
            try:
                self._answer.set_result(quorum_from_wire(news.quorum))
            except QuorumFailed as error:
                self._answer.set_exception(error)

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


async def _raise_status(stream: Stream) -> None:
    """The stream has ended: raise why, unless it ended in good order."""
    code = await stream.code()
    if code is not grpc.StatusCode.OK:
        details = await stream.details()
        metadata = await stream.initial_metadata(), await stream.trailing_metadata()
        raise grpc.aio.AioRpcError(code, *metadata, details=details)  # type: ignore[call-arg]


def _why(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        details = one_line(error.details() or "")
        if details == _UNTOLD:
            return "it ended the session"
        return f"{cause_of(error.code(), details)}{closing_hint(details)}"
    return "it does not answer" if isinstance(error, asyncio.TimeoutError) else str(error)
