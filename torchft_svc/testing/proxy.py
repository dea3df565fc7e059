"""A real TCP proxy that damages, holds, slows or cuts what flows from a source to a receiver."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

from torchft_svc.errors import ConfigError

# What a hook may do with bytes that begin at a place in the whole downstream: None cuts.
Hook = Callable[[int, bytes], bytes | None]
PIECE_BYTES = 16 << 10
DEADLINE_S = 20.0
# A link makes up for as much time in which nobody asked for bytes: sleeps end late.
BURST_S = 0.05


class Proxy:
    """Stands before the source at ``url``; ``hook`` sees everything that goes to receivers,
    at most ``piece_bytes`` at once.

    Raises:
        ConfigError: ``url`` names no port.
    """

    def __init__(self, url: str, hook: Hook, piece_bytes: int = PIECE_BYTES) -> None:
        parts = urlsplit(url)
        if parts.port is None:
            raise ConfigError("url", url, "it names no port")
        self._to = (parts.hostname, parts.port)
        self._hook = hook
        self._piece_bytes = piece_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = urlunsplit(parts._replace(netloc=f"127.0.0.1:{self._listener.getsockname()[1]}"))
        self._lock = threading.Lock()
        self._place = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="proxy")]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._to, DEADLINE_S)
            except OSError:
                near.close()
                continue
            near.settimeout(DEADLINE_S)
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._piece_bytes)
            self._sockets += [near, far]
            for pump in (self._up, self._down):
                thread = threading.Thread(target=pump, args=(near, far), name="proxy")
                self._threads.append(thread)
                thread.start()

    def _up(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(self._piece_bytes):
                far.sendall(data)
        _end(far)

    def _down(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(self._piece_bytes):
                with self._lock:
                    place = self._place
                    self._place += len(data)
                passed_on = self._hook(place, data)
                if passed_on is None:
                    break
                near.sendall(passed_on)
        _end(near)
        _end(far)

    @property
    def num_bytes(self) -> int:
        """How many bytes came from the source so far."""
        with self._lock:
            return self._place

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._listener)
        for sock in self._sockets:
            _end(sock)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for sock in [self._listener, *self._sockets]:
            sock.close()


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
    """A hook that holds everything from byte ``start`` on until it is opened."""

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
