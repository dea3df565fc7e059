"""Tests HTTPS and the token of the checkpoint transport: who may fetch a state."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import select
import socket
import ssl
import struct
import sys
import termios
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from support.bounds import Late, check, raises_in_time
from support.papers import LONG_AGO, TOKEN, Papers, authority, papers
from support.running import eventually

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.http import connections
from torchft_svc.client.checkpointing.http.connections import ConnectionServer
from torchft_svc.client.checkpointing.http.wire import (
    RECORD_BYTES,
    WOULD_BLOCK,
    TLSSocket,
    Wire,
    wrap,
)
from torchft_svc.errors import (
    AddressError,
    ConfigError,
    DeadlineExceeded,
    PeerError,
    TorchFTError,
    Unauthorized,
    Unreachable,
)
from torchft_svc.rpc.security import PLAIN, Security

LONG = timedelta(seconds=20)
SOON = timedelta(seconds=0.5)
OTHER_TOKEN = "a-token-of-another-cluster"  # noqa: S105 - of these tests

Transport = HTTPTransport[Any]


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return papers(tmp_path_factory.mktemp("papers"))


@contextmanager
def serving(security: Security, host: str = "127.0.0.1") -> Iterator[Transport]:
    with HTTPTransport(LONG, hostname=host, chunk_bytes=64 << 10, security=security) as transport:
        transport.send_checkpoint([1], 1, state(), LONG)
        yield transport


def state() -> dict[str, Any]:
    """Tensors of all sizes, so that records and chunks end in the middle of them."""
    sizes = [1, 3, RECORD_BYTES // 4, RECORD_BYTES // 4 + 1, 200_000, *range(1, 300)]
    return {str(i): torch.arange(float(size)) for i, size in enumerate(sizes)} | {"n": 7}


def fetch(source: Transport, security: Security, timeout: timedelta = LONG) -> Any:
    with HTTPTransport(LONG, num_connections=3, security=security) as receiver:
        return receiver.recv_checkpoint(0, source.metadata(), 1, timeout)


def assert_arrived(received: dict[str, Any]) -> None:
    offered = state()
    assert received.keys() == offered.keys()
    for key, value in offered.items():
        assert torch.equal(torch.as_tensor(received[key]), torch.as_tensor(value))


def complaint(source: Transport, security: Security) -> TorchFTError:
    with pytest.raises(TorchFTError) as caught:
        fetch(source, security)
    return caught.value


@pytest.mark.parametrize("kind", ["tls", "mutual", "token", "all"])
def test_a_state_arrives(some: Papers, kind: str) -> None:
    known = {
        "tls": (some.without_ca, some.local),
        "mutual": (some.local, some.local),
        "token": (Security(token=TOKEN), Security(token=TOKEN)),
        "all": (replace(some.local, token=TOKEN), replace(some.local, token=TOKEN)),
    }[kind]
    sends, fetches = known
    with serving(sends) as source:
        scheme = "http" if kind == "token" else "https"
        assert source.metadata().startswith(f"{scheme}://127.0.0.1:")
        assert_arrived(fetch(source, fetches))


def test_a_state_arrives_while_files_are_being_renewed(tmp_path: Path) -> None:
    held = authority(tmp_path / "own").issue("127.0.0.1")
    for name in (held.cert_file, held.key_file, held.ca_file):
        Path(str(name)).unlink()
    with serving(held) as source:
        assert_arrived(fetch(source, held))


def test_a_worker_needs_a_certificate_for_its_server(some: Papers) -> None:
    with pytest.raises(ConfigError, match="a server needs TORCHFT_TLS_CERT"):
        HTTPTransport(LONG, security=some.only_ca)


def test_the_receiver_checks_the_source(some: Papers) -> None:
    for sends, fetches, reason in (
        (some.ours.issue("elsewhere.example"), some.local, "is not for this host"),
        (some.ours.issue("127.0.0.1", not_after=LONG_AGO), some.local, "renew it"),
        (some.theirs.issue("127.0.0.1"), some.local, "set TORCHFT_TLS_CA to the CA"),
        (some.local, PLAIN, "it speaks TLS: set TORCHFT_TLS_CA"),
        (PLAIN, some.local, "it does not use TLS, but TLS is set here"),
    ):
        with serving(sends) as source:
            error = complaint(source, fetches)
            assert isinstance(error, Unauthorized), error
            assert reason in str(error)
            assert "checkpoint source at 127.0.0.1:" in str(error)


def test_the_source_checks_the_receiver(some: Papers) -> None:
    stranger = replace(some.theirs.issue("127.0.0.1"), ca_file=some.ours.ca_file)
    expired = some.ours.issue("127.0.0.1", not_after=LONG_AGO)
    with serving(some.local) as source:
        for client in (stranger, expired):
            error = complaint(source, client)
            assert isinstance(error, Unauthorized), error
            assert "it does not accept the certificate of this side" in str(error)


def test_who_shows_no_certificate_fetches_nothing(some: Papers) -> None:
    """A worker cannot even be started so, but others can ask."""
    context = some.only_ca.client_context()
    assert context is not None
    with serving(some.local) as source:
        where = urlsplit(source.metadata())
        with (
            socket.create_connection((where.hostname, where.port), 10) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as line,
        ):
            said = b""
            with contextlib.suppress(OSError):  # it receives the reason, or is hung up on
                line.sendall(f"GET {where.path}/state/1 HTTP/1.1\r\n\r\n".encode())
                said = line.recv(100)
            assert said == b""


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        (PLAIN, "requires a token: set TORCHFT_TOKEN"),
        (Security(token=OTHER_TOKEN), "the token differs from that of this service"),
    ],
    ids=["none", "wrong"],
)
def test_who_does_not_know_the_token_fetches_nothing(client: Security, reason: str) -> None:
    with serving(Security(token=TOKEN)) as source:
        began_at = time.monotonic()
        error = complaint(source, client)
        assert isinstance(error, Unauthorized)
        assert reason in str(error)
        check("a stranger is answered", time.monotonic() - began_at, 5)


def test_the_token_is_looked_at_before_the_request() -> None:
    """A senseless request and one without a secret get the same answer."""
    with serving(Security(token=TOKEN)) as source:
        port = urlsplit(source.metadata()).port
        for method, path in (("GET", "/"), ("POST", "/nonsense"), ("GET", "/a/b/c?d=e")):
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as asking:
                asking.request(method, path)
                answer = asking.getresponse()
                assert (answer.status, answer.getheader("WWW-Authenticate")) == (401, "Bearer")
                assert b"requires a token" in answer.read()
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as asking:
            asking.request("GET", "/", headers={"Authorization": f"Bearer {TOKEN}"})
            assert asking.getresponse().status == 404


def test_an_old_tls_version_is_refused(some: Papers) -> None:
    context = replace(some.local).client_context()  # of its own, to be changed
    assert context is not None
    with serving(some.local) as source:
        port = urlsplit(source.metadata()).port or 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with (
            socket.create_connection(("127.0.0.1", port), 10) as sock,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            context.wrap_socket(sock, server_hostname="127.0.0.1")
        assert_arrived(fetch(source, some.local))


def test_peers_that_never_agree_on_tls_hold_up_nobody(
    some: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)
    with serving(some.local) as source:
        port = urlsplit(source.metadata()).port
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        for peer in silent[:2]:
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        try:
            received = fetch(source, some.local)
        except PeerError as error:
            raise Late("a stall was longer than a source waits for a head") from error
        assert_arrived(received)
        for peer in silent:
            peer.settimeout(10)
            with contextlib.suppress(ConnectionError):
                while peer.recv(100):
                    pass
            peer.close()


def test_a_source_that_never_agrees_on_tls_is_given_up(some: Papers) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        HTTPTransport(LONG, security=some.local) as receiver,
    ):
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/secret"
        with raises_in_time(Unreachable, r"no TLS within 0\.5 s"):
            receiver.recv_checkpoint(0, url, 1, SOON)


def test_a_full_source_is_asked_again(some: Papers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 0)
    with serving(some.local) as source:
        with pytest.raises((DeadlineExceeded, Unreachable)) as caught:
            fetch(source, some.local, SOON)
        if caught.type is Unreachable:
            raise Late(f"no TLS in so short a time: {caught.value}")
        monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
        assert_arrived(fetch(source, some.local))


def test_peers_that_reset_their_connections_do_not_end_the_server(some: Papers) -> None:
    """Python raises an error for a socket whose peer is gone before the TLS handshake."""
    context = some.local.client_context()
    assert context is not None
    is_served = threading.Event()
    server = ConnectionServer(lambda *_: is_served.set(), "test", "127.0.0.1", 0, some.local)
    with closing(server):
        for sent in (b"", b"\x16"):
            with socket.create_connection(("127.0.0.1", server.port), 10) as raw:
                raw.sendall(sent)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.start()  # only now, so that it accepts what was reset
        with (
            socket.create_connection(("127.0.0.1", server.port), 10) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1"),
        ):
            assert is_served.wait(10)


def test_shutdown_ends_a_transfer_that_stands_still(some: Papers) -> None:
    """A connection's thread hangs in TLS; it ends at once, without a fault of ours."""
    context = some.local.client_context()
    assert context is not None
    with serving(some.local) as source:
        where = urlsplit(source.metadata())
        with socket.create_connection(("127.0.0.1", where.port or 0), 10) as sock:
            greeted = context.wrap_socket(sock, server_hostname="127.0.0.1")
            greeted.sendall(b"GET ")
            began_at = time.monotonic()
            source.shutdown()
            check("a transfer is ended", time.monotonic() - began_at, 3)
            greeted.close()


