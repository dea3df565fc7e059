"""Accepts connections: one thread listens, and one serves each of them; ``close`` joins all."""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from torchft_svc.client.checkpointing.http.requests import (
    BUSY,
    HEAD_TIMEOUT_S,
    Admission,
    refuse,
)
from torchft_svc.client.checkpointing.http.wire import Wire, wrap
from torchft_svc.client.process.forks import drop_after_fork
from torchft_svc.host.address import HostPort, listen
from torchft_svc.rpc.security import Security

log = logging.getLogger(__name__)

# Sixteen groups that heal at once from one worker, with four connections each; more have to wait.
# A connection that has not shown the secret is cut for a new one.
MAX_CONNECTIONS = 64
# Beside these, connections for what nobody waits for: previews (rule K6).
MAX_APART = 32
# The process has too many open descriptors: accepting again at once would fail again.
_NO_DESCRIPTOR_PAUSE_S = 1.0
# On the same host a large buffer only evicts the bytes from the cache.
_SAME_HOST_BUFFER_BYTES = 256 << 10
# Connections that wait to be accepted; the system may allow fewer. A refused client retries after a
# second.
_BACKLOG = 4096
# Of all threads together. One ends as soon as its connection is cut, unless the program of a
# session does something else.
_JOIN_TIMEOUT_S = 5.0


# Serves one connection, and returns when it is over.
Converse = Callable[[Wire, Admission], None]


class ConnectionServer:
    """Listens at one port, and serves each connection by ``converse`` on a thread of its own.

    At most `MAX_CONNECTIONS` at once, and `MAX_APART` that are counted apart.

    Args:
        converse: what a thread does with a connection, after the TLS handshake.
        kind: what the connections are for: in the names of threads and in the log.
        bind_host: the address to listen at, ``""`` for all interfaces (IPv6, too, if available).
        pass_time: called when something has woken the server; returns the time (monotonic) at
            which it is to be called again, or None.

    Raises:
        AddressError: the address cannot be bound.
        ConfigError: files in ``security`` cannot be read, or are not enough for a server.
    """

    def __init__(
        self,
        converse: Converse,
        kind: str,
        bind_host: str,
        port: int,
        security: Security,
        *,
        pass_time: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._converse = converse
        self._kind = kind
        self._tls = security.server_context()
        self._pass_time = pass_time
        self._listener = listen(HostPort(bind_host, port), _BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._lock = threading.Lock()
        self._connections: dict[Wire, threading.Thread] = {}
        self._unverified: dict[Wire, None] = {}  # without the secret so far; oldest first
        self._apart: set[Wire] = set()
        self._closing = False
        self._acceptor = threading.Thread(
            target=self._accept_all, name=f"torchft-{kind}-accept", daemon=True
        )
        drop_after_fork(self)

    def start(self) -> None:
        """Begin to accept connections."""
        self._acceptor.start()

    def close(self, wait: bool = True) -> None:
        """Cut all connections; with ``wait``, also join the threads (at most 5 s). Idempotent."""
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        self.wake()
        for wire in connections:
            wire.interrupt()
        if wait:
            until = time.monotonic() + _JOIN_TIMEOUT_S
            for thread in [self._acceptor, *connections.values()]:
                if thread is not threading.current_thread():
                    thread.join(max(0.0, until - time.monotonic()))

    def wake(self) -> None:
        """Make the server call ``pass_time``."""
        try:
            self._wake_writer.send(b"w")
        except OSError:
            return  # it is closed, or has further wakes to read

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake_reader, select.POLLIN)
        try:
            while not self._closing:
                look_again_at = self._pass_time()
                pause_s = None if look_again_at is None else look_again_at - time.monotonic()
                ready = poll.poll(None if pause_s is None else max(pause_s, 0.0) * 1000 + 1)
                for descriptor, _ in ready:
                    if descriptor == self._listener.fileno():
                        self._accept()
                    else:
                        self._wake_reader.recv(4096)
        finally:
            self._listener.close()
            self._wake_reader.close()
            self._wake_writer.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the peer has left, or descriptors ran out
            log.warning("a %s connection could not be accepted: %s", self._kind, error)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_NO_DESCRIPTOR_PAUSE_S)
            return
        try:
            wire = self._make_wire(sock)
        except OSError as error:
            log.info("a %s connection broke: %s", self._kind, error)
            sock.close()
            return
        with self._lock:
            if self._closing:
                wire.close()
                return
            has_room = self._make_room()
            if has_room:
                self._begin_to_serve(wire)
        if not has_room:
            self._turn_away(wire)

    def _begin_to_serve(self, wire: Wire) -> None:
        """Start and record the thread of a connection; needs the lock, which it takes to end."""
        thread = threading.Thread(
            target=self._serve, args=(wire,), name=f"torchft-{self._kind}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the process may have no more threads at the moment
            log.warning("a %s connection could not be served: %s", self._kind, error)
            wire.close()
            return
        self._connections[wire] = thread
        self._unverified[wire] = None

    def _make_wire(self, sock: socket.socket) -> Wire:
        """Return the connection over ``sock``; with TLS, before its handshake.

        Raises:
            OSError: the peer has reset it already, which Python's TLS refuses, too.
        """
        if sock.getpeername()[0] == sock.getsockname()[0]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SAME_HOST_BUFFER_BYTES)
        return Wire(sock if self._tls is None else wrap(sock, self._tls, None), timeout_s=1.0)

    def _make_room(self) -> bool:
        """Whether there is room for another connection; cuts an unverified one if necessary."""
        num_connections = len(self._connections) - len(self._apart)
        if num_connections < MAX_CONNECTIONS:
            return True
        oldest = next(iter(self._unverified), None)
        # Connections that were cut for a new one and have not ended yet count, too.
        if oldest is None or num_connections >= 2 * MAX_CONNECTIONS:
            return False
        del self._unverified[oldest]
        oldest.interrupt()
        return True

    def _verify(self, wire: Wire) -> None:
        with self._lock:
            self._unverified.pop(wire, None)

    def _count_apart(self, wire: Wire) -> bool:
        with self._lock:
            if wire not in self._apart and len(self._apart) >= MAX_APART:
                return False
            self._apart.add(wire)
            return True

    def _serve(self, wire: Wire) -> None:
        try:
            wire.shake_hands(HEAD_TIMEOUT_S)
            admission = Admission(partial(self._verify, wire), partial(self._count_apart, wire))
            self._converse(wire, admission)
        except OSError as error:
            log.info("a %s connection broke: %s", self._kind, error)
        except Exception:
            log.exception("a %s connection failed", self._kind)
        finally:
            with self._lock:
                self._connections.pop(wire, None)
                self._unverified.pop(wire, None)
                self._apart.discard(wire)
            wire.close()

    def _turn_away(self, wire: Wire) -> None:
        try:
            if self._tls is None:  # a TLS handshake would block the thread that accepts
                reason = f"{MAX_CONNECTIONS} connections are open"
                refuse(wire, BUSY, reason, close=True)
        except OSError as error:
            log.debug("could not inform a peer that this worker is busy: %s", error)
        finally:
            wire.close()

    def drop_descriptors(self) -> None:
        """Close the parent's connections in a forked child, so that they end with the parent."""
        self._listener.close()
        for wire in list(self._connections):
            with contextlib.suppress(OSError):  # a process group took it for one of its sockets
                wire.close()
