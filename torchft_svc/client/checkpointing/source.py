"""A source of a state as seen by a receiver: its address, and the connections to it."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from urllib.parse import urlsplit

from torchft_svc.client.checkpointing.wire import BadHead, Wire
from torchft_svc.errors import AddressError, Unreachable

# A sentence; whatever is longer does not come from us.
_MAX_REASON_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """A response with status 200 whose body (``length`` bytes) is still to be read."""

    wire: Wire
    length: int


class Refused(Exception):
    """The source answered with another status than 200, and said why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason


class Source:
    """Connections to the worker at ``url``, by number; they open when first used.

    Raises:
        AddressError: ``url`` is not the metadata of a worker.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._host, self._port, self._path = _split(url)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._wires: dict[int, Wire] = {}
        self._interrupted = False

    @property
    def address(self) -> str:
        """The host and port, without the secret: for messages."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def ask(self, path: str, connection: int, wait_s: float = 0.0) -> Answer:
        """Send a request over ``connection``, and read the head of its response.

        ``wait_s``: how long the source may think before it answers.

        Raises:
            Refused: the status is not 200.
            BadHead: the response makes no sense; drop the connection.
            Unreachable: no connection could be made.
            ConnectionError, TimeoutError: it broke, or nothing came.
        """
        wire = self._wire(connection)
        request = f"GET {self._path}/{path} HTTP/1.1\r\nHost: {self.address}\r\n\r\n"
        wire.send(request.encode("ascii"))
        head = wire.read_head(begin_within_s=max(wait_s, self._timeout_s))
        if head is None:
            raise ConnectionResetError("the source closed the connection")
        version, _, rest = head.line.partition(" ")
        status = rest[:3]
        if version != "HTTP/1.1" or not (status.isascii() and status.isdigit()):
            raise BadHead("the answer is not HTTP/1.1")
        if status == "200":
            return Answer(wire, head.length)
        reason = bytearray(min(head.length, _MAX_REASON_BYTES))
        wire.read_into(memoryview(reason))
        if head.length > _MAX_REASON_BYTES or head.headers.get("connection") == "close":
            self.drop(connection)
        raise Refused(int(status), _sentence(reason))

    def drop(self, connection: int) -> None:
        """Close ``connection``; the next request over it opens another."""
        with self._lock:
            wire = self._wires.pop(connection, None)
        if wire is not None:
            wire.close()

    def interrupt(self) -> None:
        """Let every request fail at once, and the ones to come."""
        with self._lock:
            self._interrupted = True
            for wire in self._wires.values():
                wire.interrupt()

    def close(self) -> None:
        for connection in list(self._wires):
            self.drop(connection)

    def _wire(self, connection: int) -> Wire:
        with self._lock:
            wire = self._wires.get(connection)
        if wire is not None:
            return wire
        try:
            sock = socket.create_connection((self._host, self._port), self._timeout_s)
        except TimeoutError as error:
            raise self._unreachable(f"no answer within {self._timeout_s:.3g} s") from error
        except (OSError, UnicodeError) as error:
            raise self._unreachable(str(error)) from error
        wire = Wire(sock, self._timeout_s)
        with self._lock:
            self._wires[connection] = wire
            if self._interrupted:
                wire.interrupt()
        return wire

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable("checkpoint source", self.address, reason)


def _sentence(reason: bytearray) -> str:
    """What the source said, fit for a line of a log."""
    text = reason.decode("ascii", "replace").strip()
    return "".join(char if char.isprintable() else "?" for char in text)


def _split(url: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise AddressError(url, f"is not a checkpoint address: {error}") from error
    if parts.scheme != "http" or not host or not port or not url.isascii() or " " in url:
        raise AddressError(url, "is not a checkpoint address, such as http://host:1234/secret")
    return host, port, parts.path.rstrip("/")
