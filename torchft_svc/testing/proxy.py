"""A TCP proxy for tests of faults: it holds, cuts, delays, slows or damages what it passes on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

from torchft_svc.errors import ConfigError

# Gets bytes, and their offset in all bytes from the service; returns what to pass on, None to cut.
Hook = Callable[[int, bytes], bytes | None]
PIECE_BYTES = 16 << 10
DEADLINE_S = 20.0
# A throttled link catches up after an idle time of at most this, because sleeps end late.
BURST_S = 0.05


class Proxy:
    """Stands in front of the service at ``url``, which may also be a plain ``host:port``.

    ``hook`` gets the bytes from the service to its callers, in pieces of at most ``piece_bytes``.
    ``delay_s`` delays each piece, in both directions. A context manager; its end closes all.

    Raises:
        ConfigError: ``url`` names no port.
    """

    def __init__(
        self,
        url: str,
        hook: Hook | None = None,
        piece_bytes: int = PIECE_BYTES,
        delay_s: float = 0.0,
    ) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}")
        if parts.port is None:
            raise ConfigError("url", url, "it names no port")
        self._to = (parts.hostname, parts.port)
        self._hook = hook
        self._piece_bytes = piece_bytes
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = urlunsplit(parts._replace(netloc=self.address)).removeprefix("//")
        self._lock = threading.Lock()
        self._place = 0
        self._passing = threading.Event()
        self._passing.set()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self._connections: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="proxy")
        self._acceptor.start()

    def hold(self) -> None:
        """Pass nothing on in either direction, as if the host of the service were cut off.

        Has no effect once the proxy is closed, which a hook may not know.
        """
        with self._lock:
            if not self._closed:
                self._passing.clear()

    def release(self) -> None:
        """Pass on what was held, and everything later."""
        self._passing.set()

    def cut(self) -> None:
        """End the present connections; new ones are passed on."""
        with self._lock:
            for sock in self._sockets:
                _end(sock)

    @property
    def num_bytes(self) -> int:
        """How many bytes came from the service so far."""
        with self._lock:
            return self._place

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._connections = [each for each in self._connections if each.is_alive()]
            connection = threading.Thread(target=self._connect, args=(near,), name="proxy")
            self._connections.append(connection)
            connection.start()

    def _connect(self, near: socket.socket) -> None:
        """Carry one connection from its start to its end."""
        self._passing.wait()
        try:
            far = socket.create_connection(self._to, DEADLINE_S)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._hook is not None:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._piece_bytes)
        with self._lock:
            self._sockets |= {near, far}
            if self._closed:
                _end(near)
        up = threading.Thread(target=self._pass_on, args=(near, far), name="proxy")
        up.start()
        self._pass_on(far, near, downstream=True)
        up.join()
        with self._lock:
            self._sockets -= {near, far}
            near.close()
            far.close()

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, *, downstream: bool = False
    ) -> None:
        """Copy from ``source`` to ``sink`` until either ends."""
        with contextlib.suppress(OSError):
            while data := source.recv(self._piece_bytes):
                passed = self._apply_hook(data) if downstream else data
                if passed is None:
                    break
                if self._delay_s:
                    time.sleep(self._delay_s)
                self._passing.wait()
                sink.sendall(passed)
        _end(source)
        _end(sink)

    def _apply_hook(self, data: bytes) -> bytes | None:
        with self._lock:
            place = self._place
            self._place += len(data)
        return data if self._hook is None else self._hook(place, data)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        _end(self._listener)
        self.cut()
        self.release()
        self._acceptor.join(DEADLINE_S)  # it may add another connection
        for connection in self._connections:
            connection.join(DEADLINE_S)
        self._listener.close()


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class Throttle:
    """A hook that lets ``bytes_per_s`` pass, over all connections together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __call__(self, place: int, data: bytes) -> bytes:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now - BURST_S, self._free_at) + len(data) / self._bytes_per_s
            free_at = self._free_at
        time.sleep(max(0.0, free_at - now))
        return data


class Gate:
    """A hook that holds all pieces that begin at byte ``start`` or later, until it is opened."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, place: int, data: bytes) -> bytes:
        if place >= self._start:
            self._reached.set()
            self._opened.wait(DEADLINE_S)
        return data

    def wait_until_reached(self) -> None:
        assert self._reached.wait(DEADLINE_S), "the transfer never came that far"

    def open(self) -> None:
        self._opened.set()


class Damage:
    """A hook that does something to the bytes at ``places``, each once."""

    def __init__(self, places: list[int], *, cut: bool = False) -> None:
        self.left = sorted(places)
        self._cut = cut
        self._lock = threading.Lock()

    def __call__(self, place: int, data: bytes) -> bytes | None:
        with self._lock:
            if not self.left or not self.left[0] < place + len(data):
                return data
            offset = max(self.left.pop(0) - place, 0)
        if self._cut:
            return None
        damaged = bytearray(data)
        damaged[offset] ^= 1
        return bytes(damaged)
