"""Requests to one server, over numbered connections that open when they are first used."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from torchft_svc.client.checkpointing.http.requests import BUSY, GONE, UNAUTHORIZED
from torchft_svc.client.checkpointing.http.wire import BadHead, Wire, wrap
from torchft_svc.client.checkpointing.transport import MAX_REASON_BYTES, decode_reason
from torchft_svc.errors import AddressError, CheckpointError, Unauthorized, Unreachable
from torchft_svc.host.address import HostPort
from torchft_svc.rpc.security import Security
from torchft_svc.rpc.tls_reasons import tls_reason

# A peer that closes the connection without a TLS shutdown. The second error occurs in Pythons whose
# OpenSSL ignores a missing shutdown, such as Debian 12's.
_HANGING_UP = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError)
# The error if the scheme of the source differs from the setting of this side.
_ONE_SIDED = {
    "http": "it does not use TLS, but TLS is set here: set TORCHFT_TLS_CERT and TORCHFT_TLS_KEY "
    "there",
    "https": "it speaks TLS: set TORCHFT_TLS_CA, TORCHFT_TLS_CERT and TORCHFT_TLS_KEY here",
}


@dataclass(frozen=True, slots=True)
class OpenResponse:
    """A response with status 200 whose body (``length`` bytes) has not been read yet."""

    wire: Wire
    length: int


class Refused(Exception):
    """The source answered with another status than 200, and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason


class Source:
    """Connections to the server at ``url``, by number; they open when first used.

    ``what`` names the server in messages.

    Raises:
        AddressError: ``url`` is not an address with a scheme.
        Unauthorized: only one of the two sides uses TLS.
    """

    def __init__(
        self, url: str, timeout_s: float, security: Security, what: str = "checkpoint source"
    ) -> None:
        self._what = what
        scheme, self._where, self._path = _split(url, what)
        self.address = str(self._where)  # without the secret: for messages
        self._tls = security.client_context()
        if (scheme == "https") != (self._tls is not None):
            raise Unauthorized(f"{what} at {self.address}: {_ONE_SIDED[scheme]}")
        shown = "" if security.token is None else f"Authorization: {security.authorization}\r\n"
        self._headers = f"Host: {self.address}\r\n{shown}\r\n"
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._wires: dict[int, Wire] = {}
        self._received_at = 0.0
        self._interrupted = False

    def received_at(self) -> float:
        """The time when the last byte arrived (monotonic; 0: none has)."""
        with self._lock:
            return max([self._received_at, *(wire.received_at for wire in self._wires.values())])

    def ask(self, path: str, connection: int, wait_s: float = 0.0) -> OpenResponse:
        """Send a request over ``connection``, and read the head of its response.

        ``wait_s``: how long the source may take before it answers.

        Raises:
            Refused: the status is not 200.
            CheckpointError: the state is gone.
            BadHead: the response is malformed; drop the connection.
            Unreachable: the source cannot be connected.
            Unauthorized: authentication failed; the message says what to set.
            ConnectionError, TimeoutError: the connection broke, or timed out.
        """
        wire = self._wire(connection)
        request = f"GET {self._path}/{path} HTTP/1.1\r\n{self._headers}"
        with self._naming_distrust():
            try:
                wire.send(request.encode("ascii"))
            except _HANGING_UP:
                if self._tls is None:
                    raise
                # A source that rejects our certificate sends an alert and closes: read that.
            head = wire.read_head(begin_within_s=max(wait_s, self._timeout_s))
        if head is None:
            raise ConnectionResetError("the source closed the connection")
        version, _, rest = head.line.partition(" ")
        status = rest[:3]
        if version != "HTTP/1.1" or not (status.isascii() and status.isdigit()):
            raise BadHead("the answer is not HTTP/1.1")
        if status == "200":
            return OpenResponse(wire, head.length)
        reason = bytearray(min(head.length, MAX_REASON_BYTES))
        wire.read_into(memoryview(reason))
        if head.length > MAX_REASON_BYTES or head.headers.get("connection") == "close":
            self.drop_connection(connection)
        if int(status) == UNAUTHORIZED:
            raise Unauthorized(f"{self._what} at {self.address}: {decode_reason(reason)}")
        if int(status) == GONE:
            raise CheckpointError(self.address, decode_reason(reason))
        raise Refused(int(status), decode_reason(reason))

    def drop_connection(self, connection: int) -> None:
        """Close ``connection``; the next request over it opens another."""
        with self._lock:
            wire = self._wires.pop(connection, None)
            if wire is not None:
                self._received_at = max(self._received_at, wire.received_at)
        if wire is not None:
            wire.close()

    def cut(self, connection: int) -> None:
        """Make the request under way over ``connection`` fail; its thread then drops it."""
        with self._lock:
            wire = self._wires.get(connection)
            if wire is not None:
                wire.interrupt()

    def interrupt(self) -> None:
        """Make every request fail at once, including later ones."""
        with self._lock:
            self._interrupted = True
            for wire in self._wires.values():
                wire.interrupt()

    def close(self) -> None:
        for connection in list(self._wires):
            self.drop_connection(connection)

    def _wire(self, connection: int) -> Wire:
        with self._lock:
            wire = self._wires.get(connection)
        if wire is not None:
            return wire
        try:
            sock = socket.create_connection((self._where.host, self._where.port), self._timeout_s)
        except TimeoutError as error:
            raise self._unreachable(f"no answer within {self._timeout_s:.3g} s") from error
        except (OSError, UnicodeError) as error:
            raise self._unreachable(str(error)) from error
        wire = self._greeted(sock)
        with self._lock:
            self._wires[connection] = wire
            if self._interrupted:
                wire.interrupt()
        return wire

    def _greeted(self, sock: socket.socket) -> Wire:
        if self._tls is None:
            return Wire(sock, self._timeout_s)
        wire = Wire(wrap(sock, self._tls, self._where.host), self._timeout_s)
        try:
            with self._naming_distrust():
                wire.shake_hands(self._timeout_s)
        except TimeoutError as error:
            wire.close()
            raise self._unreachable(f"no TLS within {self._timeout_s:.3g} s") from error
        except _HANGING_UP as error:
            wire.close()
            raise Refused(
                BUSY, f"it closed the connection in the TLS handshake: {error}"
            ) from error
        except BaseException:
            wire.close()
            raise
        return wire

    @contextlib.contextmanager
    def _naming_distrust(self) -> Iterator[None]:
        try:
            yield
        except ssl.SSLError as error:
            reason = tls_reason(str(error))
            if reason is None:
                raise
            raise Unauthorized(f"{self._what} at {self.address}: {reason}") from error

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable(self._what, self.address, reason)


def _split(url: str, what: str) -> tuple[str, HostPort, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise AddressError(_without_secret(url), f"is no address of a {what}: {error}") from None
    if parts.scheme not in _ONE_SIDED or not host or not port or not url.isascii() or " " in url:
        reason = f"is no address of a {what}, such as http://host:1234/path"
        raise AddressError(_without_secret(url), reason)
    return parts.scheme, HostPort(host, port), parts.path.rstrip("/")


def _without_secret(url: str) -> str:
    """The address for messages: with the whole URL the state can be read."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.partition('/')[0]}/..."
