"""Channels between an agent and a worker over queues and over a socket: any transport will do."""

from __future__ import annotations

import contextlib
import json
import queue
import select
import socket
import threading
import time
from multiprocessing import connection
from typing import Any

from torchft_svc.elastic.channel import MAX_MESSAGE_BYTES, Message
from torchft_svc.errors import ChannelClosed, RequestRefused


def encoded(message: Message) -> bytes:
    try:
        data = json.dumps(message, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RequestRefused(f"no JSON: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise RequestRefused(f"a message has {len(data)} bytes")
    return data


class QueueChannel:
    """A channel between threads of one process."""

    def __init__(self, inbox: queue.Queue[bytes | None], outbox: queue.Queue[bytes | None]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._closed = False

    @classmethod
    def pair(cls) -> tuple[QueueChannel, QueueChannel]:
        one: queue.Queue[bytes | None] = queue.Queue()
        other: queue.Queue[bytes | None] = queue.Queue()
        return cls(one, other), cls(other, one)

    def send(self, message: Message) -> None:
        data = encoded(message)
        if self._closed:
            raise ChannelClosed("queue", "closed")
        self._outbox.put(data)

    def receive(self, timeout_s: float | None) -> Message | None:
        try:
            data = self._inbox.get(timeout_s != 0, timeout_s)
        except queue.Empty:
            data = b""
        if self._closed or data is None:
            self._inbox.put(None)  # for the next one who asks
            raise ChannelClosed("queue", "closed")
        return dict(json.loads(data)) if data else None

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        self._closed = True
        self._inbox.put(None)
        self._outbox.put(None)


class SocketChannel:
    """A channel between processes; each message is a frame of multiprocessing's connections."""

    def __init__(self, end: socket.socket) -> None:
        self._end = connection.Connection(end.detach())
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._closed = False

    @classmethod
    def pair(cls) -> tuple[SocketChannel, SocketChannel]:
        one, other = socket.socketpair()
        for each in (one, other):  # a sender must not wait for its receiver
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE_BYTES)
        return cls(one), cls(other)

    def send(self, message: Message) -> None:
        data = encoded(message)
        with self._sending:
            if self._closed:
                raise ChannelClosed("socket", "closed")
            try:
                self._end.send_bytes(data)
            except OSError as error:
                raise ChannelClosed("socket", str(error)) from error

    def receive(self, timeout_s: float | None) -> Message | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._receiving:
            while not self._closed:
                left_s = 0.05 if deadline is None else min(0.05, deadline - time.monotonic())
                try:
                    if self._end.poll(max(0.0, left_s)):
                        return dict(json.loads(self._end.recv_bytes(MAX_MESSAGE_BYTES)))
                except (EOFError, OSError) as error:
                    raise ChannelClosed("socket", str(error)) from error
                if left_s <= 0:
                    return None
        raise ChannelClosed("socket", "closed")

    def fileno(self) -> int | None:
        return self._end.fileno()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with self._sending, self._receiving:
                self._end.close()


def readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def receive_all(channel: Any, count: int, timeout_s: float = 10.0) -> list[Message]:
    found = []
    with contextlib.suppress(ChannelClosed):
        while len(found) < count and (message := channel.receive(timeout_s)) is not None:
            found.append(message)
    return found
