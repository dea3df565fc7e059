"""An HTTP/1.1 connection: heads of limited size, and bodies that end with a digest.

A *sealed* body is a payload followed by its digest (xxh3, 8 bytes, seeded with the number of the
chunk, so that one chunk is not accepted for another). The digest comes last, so it is computed in
the same pass over memory as the payload is sent. Every wait has an idle timeout, ``timeout_s``
seconds. The total time of a body is not limited, but a peer that sends it more slowly than
`LEAST_BYTES_PER_S` counts as silent: otherwise a byte now and then would hold a reader for ever.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import xxhash

DIGEST_BYTES = 8
# Our heads are below 1 KiB; a longer one is refused before it is stored.
MAX_HEAD_BYTES = 8 << 10
# Small enough to stay in a core's cache between hashing and sending.
PIECE_BYTES = 512 << 10
# What is only hashed, and not sent: between two pieces a thread waits for the interpreter's lock. A
# reader keeps an update waiting for one piece, which takes well below a millisecond.
HASHED_BYTES = 2 << 20
# Over ``timeout_s``, for each body: far below what any link between workers carries, also where
# some connections share it.
LEAST_BYTES_PER_S = 10e3
# The most buffers in one call; systems allow 1024.
MAX_VIEWS = 512
# The size of a TLS record; a shorter piece costs as much to send.
RECORD_BYTES = 16 << 10
# With TLS, after the handshake no operation waits for the other direction: nothing is renegotiated.
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_END_OF_HEAD = b"\r\n\r\n"

# Returns a context with the buffers of a payload between two offsets.
Reading = Callable[[int, int], AbstractContextManager[list[memoryview]]]


class BadHead(ValueError):
    """The peer does not speak HTTP/1.1, or exceeds a limit; ``status`` is that of the response."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class Corrupt(Exception):
    """A body arrived completely, but does not match its digest."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of a request or response, and its headers with names in lower case."""

    line: str
    headers: dict[str, str]

    @property
    def length(self) -> int:
        """The length of the body in bytes.

        Raises:
            BadHead: the header is missing.
        """
        text = self.headers.get("content-length", "")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise BadHead("a response has no length")
        return int(text)


