"""Tests slow, dead, frozen, damaged and malicious peers of the checkpoint transport."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from support.bounds import Late, raises_in_time
from support.running import SCRIPTS, eventually
from support.warm import Warm

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.http import connections
from torchft_svc.client.checkpointing.http.feed import MAX_ATTEMPTS
from torchft_svc.client.checkpointing.http.wire import LEAST_BYTES_PER_S
from torchft_svc.errors import CheckpointError, DeadlineExceeded, PeerError, Unreachable
from torchft_svc.rpc.security import PLAIN
from torchft_svc.testing.proxy import DEADLINE_S, Damage, Gate, Proxy, Throttle

SOON = timedelta(seconds=0.5)
LONG = timedelta(seconds=DEADLINE_S)
# Larger than what sockets buffer, so that a transfer can stand still in the middle of a chunk.
CHUNK_BYTES = 4 << 20
NUM_FLOATS = 4 << 20
HALF_WAY = NUM_FLOATS * 2
TRICKLES_FROM = 4 << 10

Transport = HTTPTransport[Any]


@pytest.fixture
def source() -> Iterator[Transport]:
    with HTTPTransport(LONG, hostname="127.0.0.1", chunk_bytes=CHUNK_BYTES) as transport:
        yield transport


@pytest.fixture
def receiver() -> Iterator[Transport]:
    with HTTPTransport(LONG, num_connections=2, hostname="127.0.0.1") as transport:
        yield transport


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(float(NUM_FLOATS))}


def fetch(pool: ThreadPoolExecutor, receiver: Transport, url: str, step: int = 1) -> Future[Any]:
    return pool.submit(receiver.recv_checkpoint, 0, url, step, LONG)


def test_a_receiver_knows_how_much_has_arrived(
    source: Transport, receiver: Transport, pool: ThreadPoolExecutor
) -> None:
    num_bytes, gate = NUM_FLOATS * 4, Gate(HALF_WAY)
    assert receiver.progress() == (0, 0)
    source.send_checkpoint([1], 1, weights(), LONG)
    with Proxy(source.metadata(), gate) as proxy:
        asked = fetch(pool, receiver, proxy.url)
        gate.wait_until_reached()
        arrived, size = eventually(lambda: receiver.progress()[0] > 0 and receiver.progress())
        assert size >= num_bytes
        assert arrived in range(CHUNK_BYTES, num_bytes, CHUNK_BYTES), "whole chunks, not all"
        gate.open()
        asked.result(DEADLINE_S)
    assert receiver.progress() == (0, 0)


def test_a_slow_receiver_gets_the_old_weights_while_the_sender_goes_on(
    source: Transport, receiver: Transport, pool: ThreadPoolExecutor
) -> None:
    state, gate = weights(), Gate(HALF_WAY)
    source.send_checkpoint([1], 1, state, LONG)
    with Proxy(source.metadata(), gate) as proxy:
        asked = fetch(pool, receiver, proxy.url)
        gate.wait_until_reached()
        source.disallow_checkpoint()
        state["w"].zero_()
        assert not asked.done()
        assert 0 < source.copied_bytes <= NUM_FLOATS * 4
        gate.open()
        assert torch.equal(asked.result(DEADLINE_S)["w"], weights()["w"])
    assert source.copied_bytes == 0


def test_one_of_two_receivers_is_slow(
    source: Transport, receiver: Transport, pool: ThreadPoolExecutor
) -> None:
    state, gate = weights(), Gate(HALF_WAY)
    source.send_checkpoint([1, 2], 1, state, LONG)
    with Proxy(source.metadata(), gate) as proxy:
        slow = fetch(pool, receiver, proxy.url)
        fast = fetch(pool, receiver, source.metadata())
        assert torch.equal(fast.result(DEADLINE_S)["w"], weights()["w"])
        gate.wait_until_reached()
        source.disallow_checkpoint()
        state["w"].zero_()
        gate.open()
        assert torch.equal(slow.result(DEADLINE_S)["w"], weights()["w"])
    assert source.copied_bytes == 0


def test_a_receiver_that_comes_after_the_step_gets_its_weights(
    source: Transport, receiver: Transport
) -> None:
    state = weights()
    source.send_checkpoint([1], 1, state, LONG)
    source.disallow_checkpoint()
    state["w"].zero_()
    assert source.copied_bytes == NUM_FLOATS * 4
    received = receiver.recv_checkpoint(0, source.metadata(), 1, LONG)
    assert torch.equal(received["w"], weights()["w"])
    assert source.copied_bytes == 0


def test_nothing_is_copied_when_everybody_has_everything(
    source: Transport, receiver: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.send_checkpoint([1], 1, weights(), LONG)
    receiver.recv_checkpoint(0, source.metadata(), 1, LONG)
    monkeypatch.setattr("torchft_svc.client.checkpointing.encoding.memory.Memory.copy", None)
    source.disallow_checkpoint()


def test_a_receiver_that_stands_still_loses_its_copies_at_the_timeout(
    source: Transport, receiver: Transport, pool: ThreadPoolExecutor
) -> None:
    gate = Gate(HALF_WAY)
    source.send_checkpoint([1], 1, weights(), SOON)
    with Proxy(source.metadata(), gate) as proxy:
        asked = fetch(pool, receiver, proxy.url)
        gate.wait_until_reached()
        source.disallow_checkpoint()
        if not source.copied_bytes:
            raise Late("it was not asked for so long that it has let go already")
        eventually(lambda: source.copied_bytes == 0)
        gate.open()
        with pytest.raises(CheckpointError, match=r"no receiver fetched from it for 0\.5 s"):
            asked.result(DEADLINE_S)


def test_a_newer_state_replaces_the_copies(
    source: Transport, receiver: Transport, pool: ThreadPoolExecutor
) -> None:
    gate = Gate(HALF_WAY)
    source.send_checkpoint([1], 1, weights(), LONG)
    with Proxy(source.metadata(), gate) as proxy:
        asked = fetch(pool, receiver, proxy.url)
        gate.wait_until_reached()
        source.disallow_checkpoint()
        source.send_checkpoint([1], 2, {}, LONG)
        assert source.copied_bytes == 0
        gate.open()
        with pytest.raises(CheckpointError, match="another state is served now"):
            asked.result(DEADLINE_S)


@pytest.mark.parametrize("cut", [False, True], ids=["corrupt", "truncated"])
def test_a_damaged_stream_is_fetched_again(
    source: Transport, receiver: Transport, *, cut: bool
) -> None:
    source.send_checkpoint([1], 1, weights(), LONG)
    damage = Damage([10, 100, 300_000, HALF_WAY], cut=cut)
    with Proxy(source.metadata(), damage) as proxy:
        received = receiver.recv_checkpoint(0, proxy.url, 1, LONG)
    assert damage.left == []
    assert torch.equal(received["w"], weights()["w"])


@pytest.mark.parametrize("cut", [False, True], ids=["corrupt", "truncated"])
def test_a_stream_that_stays_damaged_is_given_up(
    source: Transport, receiver: Transport, *, cut: bool
) -> None:
    source.send_checkpoint([1], 1, weights(), LONG)
    always = Damage(list(range(100_000, 100_000_000, 100_000)), cut=cut)
    with (
        Proxy(source.metadata(), always) as proxy,
        pytest.raises(CheckpointError, match=r"chunk \d of 4 failed 3 times"),
    ):
        receiver.recv_checkpoint(0, proxy.url, 1, LONG)


@contextmanager
def running_source(*flags: str) -> Iterator[tuple[Warm, str, int]]:
    """A source in a process of its own: the process, its metadata and its child's id."""
    script = str(SCRIPTS / "checkpoint_source.py")
    with Warm([sys.executable, script, *flags], env=os.environ, text=True) as process:
        try:
            url, child = process.stdout.readline().split()
            yield process, url, int(child)
        finally:
            process.kill()


