"""Tests what a stream leaves behind, however it ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from torchft_svc.errors import RequestRefused, Unreachable
from torchft_svc.rpc import outbox
from torchft_svc.rpc.heavy_writes import HEAVY_BYTES, HeavyWrites
from torchft_svc.rpc.outbox import MAX_UNREAD_BYTES, MAX_UNREAD_NEWS, Outbox, Unread, first_message


class _Vanished:
    """A call whose client does not read, and which then breaks."""

    was_read_cancelled = False

    def __init__(self) -> None:
        self.is_written_to = asyncio.Event()
        self._broken = asyncio.Event()

    def break_off(self) -> None:
        self._broken.set()

    def peer(self) -> str:
        return "somewhere"

    async def requests(self) -> AsyncIterator[str]:
        """gRPC ends them when the call breaks; one has come just before."""
        try:
            await self._broken.wait()
        except asyncio.CancelledError:
            self.was_read_cancelled = True
            raise
        yield "the last one"

    async def write(self, news: bytes) -> None:
        self.is_written_to.set()
        await self._broken.wait()
        raise ConnectionError(f"{len(news)} bytes could not be sent")


class _Reads:
    """A call whose client takes what it gets."""

    async def write(self, news: bytes) -> None:
        pass


async def _none() -> AsyncIterator[str]:
    await asyncio.get_running_loop().create_future()
    yield ""


def _accept(_: str) -> bool:
    return True


async def _cancel_twice() -> list[str]:
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    outbox, call = Outbox(), _Vanished()
    context: Any = call
    received: list[str] = []
    stream = asyncio.create_task(outbox.exchange(call.requests(), _recording(received), context))
    outbox.add_news(b"news")
    await call.is_written_to.wait()
    for _ in range(2):
        stream.cancel()
        await asyncio.sleep(0)
    call.break_off()
    await asyncio.wait([stream])
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:  # a read or a write that ends with the call
        _, left = await asyncio.wait(left, timeout=10)
    await asyncio.wait_for(outbox.end(), 10)
    complaints += [f"{each!r} was received behind the end" for each in received]
    if call.was_read_cancelled:
        complaints.append("a read was cancelled while gRPC had its buffer")
    complaints += [f"{task.get_coro()!r} still runs" for task in left]
    del stream, left
    gc.collect()
    return complaints


def _recording(received: list[str]) -> Any:
    def receive(request: str) -> bool:
        received.append(request)
        return True

    return receive


def test_a_stream_that_is_cancelled_twice_while_it_writes_leaves_no_task_behind() -> None:
    assert asyncio.run(_cancel_twice()) == []


@pytest.mark.parametrize(
    ("piece", "num_taken"),
    [
        (bytes(1), MAX_UNREAD_NEWS),
        (bytes(MAX_UNREAD_BYTES // 4), 5),
        (bytes(8 * MAX_UNREAD_BYTES), 1),
    ],
    ids=["light", "heavy", "heavier than all may be"],
)
def test_what_nobody_reads_is_bounded_in_number_and_weight(piece: bytes, num_taken: int) -> None:
    expected = f"{num_taken} pieces of news were not read ({num_taken * len(piece)} bytes)"
    assert asyncio.run(_send_unread(piece, num_taken + 1)) == expected


def test_long_news_that_are_not_taken_in_time_end_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "HEAVY_WRITE_S", 0.1)

    async def story() -> None:
        heavy = HeavyWrites()
        outbox, call = Outbox(heavy, "job"), _Vanished()
        outbox.add_news(bytes(HEAVY_BYTES), b"more")
        context: Any = call
        with pytest.raises(RequestRefused, match=r"not read within 0.1 s \(65540 bytes\)"):
            await outbox.exchange(_none(), _accept, context)
        await asyncio.wait_for(heavy.begin_write("other", 1 << 40), 10)

    asyncio.run(story())


def test_a_client_that_goes_while_it_is_written_to_is_not_our_fault() -> None:
    async def story() -> None:
        outbox, call = Outbox(), _Vanished()
        outbox.add_news(b"news")
        context: Any = call
        stream = asyncio.create_task(outbox.exchange(_none(), _accept, context))
        await call.is_written_to.wait()
        call.break_off()
        with pytest.raises(Unreachable, match=r"client at somewhere .* it has gone"):
            await stream

    asyncio.run(story())


def test_of_all_that_is_unread_the_stream_with_the_most_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "WRITE_GRACE_S", 0.01)

    async def story() -> None:
        unread = Unread(max_bytes=10)
        boxes = [Outbox(None, "job", unread) for _ in range(3)]
        context: Any = _Vanished()
        streams = [asyncio.create_task(box.exchange(_none(), _accept, context)) for box in boxes]
        for box in boxes:
            box.add_news(b"under way")
        await context.is_written_to.wait()
        await asyncio.sleep(0)
        shared = bytes(4)
        for box in boxes:
            box.add_news(shared)  # counts once
        boxes[1].add_news(bytes(3))
        boxes[2].add_news(bytes(2))
        assert not any(box._failed.is_set() for box in boxes)
        boxes[0].add_news(bytes(2))
        assert [box._failed.is_set() for box in boxes] == [False, True, False]
        boxes[0].add_news(bytes(2))
        assert [box.num_bytes for box in boxes] == [8, 0, 6]
        expected = r"7 bytes of news were not read, more than by any other client; .* 10 unread"
        with pytest.raises(RequestRefused, match=expected):
            await streams[1]
        context.break_off()
        await asyncio.gather(*streams, return_exceptions=True)
        assert not unread._num_bytes
        assert not unread._num_streams
        assert not unread._outboxes

    asyncio.run(story())


def test_a_client_that_begins_too_late_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "HELLO_TIMEOUT_S", 0.01)

    async def story() -> None:
        call = _Vanished()
        assert await first_message(call.requests()) is None
        call.break_off()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*left), 10)
        assert not call.was_read_cancelled

    asyncio.run(story())


async def _send_unread(piece: bytes, count: int) -> str:
    """Why the stream ends, when so many pieces have come before any could leave."""
    outbox = Outbox()
    for number in range(count):
        assert not outbox._failed.is_set(), f"at piece {number}"
        outbox.add_news(piece)
    context: Any = _Reads()
    with pytest.raises(RequestRefused) as caught:
        await outbox.exchange(_none(), _accept, context)
    return str(caught.value)
