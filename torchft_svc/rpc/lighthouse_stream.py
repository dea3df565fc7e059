"""The client's end of a stream to a lighthouse: a hello, a welcome, then messages both ways."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import grpc

from torchft_svc.core.link import SendBeat
from torchft_svc.errors import RequestRefused, TorchFTError
from torchft_svc.rpc.client_stream import (
    BROKEN,
    EOF,
    MAX_OPENINGS,
    Stream,
    broken_stream,
    is_reason_dropped,
    raise_status,
)
from torchft_svc.rpc.parsing import checked, parser

_ANSWER = "what the lighthouse sent"
Message = TypeVar("Message")


class LighthouseStream(ABC, Generic[Message]):
    """One connection of a `LinkMachine`; to be used on one event loop, once."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        method: str,
        kinds: tuple[Any, Any],
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        """``kinds``: the generated classes of requests and of news."""
        request, news = kinds
        self._address = address
        self._metadata = tuple(metadata)
        self._open_stream: Any = channel.stream_stream(
            f"/torchft.LighthouseService/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=parser(news),
        )
        self._is_open = False
        self._unsent: deque[Message | SendBeat] = deque()
        self._has_unsent = asyncio.Event()

    # -- what a kind of stream decides -----------------------------------------------------------

    @abstractmethod
    def _make_hello(self) -> Any:
        """The first request."""

    @abstractmethod
    def _introduced(self) -> None:
        """Record that the hello is sent."""

    @abstractmethod
    def _encode(self, message: Message | SendBeat) -> Any:
        """The request for ``message``."""

    @abstractmethod
    def _receive(self, news: Any, *, is_first: bool) -> None:
        """Handle ``news``.

        Raises:
            RequestRefused: a lighthouse would not send this.
        """

    def _to_error(self, error: grpc.aio.AioRpcError) -> TorchFTError:
        """Return why the stream has ended, after ``error``."""
        return broken_stream(error, self._address)

    # -- the stream ------------------------------------------------------------------------------

    async def run(self) -> TorchFTError | None:
        """Receive until the stream is over, and return why; None: the lighthouse ended it."""
        try:
            await self._session_or_reason()
        except (*BROKEN, RequestRefused) as error:  # refused: it does not talk as a lighthouse
            # In them is the stream, and as long as that is kept, gRPC goes on connecting a channel
            # that is closed.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, grpc.aio.AioRpcError):
                return self._to_error(error)
            return broken_stream(error, self._address)
        return None

    def send(self, message: Message | SendBeat) -> None:
        """Send ``message`` soon. What a stream that does not move keeps unsent is bounded."""
        if isinstance(message, SendBeat) and any(
            isinstance(each, SendBeat) for each in self._unsent
        ):
            return
        self._unsent.append(message)
        self._has_unsent.set()

    async def _session_or_reason(self) -> None:
        """Open the stream again if gRPC has dropped the reason why it ended at once."""
        for _ in range(MAX_OPENINGS - 1):
            try:
                return await self._session()
            except grpc.aio.AioRpcError as error:
                if not is_reason_dropped(error) or self._is_open:
                    raise
        return await self._session()

    async def _session(self) -> None:
        """Use one stream, from hello to its end."""
        stream = self._open_stream(metadata=self._metadata)
        sending: asyncio.Task[None] | None = None
        try:
            await stream.write(self._make_hello())
            self._introduced()
            while (news := checked(await stream.read(), _ANSWER)) is not EOF:
                is_first, self._is_open = not self._is_open, True
                self._receive(news, is_first=is_first)
                if sending is None:
                    sending = asyncio.create_task(self._keep_sending(stream))
            await raise_status(stream)
        except asyncio.InvalidStateError:  # it ended before the hello was sent: find out why
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
                    await stream.write(self._encode(self._unsent.popleft()))
                self._has_unsent.clear()
