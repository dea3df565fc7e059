"""Measures the link between two hosts: one doctor serves, another one asks it.

The asking side names the address that its group would advertise. The serving side connects to that
address, as a group that heals would do, and receives for a while; then the asking side receives
over its own connection. So both directions are measured, and each advertised address is reached
from outside. Requests and answers are one line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchft_svc.core.limits import one_line
from torchft_svc.doctor.findings import Running
from torchft_svc.host.address import HostPort, listen
from torchft_svc.rpc.security import Security

# Long enough for a connection to reach its speed, short enough for a check.
MEASURE_S = 1.0
# What is received first shows what buffers and token buckets had in store.
_WARM_UP = 0.2
# At 100 Gbit/s this is a third of a second.
MAX_BYTES = 4 << 30
CONNECT_S = 2.0
# All of one measurement, on the serving side.
MAX_SERVED_S = 4 * CONNECT_S + 2 * MEASURE_S
# A measurement may need so long to end when whoever asked for it has its result.
_ENDING_S = 1.0
# Others are refused meanwhile: they would measure each other.
MAX_AT_A_TIME = 1
MAX_CONNECTIONS = 16
_MAX_LINE = 4096
_BLOCK = bytes(1 << 18)
_REQUEST = "torchft-doctor"


class LinkError(Exception):
    """The measurement failed; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """Bytes per second in both directions; ``to_peer``: None if the peer could not connect.

    ``why_not``: the reason. ``round_trip_s``: of a connection that is made.
    """

    from_peer: float
    to_peer: float | None
    why_not: str = ""
    round_trip_s: float = 0.0

    @property
    def slower(self) -> float:
        """The rate that a heal can count on."""
        return min(self.from_peer, self.from_peer if self.to_peer is None else self.to_peer)


def measure_link(peer: HostPort, advertised: str, security: Security) -> LinkRate:
    """Measure the link to a doctor that serves at ``peer``.

    ``advertised``: the host under which other groups would reach this one.

    Raises:
        LinkError: there is no doctor, it refuses, or the connection broke.
    """
    nonce = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(listen(HostPort("", 0), MAX_CONNECTIONS))
            began_at = time.monotonic()
            control = stack.enter_context(_connect(peer, security))
            round_trip_s = time.monotonic() - began_at
            request = {
                _REQUEST: nonce,
                "authorization": None if security.token is None else security.authorization,
                "host": advertised,
                "port": listener.getsockname()[1],
            }
            _write_line(control, request)
            sending = Running("send", _send_back, listener, nonce, security)
            answer = _read_line(control, MAX_SERVED_S)
            if "error" in answer:
                raise LinkError(f"the doctor at {peer} refuses: {one_line(str(answer['error']))}")
            to_peer = float(answer["rate"]) if answer.get("rate") else None
            control.settimeout(CONNECT_S)
            from_peer = _receive(control)
            with contextlib.suppress(TimeoutError, OSError):
                sending.wait(0.0)
        except (OSError, ValueError, KeyError) as error:
            raise LinkError(f"{peer}: {reason_of(error)}") from error
    why_not = one_line(str(answer.get("why_not", "")))
    return LinkRate(
        from_peer=from_peer, to_peer=to_peer, why_not=why_not, round_trip_s=round_trip_s
    )


def _send_back(listener: socket.socket, nonce: str, security: Security) -> None:
    """Send to the one that connects and knows the nonce; strangers are passed over."""
    deadline = time.monotonic() + 2 * CONNECT_S
    while (left_s := deadline - time.monotonic()) > 0:
        listener.settimeout(left_s)
        plain, _ = listener.accept()
        plain.settimeout(CONNECT_S)
        with contextlib.suppress(OSError, ValueError), plain:
            context = security.server_context()
            wrapped = plain if context is None else context.wrap_socket(plain, server_side=True)
            with wrapped:
                if _read_line(wrapped, CONNECT_S).get(_REQUEST) == nonce:
                    _send(wrapped)
                    return


