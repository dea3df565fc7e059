"""TLS sockets with the interface of non-blocking plain sockets."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# The size of a TLS record; a shorter piece costs as much to send.
RECORD_BYTES = 16 << 10


class TLSSocket(ssl.SSLSocket):
    """Raises `BlockingIOError` where a plain socket does, and may be shut down by any thread.

    After the handshake no operation waits for the other direction, as nothing is renegotiated.
    """

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        with _as_plain():
            return super().recv(buflen, flags)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        with _as_plain():
            return super().recv_into(buffer, nbytes, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        with _as_plain():
            return super().send(data, flags)

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


@contextlib.contextmanager
def _as_plain() -> Iterator[None]:
    try:
        yield
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise BlockingIOError from None


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