class Wire:
    """Owns a connected socket; errors are ``OSError``, for a closed peer ``ConnectionError``."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._pending = bytearray()
        self.timeout_s = timeout_s
        self.received_at = 0.0  # monotonic; 0: nothing has arrived

    def close(self) -> None:
        self._socket.close()

    def shake_hands(self, timeout_s: float) -> None:
        """Do the TLS handshake, if the socket uses TLS; must come first."""
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(timeout_s)
            self._socket.do_handshake()
            self._socket.setblocking(False)

    def interrupt(self) -> None:
        """Make all waits on this connection, on any thread, fail at once."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already

    def has_peer(self) -> bool:
        """Whether the peer has not closed the connection, as far as is known; for any thread that
        knows that nothing else is to be read."""
        raw = self._socket
        try:
            with socket.socket(fileno=os.dup(raw.fileno())) as copy:  # peeking is not for TLS
                return bool(copy.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def read_head(self, begin_within_s: float | None = None) -> Head | None:
        """The next head; None if the peer closed the connection.

        ``begin_within_s``: how long to wait for its first byte (default: ``timeout_s``).

        Raises:
            BadHead: it is not the head of an HTTP message.
        """
        wait_s = self.timeout_s if begin_within_s is None else begin_within_s
        until: float | None = None  # the deadline for a whole head, so that it cannot trickle
        while (end := self._pending.find(_END_OF_HEAD)) < 0:
            if len(self._pending) > MAX_HEAD_BYTES:
                raise BadHead(f"a head longer than {MAX_HEAD_BYTES} bytes", 431)
            if self._pending and not _may_begin_head(self._pending):
                raise BadHead("this is not HTTP")
            if self._pending:
                until = until or time.monotonic() + self.timeout_s
                wait_s = until - time.monotonic()
            self._wait(select.POLLIN, wait_s)
            received = bytearray(4096)
            count = self._receive(received)
            if not count:
                if self._pending:
                    raise ConnectionResetError("the peer left in the middle of a head")
                return None
            self._pending += received[:count]
        head = bytes(self._pending[:end])
        del self._pending[: end + len(_END_OF_HEAD)]
        return _parse_head(head)

    def read_sealed(self, target: memoryview, seed: int) -> bytes:
        """Fill ``target`` with a payload, and check and return the digest that follows it.

        Raises:
            Corrupt: the digest differs.
            TimeoutError: no byte arrived for ``timeout_s``, or too few (`LEAST_BYTES_PER_S`).
        """
        digest = xxhash.xxh3_64(seed=seed)
        pace = _Pace(self.timeout_s)
        place = 0
        while place < len(target):
            pace.check(place, self.received_at)
            count = self._receive_into(target[place : place + PIECE_BYTES])
            digest.update(target[place : place + count])
            place += count
        seal = bytearray(DIGEST_BYTES)
        self.read_into(memoryview(seal))
        if seal != digest.digest():
            raise Corrupt(f"checksum {seal.hex()} does not fit the {len(target)} bytes before it")
        return bytes(seal)

    def read_into(self, target: memoryview) -> None:
        """Fill ``target``; raises `TimeoutError` as `read_sealed` does."""
        pace = _Pace(self.timeout_s)
        place = 0
        while place < len(target):
            pace.check(place, self.received_at)
            place += self._receive_into(target[place:])

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except WOULD_BLOCK:
                self._wait(select.POLLOUT, self.timeout_s)

    def send_sealed(
        self, reading: Reading, size: int, seed: int, on_digest: Callable[[bytes], None]
    ) -> None:
        """Send ``size`` bytes and their digest; no reading is open during a wait for the peer.

        ``on_digest`` gets the digest before the peer can have all of it.
        """
        digest = xxhash.xxh3_64(seed=seed)
        place = 0
        while place < size:
            try:
                with reading(place, min(place + PIECE_BYTES, size)) as views:
                    count = self._socket.sendmsg(views)
                    _update(digest, views, count)
            except WOULD_BLOCK:
                self._wait(select.POLLOUT, self.timeout_s)
            else:
                place += count
        on_digest(digest.digest())
        self.send(digest.digest())

    def _receive_into(self, target: memoryview) -> int:
        if self._pending:
            count = min(len(self._pending), len(target))
            target[:count] = self._pending[:count]
            del self._pending[:count]
            return count
        count = self._receive(target)
        if not count:
            raise ConnectionResetError("the peer left in the middle of a body")
        return count

    def _receive(self, target: memoryview | bytearray) -> int:
        while True:
            try:
                count = self._socket.recv_into(target)
            except WOULD_BLOCK:  # a spurious wake-up, or a part of a TLS record
                self._wait(select.POLLIN, self.timeout_s)
            else:
                self.received_at = time.monotonic()
                return count

    def _wait(self, events: int, timeout_s: float) -> None:
        tls = self._socket if isinstance(self._socket, ssl.SSLSocket) else None
        if tls is not None and events == select.POLLIN and tls.pending():
            return  # there are decrypted bytes, which poll() does not see
        poll = select.poll()
        poll.register(self._socket, events)
        if not poll.poll(max(timeout_s, 0.0) * 1000):
            raise TimeoutError(f"no byte moved for {timeout_s:.3g} s")


class _Pace:
    """Checks in each ``window_s`` of a body whether it arrives at `LEAST_BYTES_PER_S`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began_at = time.monotonic()
        self._began_with = 0

    def check(self, num_bytes: int, now: float) -> None:
        """Raise `TimeoutError` if too little has arrived since the window began."""
        if now - self._began_at < self._window_s:
            return
        arrived = num_bytes - self._began_with
        if arrived < LEAST_BYTES_PER_S * self._window_s:
            raise TimeoutError(f"only {arrived} bytes arrived within {self._window_s:.3g} s")
        self._began_at, self._began_with = now, num_bytes


class TLSSocket(ssl.SSLSocket):
    """A TLS socket with `sendmsg`, as a plain socket has, that any thread may shut down."""

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """Send the first bytes: at most one record.

        A record that did not fit is kept encrypted, and the next call has to pass the same bytes:
        so the length must not depend on how they are split into buffers.
        """
        return self.send(_first_bytes(list(buffers), RECORD_BYTES))

    def shutdown(self, how: int) -> None:
        """Shut down, but keep the TLS state, which another thread may be using."""
        socket.socket.shutdown(self, how)


def wrap(sock: socket.socket, context: ssl.SSLContext, server_hostname: str | None) -> TLSSocket:
    """``sock`` with TLS, before the handshake; as the server if ``server_hostname`` is None."""
    context.sslsocket_class = TLSSocket
    wrapped = context.wrap_socket(
        sock,
        server_side=server_hostname is None,
        server_hostname=server_hostname,
        do_handshake_on_connect=False,
    )
    assert isinstance(wrapped, TLSSocket)
    return wrapped


def _first_bytes(views: Sequence[memoryview], limit: int) -> memoryview | bytes:
    if not views or len(views[0]) >= limit:
        return views[0][:limit] if views else b""
    pieces = []
    left = limit
    for view in views:
        pieces.append(view[:left])
        left -= len(pieces[-1])
        if not left:
            break
    return b"".join(pieces)


def digest_of(reading: Reading, size: int, seed: int) -> bytes:
    """The digest that ``send_sealed`` would send."""
    digest = xxhash.xxh3_64(seed=seed)
    for place in range(0, size, HASHED_BYTES):
        end = min(place + HASHED_BYTES, size)
        while place < end:
            with reading(place, end) as views:
                count = sum(map(len, views))
                _update(digest, views, count)
            place += count
    return digest.digest()


def seal(payload: bytes, seed: int) -> bytes:
    """``payload`` followed by its digest."""
    return payload + xxhash.xxh3_64(payload, seed=seed).digest()


def _update(digest: xxhash.xxh3_64, views: list[memoryview], count: int) -> None:
    for view in views:
        digest.update(view[:count])
        count -= len(view)
        if count <= 0:
            return


def _may_begin_head(data: bytearray) -> bool:
    """Whether the first bytes are text, so that garbage is refused early."""
    return all(32 <= byte < 127 or byte in b"\r\n\t" for byte in data[:64])


def _parse_head(head: bytes) -> Head:
    try:
        line, *header_lines = head.decode("ascii").split("\r\n")
    except UnicodeDecodeError as error:
        raise BadHead("a head is not ASCII text") from error
    headers: dict[str, str] = {}
    for text in header_lines:
        name, colon, value = text.partition(":")
        if not colon or not name or name != name.strip():
            raise BadHead("a header line is malformed")
        headers[name.lower()] = value.strip()
    return Head(line, headers)
