"""Tests sessions of a parameter server in one process: their ends, errors, trust and deadlines."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from support.bounds import check, raises_in_time
from support.papers import TOKEN, Papers, papers
from support.running import eventually
from support.scripts.parameter_server import Doubling, ask
from support.training import together

from torchft_svc.client import ProcessGroupGloo
from torchft_svc.client.checkpointing.http import connections
from torchft_svc.client.parameter_server import lifeline
from torchft_svc.errors import (
    AddressError,
    ConfigError,
    PeerError,
    SessionEnded,
    Unauthorized,
    Unreachable,
)
from torchft_svc.rpc.security import PLAIN, Security

pytestmark = pytest.mark.timeout(100)
SOON = timedelta(seconds=0.5)
# What a loss takes to be noticed: a packet, a moment for data on its way, and the end of a wait.
AT_ONCE_S = 0.25


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture
def server() -> Iterator[Doubling]:
    with Doubling(0, bind_host="127.0.0.1") as server:
        yield server  # type: ignore[misc]


def place(server: Doubling) -> tuple[str, int]:
    where = urlsplit(server.address())
    assert where.hostname is not None
    assert where.port is not None
    return where.hostname, where.port


def status_of(server: Doubling, path: str = "/new_session", **headers: str) -> int:
    connection = http.client.HTTPConnection(*place(server), timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_clients_have_a_session_each(server: Doubling) -> None:
    groups = [Doubling.new_session(server.address()) for _ in range(3)]
    assert {(group.rank(), group.size()) for group in groups} == {(1, 2)}
    answers = together(*(lambda n=n: ask(groups[n], float(n)) for n in range(3)))
    assert answers == [0.0, 2.0, 4.0]
    groups[0].shutdown()
    assert ask(groups[1], 5.0) == 10.0
    for group in groups:
        group.shutdown()
        group.shutdown()  # twice is harmless
    eventually(lambda: not server._sessions)
    eventually(lambda: not server._store.list_keys())


def test_an_error_of_the_program_ends_its_session_only(
    server: Doubling, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = (Doubling.new_session(server.address()) for _ in range(2))
    began_at = time.monotonic()
    with pytest.raises(SessionEnded, match="the server of this session is gone"):
        ask(failing, -1.0)
    check("the end of a session", time.monotonic() - began_at, AT_ONCE_S)
    with pytest.raises(SessionEnded):
        ask(failing, 1.0)
    assert isinstance(failing.errored(), SessionEnded)
    assert ask(other, 2.0) == 4.0
    assert other.errored() is None
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "a negative number" in str(errors[0].exc_info)
    for group in (failing, other):
        group.shutdown()


def test_shutdown_ends_sessions_at_both_ends(server: Doubling) -> None:
    group = Doubling.new_session(server.address())
    assert ask(group, 1.0) == 2.0
    began_at = time.monotonic()
    ports = place(server)[1], server._store_place.port
    server.shutdown()
    with pytest.raises(SessionEnded):
        ask(group, 1.0)
    check("the end of the server", time.monotonic() - began_at, 2 * AT_ONCE_S)
    group.shutdown()
    with pytest.raises(PeerError):
        Doubling.new_session(server.address(), timeout=SOON)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 10)
    with Doubling(ports[0], ports[1], bind_host="127.0.0.1") as successor:
        group = Doubling.new_session(successor.address())
        assert ask(group, 1.0) == 2.0
        group.shutdown()


def test_a_client_that_asks_and_never_comes(server: Doubling) -> None:
    """The server waits for the members of a session only as long as the client's connection."""
    with socket.create_connection(place(server), 10) as raw:
        raw.sendall(b"GET /new_session?lifeline=1 HTTP/1.1\r\n\r\n")
        assert b"200 OK" in raw.recv(4096)
        eventually(lambda: server._sessions)
    left_at = time.monotonic()
    eventually(lambda: not server._sessions)
    check("a client that never came", time.monotonic() - left_at, AT_ONCE_S)


def test_a_silent_end_is_gone(server: Doubling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "SILENCE_S", 1.0)
    with socket.create_connection(place(server), 10) as raw:
        raw.sendall(b"GET /new_session?lifeline=1 HTTP/1.1\r\n\r\n")
        eventually(lambda: server._sessions)
        since = time.monotonic()
        eventually(lambda: not server._sessions)
        check("silence", time.monotonic() - since, 1.0 + AT_ONCE_S)