def test_the_address_must_be_one(some: Papers) -> None:
    with (
        HTTPTransport(LONG, security=some.local) as receiver,
        pytest.raises(AddressError, match="is no address of a checkpoint source"),
    ):
        receiver.recv_checkpoint(0, "ftp://127.0.0.1:1/secret", 1, LONG)


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def pair(some: Papers) -> tuple[TLSSocket, TLSSocket]:
    """Two ends that have agreed on TLS, and do not block."""
    one, other = connected()
    serves, dials = some.local.server_context(), some.local.client_context()
    assert serves is not None
    assert dials is not None
    server_end, client_end = wrap(one, serves, None), wrap(other, dials, "localhost")
    agreeing = threading.Thread(target=server_end.do_handshake)
    agreeing.start()
    client_end.do_handshake()
    agreeing.join(10)
    server_end.setblocking(False)
    client_end.setblocking(False)
    return server_end, client_end


def take(receives: TLSSocket, most: int) -> bytes:
    """The next bytes, as soon as some are there."""
    while True:
        try:
            return receives.recv(most)
        except WOULD_BLOCK:
            assert select.select([receives], [], [], 10)[0], "what was sent does not come"


def test_a_tls_socket_blocks_like_a_plain_one(some: Papers) -> None:
    sends, receives = pair(some)
    with sends, receives:
        with pytest.raises(WOULD_BLOCK):
            receives.recv_into(bytearray(10))
        sent = bytearray()
        data = bytes(range(256)) * 4096
        assert sends.sendmsg([memoryview(data)[:7], memoryview(data)[7:]]) == RECORD_BYTES
        assert take(receives, RECORD_BYTES) == data[:RECORD_BYTES]
        with contextlib.suppress(*WOULD_BLOCK):  # which ends it
            while True:
                place = len(sent) % len(data)
                pieces = [memoryview(data)[place : place + 7], memoryview(data)[place + 7 :]]
                sent += data[place : place + sends.sendmsg(pieces)]
        received = bytearray()
        while len(received) < len(sent):
            received += take(receives, 100_000)
        # The record that waited goes out with the bytes it was made of, however they are cut now.
        place = len(sent) % len(data)
        assert select.select([], [sends], [], 10)[1], "its place in the system's buffer stays taken"
        count = sends.sendmsg([memoryview(data)[place:]])
        assert count == min(RECORD_BYTES, len(data) - place)
        sent += data[place : place + count]
        while len(received) < len(sent):
            received += take(receives, 100_000)
        assert received == sent
        assert sends.sendmsg([]) == 0
        receives.shutdown(socket.SHUT_RDWR)
        assert receives.version() is not None, "its TLS state is gone, which others may be using"