class LinkServer:
    """Serves measurements at one address until it is closed; ``report`` receives a line for each.

    Raises:
        AddressError: nothing can be bound there.
    """

    def __init__(self, bind: HostPort, security: Security, report: Callable[[str], None]) -> None:
        self._security = security
        self._report = report
        self._room = threading.Semaphore(MAX_CONNECTIONS)
        self._free = threading.Semaphore(MAX_AT_A_TIME)
        self._listener = listen(bind, MAX_CONNECTIONS)
        self.address = HostPort(bind.host or socket.gethostname(), self._listener.getsockname()[1])

    def serve(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set, each connection on a thread; too many are closed."""
        self._listener.settimeout(0.2)
        while not stop.is_set():
            try:
                connection, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            serving = threading.Thread(
                target=self._serve_one, args=(connection, peer[0]), daemon=True
            )
            serving.start()

    def close(self) -> None:
        self._listener.close()

    def _serve_one(self, plain: socket.socket, peer: str) -> None:
        # Whatever hangs below, the connection ends.
        limit = threading.Timer(MAX_SERVED_S, lambda: _shut_down(plain))
        limit.daemon = True
        limit.start()
        try:
            plain.settimeout(CONNECT_S)
            with plain:
                context = self._security.server_context()
                wrapped = plain if context is None else context.wrap_socket(plain, server_side=True)
                with wrapped:
                    self._answer(wrapped, peer)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._report(f"{peer}: {reason_of(error)}")
        finally:
            limit.cancel()
            self._room.release()

    def _answer(self, connection: socket.socket, peer: str) -> None:
        request = _read_line(connection, CONNECT_S)
        shown = request.get("authorization")
        refusal = self._security.refusal(shown if isinstance(shown, str) else None)
        if not refusal and not isinstance(request.get(_REQUEST), str):
            refusal = "this is the port of `lighthouse doctor --serve`"
        if refusal:
            _write_line(connection, {"error": refusal})
            self._report(f"{peer}: refused: {refusal}")
            return
        if not self._free.acquire(timeout=_ENDING_S):
            _write_line(connection, {"error": "another measurement is under way: try it again"})
            return
        try:
            back = HostPort(str(request["host"]), int(request["port"]))
            rate, why_not = self._receive_back(back, str(request[_REQUEST]))
            _write_line(connection, {"rate": rate, "why_not": why_not})
            with contextlib.suppress(OSError):  # the receiver closes when it has seen enough
                _send(connection)
        finally:
            self._free.release()
        shown_rate = "-" if rate is None else f"{rate / 1e6:.1f} MB/s"
        self._report(f"{peer}: {back} -> here {shown_rate}{why_not and f' ({why_not})'}")

    def _receive_back(self, back: HostPort, nonce: str) -> tuple[float | None, str]:
        """The rate from the host that the other group would advertise; else why there is none."""
        try:
            with _connect(back, self._security) as connection:
                _write_line(connection, {_REQUEST: nonce})
                return _receive(connection), ""
        except (OSError, ValueError) as error:
            return None, f"{back} cannot be reached from the peer: {reason_of(error)}"


def _connect(where: HostPort, security: Security) -> socket.socket:
    plain = socket.create_connection((where.host, where.port), timeout=CONNECT_S)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    context = security.client_context()
    if context is None:
        return plain
    try:
        return context.wrap_socket(plain, server_hostname=where.host)
    except BaseException:
        plain.close()
        raise


def _send(connection: socket.socket) -> None:
    """Send filler until the time or the bytes are over, or the receiver closes."""
    connection.settimeout(CONNECT_S)
    until, left = time.monotonic() + 2 * MEASURE_S, MAX_BYTES
    block = memoryview(_BLOCK)
    while left > 0 and time.monotonic() < until:
        left -= connection.send(block)


def _receive(connection: socket.socket) -> float:
    """The rate at which filler comes, in bytes per second; the first part is not counted."""
    buffer = bytearray(len(_BLOCK))
    if not connection.recv_into(buffer):
        raise ConnectionError("the connection was closed")
    began_at = time.monotonic()
    counted_from, num_bytes = None, 0
    while (now := time.monotonic()) < began_at + MEASURE_S:
        if counted_from is None and now >= began_at + _WARM_UP * MEASURE_S:
            counted_from, num_bytes = now, 0
        more = connection.recv_into(buffer)
        if not more:
            break
        num_bytes += more
    took_s = time.monotonic() - (began_at if counted_from is None else counted_from)
    return num_bytes / max(took_s, 1e-6)


def _write_line(connection: socket.socket, record: dict[str, Any]) -> None:
    connection.sendall(json.dumps(record).encode() + b"\n")


def _read_line(connection: socket.socket, timeout_s: float) -> dict[str, Any]:
    """One record; byte by byte, because filler may follow it."""
    deadline, line = time.monotonic() + timeout_s, bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("the connection was closed: is this a doctor that serves?")
        line += byte
        if len(line) > _MAX_LINE:
            raise ValueError("no doctor answers there")
    try:
        record = json.loads(line)
    except ValueError:
        raise ValueError("no doctor answers there") from None
    if not isinstance(record, dict):
        raise ValueError("no doctor answers there")
    return record


def reason_of(error: BaseException) -> str:
    """Return in a few words why a connection failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"both sides do not agree on TLS: {error.reason}"
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    if isinstance(error, socket.gaierror):
        return "its host name cannot be resolved"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving(
    bind: HostPort, security: Security, report: Callable[[str], None]
) -> Iterator[LinkServer]:
    """Serve measurements while the block runs, on a thread of its own."""
    server, stop = LinkServer(bind, security, report), threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop,), name="doctor-serve", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        server.close()
        thread.join(CONNECT_S)