@pytest.mark.processes
def test_a_source_that_dies_while_it_serves(receiver: Transport, pool: ThreadPoolExecutor) -> None:
    gate = Gate(HALF_WAY)
    with running_source() as (process, url, _), Proxy(url, gate) as proxy:
        asked = fetch(pool, receiver, proxy.url)
        gate.wait_until_reached()
        process.kill()
        process.wait(DEADLINE_S)
        gate.open()
        with pytest.raises((CheckpointError, Unreachable)):
            asked.result(DEADLINE_S)


@pytest.mark.processes
def test_a_source_that_is_frozen_is_noticed_at_the_timeout(
    receiver: Transport, pool: ThreadPoolExecutor
) -> None:
    gate = Gate(HALF_WAY)
    with running_source() as (process, url, _), Proxy(url, gate) as proxy:
        asked = pool.submit(receiver.recv_checkpoint, 0, proxy.url, 1, SOON * 4)
        eventually(lambda: gate._reached.is_set() or asked.done())
        process.send_signal(signal.SIGSTOP)
        gate.open()
        with raises_in_time(PeerError, r"receiving a chunk from .* after 2 s"):
            asked.result(DEADLINE_S)


def trickle(place: int, data: bytes) -> bytes:
    """Pass the description on, and then some bytes now and then, so that no wait is long."""
    if place > TRICKLES_FROM:
        time.sleep(0.02)
    return data


