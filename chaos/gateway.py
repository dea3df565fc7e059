"""A way to a service that can be blocked: a TCP proxy that passes everything on, or nothing."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from contextlib import suppress

_PIECE_BYTES = 64 << 10
# Who takes nothing for so long is cut off: what the others send must not wait for it.
_PATIENCE_S = 2.0


class Gateway:
    """Stands before the service at ``to``; a context manager, which cuts all connections.

    While it is held, bytes of both directions stay where they are and new connections are not
    answered: for those behind it, the service's host has gone without a word.
    """

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers: dict[socket.socket, socket.socket] = {}
        self._held = self._closing = self._cutting = False
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="gateway")
        self._thread.start()

    def hold(self) -> None:
        """Pass nothing on from here on."""
        self._held = True
        os.write(self._waker, b".")

    def release(self) -> None:
        """Pass on what was held, and what comes."""
        self._held = False
        os.write(self._waker, b".")

    def cut(self) -> None:
        """End the connections that are there; new ones are passed on."""
        self._cutting = True
        os.write(self._waker, b".")

    def _run(self) -> None:
        while not self._closing:
            passing = [] if self._held else [self._listener, *self._peers]
            ready = _readable([self._wake, *passing])
            if self._wake in ready:
                os.read(self._wake, 4096)
                if self._cutting:
                    self._cutting = False
                    while self._peers:
                        self._cut(next(iter(self._peers)))
                continue  # it may be held now
            for sock in ready:
                if sock is self._listener:
                    self._accept()
                elif sock in self._peers:  # its end may have been cut in this round
                    self._pass_on(sock)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._to, _PATIENCE_S)
        except OSError:
            near.close()
            return
        for sock in (near, far):
            sock.settimeout(_PATIENCE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers |= {near: far, far: near}

    def _pass_on(self, sock: socket.socket) -> None:
        data = b""
        with suppress(OSError):
            data = sock.recv(_PIECE_BYTES)
            self._peers[sock].sendall(data)
        if not data:
            self._cut(sock)

    def _cut(self, sock: socket.socket) -> None:
        peer = self._peers.pop(sock)
        del self._peers[peer]
        sock.close()
        peer.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        os.write(self._waker, b".")
        self._thread.join()
        for sock in [self._listener, *self._peers]:
            sock.close()
        os.close(self._wake)
        os.close(self._waker)


def _readable(ends: list[int | socket.socket]) -> list[int | socket.socket]:
    """Those that can be read, once there is one; unlike `select.select`, of any number."""
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select()]  # type: ignore[misc]
