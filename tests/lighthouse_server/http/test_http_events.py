"""Tests the event stream: what readers receive, and what those cost that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from support.dashboards import TOKEN, Served, served
from support.running import Line, eventually

from torchft_svc.lighthouse_server.http import events
from torchft_svc.lighthouse_server.http.app import Dashboard
from torchft_svc.lighthouse_server.http.documents import Clock
from torchft_svc.lighthouse_server.http.events import (
    CHUNK_BYTES,
    MAX_READERS,
    MAX_UNREAD,
    Hub,
    Reader,
)
from torchft_svc.lighthouse_server.http.refusals import HttpRefusal

EVENTS = "/api/v1/events"


class Wire:
    """The connection of a reader in a test."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def hub(max_readers: int = 3) -> Hub:
    return Hub(Clock(0.0), max_readers)


async def taken(reader: Reader, number: int) -> list[dict[str, Any]]:
    """The next events, as they are sent."""
    found: list[dict[str, Any]] = []
    messages = reader.messages()
    while len(found) < number:
        kind, data = (await messages.__anext__()).decode().splitlines()[:2]
        if kind == ":":
            continue
        found.append({"event": kind.removeprefix("event: "), **json.loads(data[len("data: ") :])})
    return found


def test_a_change_is_built_once_for_all_readers() -> None:
    async def story() -> None:
        built = []

        def build(now: float) -> dict[str, Any]:
            built.append(now)
            return {"step": len(built)}

        all_readers = hub()
        readers = [Reader(Wire()) for _ in range(3)]
        for reader in readers:
            all_readers.subscribe(reader, "j", build)
        list(all_readers.update_readers())
        assert len(built) == 2
        for reader in readers:
            first, second = await taken(reader, 2)
            assert (first["event"], first["document"]) == ("document", {"step": 1})
            assert (second["event"], second["patch"]) == ("patch", {"step": 2})
        all_readers.close()

    asyncio.run(story())


def test_the_loop_is_free_between_two_channels(quickly: None) -> None:
    async def story() -> None:
        order: list[str] = []
        done = asyncio.Event()
        busy, reader = hub(), Reader(Wire())

        def beat() -> None:
            order.append("a beat")
            if len(order) == 8:  # two for the new reader's documents
                done.set()

        def build(name: str, now: float) -> dict[str, Any]:
            order.append(name)
            asyncio.get_running_loop().call_soon(beat)
            return {}

        for name in ("", "j"):
            busy.subscribe(reader, name, partial(build, name))
        await asyncio.wait_for(done.wait(), 10.0)
        assert order[4:] == ["", "a beat", "j", "a beat"]
        busy.close()

    asyncio.run(story())


def test_nothing_is_built_for_nobody() -> None:
    async def story() -> None:
        built = []
        empty, reader = hub(), Reader(Wire())
        empty.subscribe(reader, "", lambda now: {"n": len(built)} if built.append(now) else {})
        empty.remove(reader)
        list(empty.update_readers())
        assert len(built) == 1
        assert empty._timer is None

    asyncio.run(story())


def test_one_reader_too_many_is_refused() -> None:
    async def story() -> None:
        full = hub(max_readers=1)
        full.check_room()
        reader = Reader(Wire())
        full.subscribe(reader, "", lambda now: {})
        with pytest.raises(HttpRefusal, match="1 others read the event stream") as refused:
            full.check_room()
        assert refused.value.status == 503
        full.remove(reader)
        full.check_room()

    asyncio.run(story())


def test_a_reader_that_does_not_keep_up_is_disconnected_alone() -> None:
    async def story() -> None:
        steps = iter(range(1000))
        both, slow_wire, quick_wire = hub(), Wire(), Wire()
        slow, quick = Reader(slow_wire), Reader(quick_wire)
        for reader in (slow, quick):
            both.subscribe(reader, "", lambda now: {"step": next(steps)})
        for _ in range(MAX_UNREAD + 2):
            list(both.update_readers())
            while quick.num_unread:
                await taken(quick, 1)
        assert (slow_wire.is_aborted, quick_wire.is_aborted) == (True, False)
        assert slow.num_unread == 0, "nothing is kept for it"
        assert [each async for each in slow.messages()] == []
        both.close()

    asyncio.run(story())