@pytest.mark.parametrize("is_copy", [False, True], ids=["heal", "copy"])
def test_h6_a_source_that_sends_a_byte_now_and_then_is_given_up(
    receiver: Transport, pool: ThreadPoolExecutor, *, is_copy: bool
) -> None:
    with contextlib.ExitStack() as stack:
        source: Transport = stack.enter_context(
            HTTPTransport(LONG, hostname="127.0.0.1", chunk_bytes=64 << 10)
        )
        proxy = stack.enter_context(Proxy(source.metadata(), trickle, piece_bytes=16))
        if is_copy:
            asked = pool.submit(receiver.recv_copy, proxy.url, 0, SOON * 2)
            eventually(lambda: source.num_awaiting_copy(1) == 1)
            source.offer_copy(1, {"w": torch.ones(1 << 20)})
        else:
            source.send_checkpoint([1], 1, {"w": torch.ones(1 << 20)}, LONG)
            asked = pool.submit(receiver.recv_checkpoint, 0, proxy.url, 1, SOON * 2)
        with raises_in_time(DeadlineExceeded, "receiving a chunk .*: only .* bytes arrived"):
            asked.result(DEADLINE_S)


def test_h6_a_slow_link_heals_although_a_chunk_takes_longer_than_the_timeout(
    receiver: Transport, pool: ThreadPoolExecutor
) -> None:
    with contextlib.ExitStack() as stack:
        source: Transport = stack.enter_context(HTTPTransport(LONG, hostname="127.0.0.1"))
        link = Throttle(20 * LEAST_BYTES_PER_S)
        proxy = stack.enter_context(Proxy(source.metadata(), link))
        state = {"w": torch.arange(160_000.0)}  # takes 3.2 s, in one chunk
        source.send_checkpoint([1], 1, state, LONG)
        asked = pool.submit(receiver.recv_checkpoint, 0, proxy.url, 1, SOON * 3)
        assert torch.equal(asked.result(DEADLINE_S)["w"], state["w"])


@pytest.mark.processes
def test_a_forked_child_does_not_keep_a_dead_source_alive(receiver: Transport) -> None:
    with running_source("--fork") as (process, url, child):
        try:
            process.kill()
            process.wait(DEADLINE_S)
            with pytest.raises(Unreachable):
                receiver.recv_checkpoint(0, url, 1, LONG)
        finally:
            os.kill(child, signal.SIGKILL)


def say(transport: Transport, request: bytes) -> str:
    """The status line that ``request`` is answered with; empty if the connection just ends."""
    where = urlsplit(transport.metadata())
    with socket.create_connection((where.hostname, where.port), DEADLINE_S) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            try:
                return answer.readline().decode().strip()
            except ConnectionResetError:
                return ""


def ask(transport: Transport, path: str, headers: str = "", method: str = "GET") -> str:
    secret = urlsplit(transport.metadata()).path
    return say(transport, f"{method} {secret}{path} HTTP/1.1\r\n{headers}\r\n".encode())


