"""Accepts receivers: one thread listens, and one serves each connection; ``close`` joins them."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import select
import socket
import threading
import time

from torchft_svc.client.checkpointing.http.requests import (
    BUSY,
    HEAD_TIMEOUT_S,
    Conversation,
    refuse,
)
from torchft_svc.client.checkpointing.http.served import OfferSlot, ServedState
from torchft_svc.client.checkpointing.http.wire import Wire, wrap
from torchft_svc.client.process.forks import drop_after_fork
from torchft_svc.host.address import HostPort, listen
from torchft_svc.rpc.security import PLAIN, Security

log = logging.getLogger(__name__)

# Sixteen groups that heal at once from one worker, with four connections each; more have to wait.
# A connection that has not shown the secret is cut for a new one.
MAX_CONNECTIONS = 64
# Includes connections that were cut for a new one and have not ended yet.
_MAX_THREADS = 2 * MAX_CONNECTIONS
# The process has too many open descriptors: accepting again at once would fail again.
_NO_DESCRIPTOR_PAUSE_S = 1.0
# On the same host a large buffer only evicts the bytes from the cache.
_SAME_HOST_BUFFER_BYTES = 256 << 10
# Connections that wait to be accepted; the system may allow fewer. A refused client retries after a
# second.
_BACKLOG = 4096
# A thread ends as soon as its connection is cut.
_JOIN_TIMEOUT_S = 5.0


class CheckpointServer:
    """Serves the states in ``slots`` by their names, at one port and below one secret.

    ``bind_host``: the address to listen at, ``""`` for all interfaces (IPv6, too, if available).

    Raises:
        AddressError: it cannot be bound.
        ConfigError: files in ``security`` cannot be read, or are not enough for a server.
    """

    def __init__(
        self,
        slots: dict[str, OfferSlot],
        bind_host: str = "",
        port: int = 0,
        security: Security = PLAIN,
    ) -> None:
        self._security = security
        self._tls = security.server_context()
        self.secret = secrets.token_urlsafe(16)
        self._slots = slots
        self._listener = listen(HostPort(bind_host, port), _BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._lock = threading.Lock()
        self._connections: dict[Wire, threading.Thread] = {}
        self._unverified: dict[Wire, None] = {}  # without the secret so far; oldest first
        self._closing = False
        self._acceptor = threading.Thread(
            target=self._accept_all, name="torchft-checkpoint-accept", daemon=True
        )
        drop_after_fork(self)
        self._acceptor.start()

    def offer(self, name: str, state: ServedState) -> None:
        """Serve ``state`` under ``name`` instead of the previous one."""
        self._slots[name].offer(state)
        self._wake()

    def close(self, wait: bool = True) -> None:
        """Cut all connections; with ``wait``, also join all threads. Idempotent."""
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        for slot in self._slots.values():
            slot.close()
        self._wake()
        for wire in connections:
            wire.interrupt()
        if wait:
            for thread in [self._acceptor, *connections.values()]:
                thread.join(_JOIN_TIMEOUT_S)

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"w")
        except OSError:
            return  # it is closed already

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake_reader, select.POLLIN)
        try:
            while not self._closing:
                now = time.monotonic()
                times = [slot.expire(now) for slot in self._slots.values()]
                look_again_at = min((at for at in times if at is not None), default=None)
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
            log.warning("a checkpoint connection could not be accepted: %s", error)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_NO_DESCRIPTOR_PAUSE_S)
            return
        if _is_on_same_host(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SAME_HOST_BUFFER_BYTES)
        wire = Wire(sock if self._tls is None else wrap(sock, self._tls, None), timeout_s=1.0)
        with self._lock:
            if self._closing:
                wire.close()
                return
            has_room = self._make_room()
            if has_room:
                thread = threading.Thread(
                    target=self._converse, args=(wire,), name="torchft-checkpoint-send", daemon=True
                )
                self._connections[wire] = thread
                self._unverified[wire] = None
        if has_room:
            thread.start()
        else:
            self._turn_away(wire)

    def _make_room(self) -> bool:
        """Whether there is room for another connection; cuts an unverified one if necessary."""
        if len(self._connections) < MAX_CONNECTIONS:
            return True
        oldest = next(iter(self._unverified), None)
        if oldest is None or len(self._connections) >= _MAX_THREADS:
            return False
        del self._unverified[oldest]
        oldest.interrupt()
        return True

    def _converse(self, wire: Wire) -> None:
        def know() -> None:
            with self._lock:
                self._unverified.pop(wire, None)

        try:
            wire.shake_hands(HEAD_TIMEOUT_S)
            Conversation(wire, self._slots, self.secret, self._security, know).run()
        except OSError as error:
            log.info("a checkpoint connection broke: %s", error)
        except Exception:
            log.exception("a checkpoint connection failed")
        finally:
            with self._lock:
                self._connections.pop(wire, None)
                self._unverified.pop(wire, None)
            wire.close()

    def _turn_away(self, wire: Wire) -> None:
        try:
            if self._tls is None:  # a TLS handshake would block the thread that accepts
                refuse(wire, BUSY, f"{MAX_CONNECTIONS} connections are open", close=True)
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


def _is_on_same_host(sock: socket.socket) -> bool:
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:
        return False  # the peer is gone again