def test_a_large_document_is_sent_in_pieces() -> None:
    async def story() -> None:
        reader, large = Reader(Wire()), hub()
        large.subscribe(reader, "", lambda now: {"text": "x" * 100_000})
        reader.end()
        pieces = [piece async for piece in reader.messages()]
        assert max(map(len, pieces)) == CHUNK_BYTES
        assert json.loads(b"".join(pieces).split(b"data: ")[1])["document"]["text"] == "x" * 100_000
        large.close()

    asyncio.run(story())


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "UPDATE_S", 0.05)


def stream(server: Served, job: str | None = None) -> Any:
    return server.client.stream("GET", EVENTS, params={} if job is None else {"job": job})


def received(response: httpx.Response) -> Iterator[dict[str, Any]]:
    kind = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield {"event": kind, **json.loads(line.removeprefix("data: "))}


pytestmark = pytest.mark.processes


def test_readers_see_a_job_change_and_go(lighthouse: Served, line: Line, quickly: None) -> None:
    line.quorum("g:1", step=3, job="live").result()
    with stream(lighthouse, "live") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events_ = received(response)
        first, second = next(events_), next(events_)
        assert first["document"]["jobs"]["live"]["step"] == 3
        assert (second["channel"], second["document"]["groups"]["g"]["state"]) == (
            "live",
            "training",
        )
        line.quorum("g:1", step=4, job="live").result()
        summaries = (each.get("patch", {}).get("summary", {}) for each in events_)
        assert next(each for each in summaries if "step" in each)["step"] == 4
        line.leave("g:1", "it has crashed", job="live")
        lost = next(each for each in events_ if each.get("patch", {}).get("groups"))
        assert lost["patch"]["groups"]["g"]["state"] == "lost"


def test_a_job_that_is_not_there_has_no_stream(lighthouse: Served) -> None:
    with stream(lighthouse, "nothing") as response:
        assert response.status_code == 404
        response.read()
        assert response.json()["error"]["code"] == "no_such_job"


def test_the_head_of_the_stream_ends(lighthouse: Served) -> None:
    response = lighthouse.client.head(EVENTS)
    assert (response.status_code, response.content) == (200, b"")


def deaf(server: Served) -> socket.socket:
    """A reader that asks for the stream and does not read it."""
    address = urlsplit(server.url)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(20)
    raw.connect((address.hostname, address.port))
    head = f"GET {EVENTS} HTTP/1.1\r\nHost: localhost\r\n"
    raw.sendall(f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
    return raw


def test_a_thousand_readers_that_do_not_read(
    quickly: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that do not read are refused, or disconnected, while others are served."""
    caplog.set_level("INFO", "torchft_svc.lighthouse_server.http.events")
    number = [0]

    def large(self: Any, now: float) -> dict[str, Any]:
        number[0] += 1
        return {"jobs": {}, "text": f"{number[0]:09}" * 30_000}

    monkeypatch.setattr(Dashboard, "_overview", large)
    with served() as server, ExitStack() as stack:
        crowd = [stack.enter_context(deaf(server)) for _ in range(1000)]
        refused = [b" 503 " in first_bytes(each) for each in crowd]
        assert refused.count(False) >= MAX_READERS
        assert any(refused)
        slowest_s = 0.0

        def are_all_gone() -> bool:
            nonlocal slowest_s
            asked_at = time.monotonic()
            assert server.get("/healthz").status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - asked_at)
            dropped = ["does not keep up" in each.message for each in caplog.records]
            return dropped.count(True) == refused.count(False)

        eventually(are_all_gone, 60.0)
        assert slowest_s < 2.0
        with stream(server) as response:  # and there is room again
            assert response.status_code == 200


def first_bytes(raw: socket.socket) -> bytes:
    try:
        return raw.recv(64)
    except OSError:
        return b""