def test_a_client_without_a_lifeline(server: Doubling) -> None:
    """The public release's clients read the answer, close the connection, and connect."""
    connection = http.client.HTTPConnection(*place(server), timeout=10)
    connection.request("GET", "/new_session")
    session = json.loads(connection.getresponse().read())
    connection.close()
    assert set(session) == {"session_id", "store_addr"}
    group = ProcessGroupGloo(timedelta(seconds=20))
    group.configure(session["store_addr"], "a client", 1, 2)
    assert ask(group, 4.0) == 8.0
    group.shutdown()
    eventually(lambda: not server._sessions)


@pytest.mark.parametrize("kind", ["tls", "mutual", "token", "all"])
def test_who_is_trusted_has_a_session(some: Papers, kind: str) -> None:
    serves, asks = {
        "tls": (some.without_ca, some.only_ca),
        "mutual": (some.local, some.local),
        "token": (Security(token=TOKEN), Security(token=TOKEN)),
        "all": (replace(some.local, token=TOKEN), replace(some.local, token=TOKEN)),
    }[kind]
    with Doubling(0, bind_host="127.0.0.1", security=serves) as server:
        assert server.address().startswith("http://" if kind == "token" else "https://")
        group = Doubling.new_session(server.address(), security=asks)
        assert ask(group, 1.5) == 3.0
        group.shutdown()


def test_who_is_not_trusted_has_none(some: Papers) -> None:
    stranger = replace(some.theirs.issue("127.0.0.1"), ca_file=some.ours.ca_file)
    for serves, asks, reason in (
        (Security(token=TOKEN), PLAIN, "requires a token"),
        (Security(token=TOKEN), Security(token="x" * 20), "differs from that of this service"),
        (some.local, PLAIN, "it speaks TLS"),
        (PLAIN, some.local, "it does not use TLS"),
        (some.local, stranger, "certificate"),
        (some.theirs.issue("127.0.0.1"), some.local, "set TORCHFT_TLS_CA"),
    ):
        with Doubling(0, bind_host="127.0.0.1", security=serves) as server:
            with pytest.raises(Unauthorized, match=r"parameter server at 127\.0\.0\.1:") as caught:
                Doubling.new_session(server.address(), security=asks)  # type: ignore[arg-type]
            assert reason in str(caught.value)
            assert not server._sessions


def test_requests_that_are_none(server: Doubling) -> None:
    assert status_of(server, "/") == 404
    assert status_of(server, "/new_session/more") == 404
    for sent in (b"\x16\x03\x01\x00garbage", b"POST /new_session HTTP/1.1\r\n\r\n", b"GET"):
        with socket.create_connection(place(server), 10) as raw:
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            assert b"200" not in raw.recv(4096)
    assert not server._sessions
    group = Doubling.new_session(server.address())
    assert ask(group, 1.0) == 2.0
    group.shutdown()


def test_connections_that_ask_for_nothing_make_room(
    server: Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 1)
    with socket.create_connection(place(server), 10):
        first = Doubling.new_session(server.address())
        with pytest.raises(Unreachable, match="1 connections are open"):
            Doubling.new_session(server.address())
        first.shutdown()


def test_no_server(server: Doubling) -> None:
    host, port = place(server)
    server.shutdown()
    with pytest.raises(Unreachable, match="refused"):
        Doubling.new_session(f"http://{host}:{port}/new_session", timeout=SOON)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/new_session"
        began_at = time.monotonic()
        with raises_in_time(Unreachable, "no byte moved"):
            Doubling.new_session(url, timeout=SOON)
        check("a server that does not answer", time.monotonic() - began_at, 0.6)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 38\r\n\r\n{"session_id": "a", "store_addr": "::"}',
        b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nbad",
        b"hello\r\n\r\n",
        b"",
    ],
)
def test_a_server_that_is_none(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=respond)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/new_session"
        with pytest.raises(Unreachable, match="did not answer as one"):
            Doubling.new_session(url, timeout=timedelta(seconds=5))
        thread.join()


def test_a_group_that_cannot_be_made_asks_no_server() -> None:
    class Failing(Doubling):
        @classmethod
        def new_process_group(cls) -> ProcessGroupGloo:
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        Failing.new_session("http://127.0.0.1:1/new_session", timeout=SOON)


def test_wrong_arguments(server: Doubling) -> None:
    host, port = place(server)
    for url in ("", "http://127.0.0.1:1", "127.0.0.1:1/new_session", "http://:1/new_session"):
        with pytest.raises(AddressError, match="is no address of a parameter server"):
            Doubling.new_session(url)
    with pytest.raises(ConfigError, match="timeout"):
        Doubling.new_session(server.address(), timeout=timedelta(0))
    with pytest.raises(ConfigError, match="hostname"):
        Doubling(0, hostname="")
    with pytest.raises(AddressError, match="cannot be bound"):
        Doubling(port, bind_host=host)
    with pytest.raises(AddressError, match="store cannot listen"):
        Doubling(0, store_port=server._store.port)
