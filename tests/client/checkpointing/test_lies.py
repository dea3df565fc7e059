"""Sends malformed data to the checkpoint transport: it ends with our error, or the correct state.

Descriptions that are damaged behind their checksum are fed in `test_serialization`, too.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.encoding.serialization import describe
from torchft_svc.client.checkpointing.http.feed import FetchRequest
from torchft_svc.client.checkpointing.http.fetch import Fetch
from torchft_svc.client.checkpointing.http.requests import DESCRIPTION_SEED, parse_request
from torchft_svc.client.checkpointing.http.wire import DIGEST_BYTES, BadHead, Wire, seal
from torchft_svc.errors import PeerError

STEP = 3
# A source that answers at once, but nothing useful, is given up after that.
PATIENCE_S = 0.3
DEADLINE_S = 20.0
MANY = settings(max_examples=1000, deadline=None)
FEWER = settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# Uniform: what hypothesis draws by itself is mostly empty.
CHANCES = st.randoms(use_true_random=True)
HEADS = (
    b"GET /secret/state/3?wait_ms=10 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /s/chunk/0123456789abcdef/0?receiver=r&verified=1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n",
)
_TOKENS = (
    b"\r\n",
    b"\r\n\r\n",
    b":",
    b"%",
    b"%00",
    b"&",
    b"=",
    b"/",
    b"?",
    b"HTTP/1.0",
    b"-1",
    b"9" * 30,
)


def edited(raw: bytes, chance: random.Random) -> bytes:
    """``raw`` with a few bytes changed, added or cut, or with a number in it replaced."""
    if chance.random() < 0.3 and (numbers := list(re.finditer(rb"\d+", raw))):
        place = chance.choice(numbers)
        number = chance.choice((b"0", b"1", b"-1", b"64", b"503", b"425", b"9" * 18, b"9" * 5000))
        return raw[: place.start()] + number + raw[place.end() :]
    for _ in range(chance.randrange(1, 4)):
        start = chance.randrange(len(raw) + 1)
        added = chance.choice((b"", chance.randbytes(chance.randrange(5)), chance.choice(_TOKENS)))
        raw = raw[:start] + added + raw[start + chance.randrange(5) :]
    return raw


@MANY
@given(chance=CHANCES)
def test_a_head_is_understood_or_refused(chance: random.Random) -> None:
    raw = edited(chance.choice(HEADS), chance)
    near, far = tcp_pair()
    with near, far:
        far.sendall(raw)
        far.shutdown(socket.SHUT_WR)
        try:
            head = Wire(near, DEADLINE_S).read_head()
            if head is not None:
                with contextlib.suppress(BadHead):
                    assert head.length >= 0
                request = parse_request(head)
                assert request.number("wait_ms") is None or request.receiver
        except (BadHead, ConnectionError) as error:
            sentence = str(error)
        else:
            return
    assert len(sentence) < 200


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), DEADLINE_S)
        return near, listener.accept()[0]


class Liar:
    """Answers requests with what a source once said, damaged; it hangs up after each."""

    def __init__(self, url: str, said: dict[str, bytes]) -> None:
        self.said = said
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = urlsplit(url)._replace(netloc=f"127.0.0.1:{port}").geturl()
        self._thread = threading.Thread(target=self._serve, name="liar")
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(DEADLINE_S)
                asked = connection.recv(4096).split(b"/", 3)[2].decode()
                connection.sendall(self.said[asked])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_S)
        self._listener.close()


def state() -> dict[str, Any]:
    return {"w": torch.arange(5000.0), "step": 3, "names": ["a", None]}


@pytest.fixture(scope="module")
def truth() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A source's URL, and what it says to each kind of request."""
    with HTTPTransport[Any](timedelta(seconds=DEADLINE_S), hostname="127.0.0.1") as source:
        source.send_checkpoint([1], STEP, state(), timedelta(seconds=DEADLINE_S))
        url = source.metadata()
        description = answer(url, f"state/{STEP}")
        state_id = description.split(b"\r\n\r\n", 1)[1].split(b" ", 1)[0].decode()
        yield (
            url,
            {
                "state": description,
                "chunk": answer(url, f"chunk/{state_id}/0?receiver=r"),
                "done": answer(url, f"done/{state_id}?receiver=r"),
            },
        )


def answer(url: str, path: str) -> bytes:
    """All that a source says when it is asked once."""
    parts = urlsplit(url)
    request = f"GET {parts.path}/{path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with socket.create_connection((parts.hostname, parts.port), DEADLINE_S) as connection:
        connection.sendall(request.encode())
        said = bytearray()
        while more := connection.recv(1 << 16):
            said += more
    return bytes(said)


@pytest.fixture
def liar(truth: tuple[str, dict[str, bytes]]) -> Iterator[Liar]:
    liar = Liar(*truth)
    yield liar
    liar.close()


def test_the_truth_is_believed(liar: Liar) -> None:
    assert torch.equal(fetch(liar, DEADLINE_S)["w"], state()["w"])


@FEWER
@given(chance=CHANCES)
def test_a_lie_is_found_out(
    liar: Liar, truth: tuple[str, dict[str, bytes]], chance: random.Random
) -> None:
    said = dict(truth[1])
    kind = chance.choice(("state", "state", "chunk", "done"))
    lie = chance.choice((head_lie, head_lie, body_lie, sealed_lie))
    said[kind] = lie(said[kind], chance)
    liar.said = said
    try:
        fetched = fetch(liar)
    except PeerError as error:
        sentence = str(error)
    else:
        # A description whose checksum is right is believed, as far as it makes sense.
        assert lie is sealed_lie or describe(fetched).description == describe(state()).description
        assert lie is sealed_lie or torch.equal(fetched["w"], state()["w"])
        return
    assert len(sentence) < 1200
    assert sentence.isprintable(), sentence


def fetch(liar: Liar, patience_s: float = PATIENCE_S) -> Any:
    return Fetch(FetchRequest(liar.url, STEP, patience_s, num_connections=1)).run()


def head_lie(said: bytes, chance: random.Random) -> bytes:
    head, _, body = said.partition(b"\r\n\r\n")
    return edited(head + b"\r\n\r\n", chance) + body


def body_lie(said: bytes, chance: random.Random) -> bytes:
    head, _, body = said.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n" + edited(body, chance)


def sealed_lie(said: bytes, chance: random.Random) -> bytes:
    """A body that is not the source's, with a checksum that fits."""
    _, _, body = said.partition(b"\r\n\r\n")
    body = seal(edited(body[:-DIGEST_BYTES], chance), DESCRIPTION_SEED)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
