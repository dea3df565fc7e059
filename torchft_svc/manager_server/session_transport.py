"""A transport that is one stream: while it is open the group is alive, and news come over it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections import deque
from typing import Any

import grpc

from torchft_svc.core.quorum.manager.link_types import Message, SendBeat
from torchft_svc.core.quorum.session_messages import Beat, Hello, Question, Withdrawal
from torchft_svc.core.quorum.types import Quorum
from torchft_svc.errors import QuorumFailed, RequestRefused, TorchFTError, Unreachable
from torchft_svc.manager_server.transport import Contact, NotSupported
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.client_stream import (
    BROKEN,
    EOF,
    MAX_OPENINGS,
    Stream,
    broken_stream,
    is_untold,
    raise_status,
)
from torchft_svc.rpc.codec import JOB_KEY, fit_for_logs, quorum_from_wire
from torchft_svc.rpc.codec_session import session_message_to_wire
from torchft_svc.rpc.parsing import checked, parser
from torchft_svc.rpc.status import error_from_wire

log = logging.getLogger(__name__)

_ANSWER = "what the lighthouse said"


class SessionTransport:
    """See `Transport`; to be used on one event loop."""

    def __init__(self, contact: Contact, hello: Hello) -> None:
        self._contact = contact
        self._hello = session_message_to_wire(hello)
        config = contact.config
        self._metadata = ((JOB_KEY, config.job_id), *config.security.metadata)
        self._open_stream: Any = contact.channel.stream_stream(
            "/torchft.LighthouseService/Session",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=parser(pb.SessionNews),
        )
        self._is_open = False
        self._unsent: deque[Message] = deque()
        self._has_unsent = asyncio.Event()
        self._timeout_s = 0.0  # of the last question

    async def run(self) -> TorchFTError:
        """See `Transport.run`."""
        try:
            await self._session_or_reason()
        except (*BROKEN, RequestRefused) as error:  # refused: it does not talk as a lighthouse
            broken = broken_stream(error, self._contact.address)
            # In them is the stream, and as long as that is kept, gRPC goes on connecting a channel
            # that is closed.
            traceback.clear_frames(error.__traceback__)
            return broken
        return Unreachable("lighthouse", self._contact.address, "it ended the session")

    def send(self, message: Message) -> None:
        """See `Transport.send`. What a stream that does not move keeps unsent is bounded."""
        if isinstance(message, Question):
            self._timeout_s = message.timeout_s
        elif isinstance(message, SendBeat) and any(
            isinstance(each, SendBeat) for each in self._unsent
        ):
            return
        elif isinstance(message, Withdrawal):
            for each in self._unsent:
                if isinstance(each, Question) and each.number == message.number:
                    self._unsent.remove(each)
                    return
        self._unsent.append(message)
        self._has_unsent.set()

    async def _session_or_reason(self) -> None:
        for _ in range(MAX_OPENINGS - 1):
            try:
                return await self._session()
            except grpc.aio.AioRpcError as error:
                if not is_untold(error) or self._is_open:
                    raise
        return await self._session()

    async def _session(self) -> None:
        """One stream, from hello to its end."""
        contact, number = self._contact, self._contact.number
        stream = self._open_stream(metadata=self._metadata)
        sending: asyncio.Task[None] | None = None
        try:
            await stream.write(self._hello)
            contact.tell(lambda machine, now: machine.introduced(number, now))
            first = checked(await stream.read(), _ANSWER)
            if first is EOF:
                await raise_status(stream)
                return
            self._is_open = True
            sending = asyncio.create_task(self._keep_sending(stream))
            self._welcomed(first.welcome)
            while (news := checked(await stream.read(), _ANSWER)) is not EOF:
                self._receive(news)
            await raise_status(stream)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotSupported from None
            raise
        except asyncio.InvalidStateError:  # it ended before the hello was sent: say why
            await raise_status(stream)
        finally:
            if sending is not None:
                sending.cancel()
            stream.cancel()

    async def _keep_sending(self, stream: Stream) -> None:
        with contextlib.suppress(*BROKEN):  # whoever reads learns why
            while True:
                await self._has_unsent.wait()
                while self._unsent:
                    await stream.write(self._encoded(self._unsent.popleft()))
                self._has_unsent.clear()

    def _encoded(self, message: Message | Beat) -> pb.SessionRequest:
        if isinstance(message, SendBeat):
            message = self._contact.beat()
        return session_message_to_wire(message)

    def _receive(self, news: pb.SessionNews) -> None:
        kind = news.WhichOneof("kind")
        fit_for_logs(news)
        if kind == "welcome":
            self._welcomed(news.welcome)
        elif kind == "refusal":
            refusal = news.refusal
            error = error_from_wire(refusal.error, refusal.reason, "quorum", self._timeout_s)
            self._answered(refusal.number, error)
        elif kind == "quorum":
            try:
                self._answered(news.answers, quorum_from_wire(news.quorum))
            except QuorumFailed as error:
                self._answered(news.answers, error)
        elif kind in ("lost", "kill", "drain", "waiting", "term_ends", "no_quorum_yet"):
            self._contact.on_news(self._contact.number, news)

    def _welcomed(self, welcome: pb.SessionWelcome) -> None:
        number, interval_s = self._contact.number, welcome.min_interval_ms / 1000
        self._contact.tell(lambda machine, now: machine.welcomed(number, interval_s, now))

    def _answered(self, question: int, outcome: Quorum | TorchFTError) -> None:
        number = self._contact.number
        self._contact.tell(lambda machine, now: machine.answered(number, question, outcome, now))
