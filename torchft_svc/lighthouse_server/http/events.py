"""The event stream: readers receive a document, and then what changes in it (rule S11).

A channel is one document, built once for all of its readers, and only while there are any. What has
changed is encoded once, and queued for each of them. A reader that does not keep up is
disconnected: it costs the others nothing, and starts again with a whole document.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from torchft_svc.errors import NotLeader, RequestRefused
from torchft_svc.lighthouse_server.http.answers import encoded
from torchft_svc.lighthouse_server.http.differences import Document, difference
from torchft_svc.lighthouse_server.http.documents import Clock
from torchft_svc.lighthouse_server.http.refusals import HttpRefusal

log = logging.getLogger(__name__)

# How often readers receive what has changed.
UPDATE_S = 1.0
# Each of them costs some 40 KB, and its share of the encoded updates that are sent to it.
MAX_READERS = 200
# Seconds that a reader may be behind. What is queued is shared by all readers of a channel.
MAX_UNREAD = 16
# A proxy, or a reader whose host has vanished, needs a word now and then.
QUIET_S = 15.0
# A write waits until the last one is nearly out, so no connection holds more than two of them.
CHUNK_BYTES = 32 * 1024
_NOTHING_NEW = b":\n\n"


class Abortable(Protocol):
    """The connection of a reader."""

    def abort(self) -> None: ...


class Reader:
    """One reader of channels: what it has not been sent yet."""

    def __init__(self, connection: Abortable) -> None:
        self._connection = connection
        self._unread: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self.is_over = False

    @property
    def num_unread(self) -> int:
        """How many messages wait for it."""
        return len(self._unread)

    def add_message(self, message: bytes) -> None:
        """Queue a message."""
        self._unread.append(message)
        self._changed.set()

    def end(self) -> None:
        """End the stream after what is queued."""
        self.is_over = True
        self._changed.set()

    def disconnect(self) -> None:
        """End the stream at once, with all that has not been read."""
        self._unread.clear()
        self.end()
        self._connection.abort()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield what is queued, in pieces, until the stream ends."""
        while True:
            while self._unread:
                message = self._unread.popleft()
                for begin in range(0, len(message), CHUNK_BYTES):
                    yield message[begin : begin + CHUNK_BYTES]
                    await asyncio.sleep(0)  # it may have gone, which the loop has to find out
            if self.is_over:
                return
            self._changed.clear()
            await self._changed.wait()


class EventStream(StreamingResponse):
    """The response that a reader gets."""

    media_type = "text/event-stream"

    def __init__(self, reader: Reader, remove: Callable[[Reader], None]) -> None:
        # A proxy that collected the answer would hold up what is meant to be seen at once.
        headers = {"x-accel-buffering": "no", "cache-control": "no-store"}
        super().__init__(reader.messages(), headers=headers)
        self._reader = reader
        self._remove = remove

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._remove(self._reader)


@dataclass(slots=True)
class _Channel:
    """A document with its readers; ``build`` makes it of the present state.

    ``whole``: the event for readers that are new, once one has come. ``is_gone``: what it is about
    is gone, and the readers know.
    """

    name: str
    build: Callable[[float], Document]
    document: Document
    at: float
    readers: set[Reader] = field(default_factory=set)
    whole: bytes | None = None
    is_gone: bool = False

    def whole_event(self) -> bytes:
        """The event with the whole document, as it was at the last look."""
        if self.whole is None:
            self.whole = _event("document", self.name, self.at, document=self.document)
        return self.whole


class Hub:
    """All channels; for one event loop."""

    def __init__(self, clock: Clock, max_readers: int = MAX_READERS) -> None:
        self._clock = clock
        self._max_readers = max_readers
        self._channels: dict[str, _Channel] = {}
        self._readers: set[Reader] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._quiet_s = 0.0

    def check_room(self) -> None:
        """Raise `HttpRefusal` if there is no room for another reader."""
        if len(self._readers) >= self._max_readers:
            message = f"{len(self._readers)} others read the event stream, the limit: try later"
            raise HttpRefusal(503, "too_many_readers", message)

    def subscribe(self, reader: Reader, name: str, build: Callable[[float], Document]) -> None:
        """Send ``reader`` the document of channel ``name``, and then its changes.

        Raises what ``build`` raises; the reader is not added then.
        """
        channel = self._channels.get(name)
        if channel is None:
            now = self._clock.now()
            channel = self._channels[name] = _Channel(name, build, build(now), now)
        channel.readers.add(reader)
        self._readers.add(reader)
        reader.add_message(channel.whole_event())
        if self._timer is None:
            self._set_timer()

    def remove(self, reader: Reader) -> None:
        """Remove a reader that has gone, or was never added."""
        self._readers.discard(reader)
        for channel in list(self._channels.values()):
            channel.readers.discard(reader)
            if not channel.readers:
                del self._channels[channel.name]
        if not self._readers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """End all streams."""
        for reader in list(self._readers):
            reader.end()
            self.remove(reader)

    def update_readers(self) -> Iterator[None]:
        """Send all readers what has changed, a channel at a time."""
        self._quiet_s += UPDATE_S
        now = self._clock.now()
        for channel in list(self._channels.values()):
            if channel.readers:
                self._update(channel, now)
                yield
        if self._quiet_s >= QUIET_S:
            self._quiet_s = 0.0
            self._send(self._readers, _NOTHING_NEW)

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()

        def update_and_set() -> None:
            self._set_timer()  # first: the last reader may go now
            update_next(self.update_readers())

        def update_next(channels: Iterator[None]) -> None:
            """Update one channel; what else waits for the loop goes before the next one."""
            for _ in channels:
                loop.call_soon(update_next, channels)
                return

        self._timer = loop.call_later(UPDATE_S, update_and_set)

    def _update(self, channel: _Channel, now: float) -> None:
        try:
            document = channel.build(now)
        except NotLeader as error:
            event = _event("leader", channel.name, now, leader=error.leader, message=str(error))
            for reader in list(channel.readers):
                reader.add_message(event)
                reader.end()
            return
        except RequestRefused as error:
            if not channel.is_gone:
                self._send(channel.readers, _event("gone", channel.name, now, message=str(error)))
            channel.is_gone = True
            return
        patch = difference(channel.document, document)
        channel.document, channel.at, channel.whole = document, now, None
        if channel.is_gone:  # and back
            channel.is_gone = False
            self._send(channel.readers, channel.whole_event())
        elif patch:
            self._send(channel.readers, _event("patch", channel.name, now, patch=patch))

    def _send(self, readers: set[Reader], message: bytes) -> None:
        for reader in list(readers):
            if reader.num_unread < MAX_UNREAD:
                reader.add_message(message)
            else:
                log.info("a reader of the event stream was disconnected: it does not keep up")
                self.remove(reader)
                reader.disconnect()


def _event(kind: str, channel: str, at: float, **content: Any) -> bytes:
    """One event as it is sent; ``at``: the instant of the clock of documents."""
    data = encoded({"channel": channel, "at": round(at, 3), **content})
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