def test_a_head_behind_another_in_one_record_is_found(some: Papers) -> None:
    """The second head is decrypted already, so the system would not report it as readable."""
    sends, receives = pair(some)
    with sends, receives:
        filler = "x" * (4096 - len("GET / HTTP/1.1\r\nA: \r\n\r\n"))
        first = f"GET / HTTP/1.1\r\nA: {filler}\r\n\r\n".encode()
        assert len(first) == 4096, "what is read in one go"
        sends.send(first + b"GET /2 HTTP/1.1\r\n\r\n")
        wire = Wire(receives, timeout_s=10)
        heads = [wire.read_head(), wire.read_head()]
        assert [head.line for head in heads if head] == ["GET / HTTP/1.1", "GET /2 HTTP/1.1"]


def test_a_record_that_comes_in_pieces_is_waited_for(some: Papers) -> None:
    sends, receives = pair(some)
    with sends, receives:
        raw, far = connected()
        sends.send(b"GET / HTTP/1.1\r\n\r\n")
        record = socket.socket.recv(receives, 4096)  # as it is on the way
        os.dup2(far.fileno(), receives.fileno())
        wire = Wire(receives, timeout_s=10)
        with raw, far, ThreadPoolExecutor() as pool:
            reading = pool.submit(wire.read_head)
            for place in range(0, len(record), 2):
                raw.send(record[place : place + 2])
                eventually(lambda: not unread(receives) or reading.done())
            head = reading.result(10)
        assert head is not None
        assert head.line == "GET / HTTP/1.1"


def unread(sock: socket.socket) -> int:
    """How many bytes have come and were not read."""
    return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0" * 4), sys.byteorder)