RUDE = {
    "random bytes": (b"\x16\x03\x01\x02\x00\x01\xfc\x03\x03" * 20, "400"),
    "a long line": (b"GET /" + b"a" * 20_000, "431"),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5_000, "431"),
    "HTTP/1.0": (b"GET / HTTP/1.0\r\n\r\n", "505"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400"),
    "another path": (b"GET /favicon.ico HTTP/1.1\r\n\r\n", "404"),
    "a wrong secret": (b"GET /secret/state/1 HTTP/1.1\r\n\r\n", "404"),
    "not ASCII": ("GET /é HTTP/1.1\r\n\r\n".encode(), "400"),
    "a bad header": (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", "400"),
    "a body": (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", "400"),
}
RUDE_INSIDERS = {
    "/": "404",
    "/state": "404",
    "/state/x": "400",
    "/state/-1": "400",
    "/state/" + "9" * 30: "400",
    "/state/7": "425",
    "/state/0": "410",
    "/chunk/other/0?receiver=me": "410",
    "/chunk/../../etc/passwd": "404",
    "/state/1?" + "a=1&" * 50: "400",
}


@pytest.mark.parametrize("name", RUDE)
def test_a_rude_request_gets_an_answer_and_disturbs_nobody(
    source: Transport, receiver: Transport, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    request, status = RUDE[name]
    assert say(source, request).startswith(f"HTTP/1.1 {status} ")
    source.send_checkpoint([1], 1, {"n": 1}, LONG)
    assert receiver.recv_checkpoint(0, source.metadata(), 1, LONG) == {"n": 1}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("path", RUDE_INSIDERS)
def test_a_wrong_request_with_the_secret_gets_an_answer(source: Transport, path: str) -> None:
    source.send_checkpoint([1], 1, {"n": 1}, LONG)
    assert ask(source, path).startswith(f"HTTP/1.1 {RUDE_INSIDERS[path]} ")


def test_ranges_and_other_methods_are_refused(source: Transport) -> None:
    assert ask(source, "/state/1", "Range: bytes=5-1\r\n").startswith("HTTP/1.1 416 ")
    assert ask(source, "/state/1", method="POST").startswith("HTTP/1.1 405 ")


def test_connections_that_say_nothing_do_not_keep_others_out(
    source: Transport, receiver: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    source.send_checkpoint([1], 1, weights(), LONG)
    where = urlsplit(source.metadata())
    with socket.create_connection((where.hostname, where.port)):
        received = receiver.recv_checkpoint(0, source.metadata(), 1, LONG)
    assert torch.equal(received["w"], weights()["w"])


def test_a_process_without_a_free_thread_goes_on(
    source: Transport, receiver: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container limits them; the connection is given up, not the thread that accepts."""
    source.send_checkpoint([1], 1, weights(), LONG)
    where = urlsplit(source.metadata())
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "torchft-checkpoint":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with socket.create_connection((where.hostname, where.port), 10) as raw:
            assert raw.recv(1) == b""
    received = receiver.recv_checkpoint(0, source.metadata(), 1, LONG)
    assert torch.equal(received["w"], weights()["w"])


def test_the_end_of_a_server_waits_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_JOIN_TIMEOUT_S", 0.5)
    begun, end = threading.Semaphore(0), threading.Event()

    def converse(*_: object) -> None:
        begun.release()
        end.wait(DEADLINE_S)

    server = connections.ConnectionServer(converse, "test", "127.0.0.1", 0, PLAIN)
    server.start()
    with contextlib.ExitStack() as stack:
        stack.callback(end.set)
        for _ in range(6):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            assert begun.acquire(timeout=10)
        began_at = time.monotonic()
        server.close()
        assert 0.4 < time.monotonic() - began_at < 2.0


def test_who_finds_no_free_connection_is_informed(
    source: Transport, receiver: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 0)
    with raises_in_time(DeadlineExceeded, "0 connections are open"):
        receiver.recv_checkpoint(0, source.metadata(), 1, SOON)


def test_a_source_that_hangs_up_on_further_connections_is_not_lost(source: Transport) -> None:
    """A full source that speaks TLS does so: it lets nobody in, and cannot say why."""
    source.send_checkpoint([1], 1, weights(), LONG)
    where = urlsplit(source.metadata())
    given_up = threading.Event()

    def pass_on(read: socket.socket, write: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := read.recv(65536):
                if b"/chunk/" in data:
                    given_up.wait(DEADLINE_S)
                write.sendall(data)
            write.shutdown(socket.SHUT_WR)

    def let_in_the_first(door: socket.socket, pumps: ThreadPoolExecutor) -> None:
        num_hung_up = 0
        while num_hung_up < 2 * MAX_ATTEMPTS:
            near, _ = door.accept()
            head = near.recv(4096)
            if b"/chunk/" in head:  # the others have asked for something else first
                num_hung_up += 1
                near.close()
            else:
                far = socket.create_connection((where.hostname, where.port), DEADLINE_S)
                far.sendall(head)
                pumps.submit(pass_on, near, far)
                pumps.submit(pass_on, far, near)
        given_up.set()

    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        ThreadPoolExecutor() as pumps,
        HTTPTransport(LONG, num_connections=3, hostname="127.0.0.1") as receiver,
    ):
        pumps.submit(let_in_the_first, door, pumps)
        url = source.metadata().replace(str(where.port), str(door.getsockname()[1]))
        try:
            received = receiver.recv_checkpoint(0, url, 1, LONG)
        finally:
            receiver.shutdown()
            door.shutdown(socket.SHUT_RDWR)
    assert given_up.is_set()
    assert torch.equal(received["w"], weights()["w"])


def test_a_peer_that_is_no_source_is_found_out(receiver: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_rubbish() -> None:
            for _ in range(3):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")
                    connection.recv(4096)

        thread = threading.Thread(target=answer_rubbish)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        with pytest.raises(CheckpointError, match="the description failed 3 times"):
            receiver.recv_checkpoint(0, url, 1, LONG)
        thread.join(DEADLINE_S)


def test_trouble_is_logged_without_the_secret(
    source: Transport, receiver: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    secret = urlsplit(source.metadata()).path.strip("/")
    with caplog.at_level(logging.DEBUG), pytest.raises(PeerError) as caught:
        receiver.recv_checkpoint(0, source.metadata(), 1, SOON)
    assert secret not in caplog.text + str(caught.value)
