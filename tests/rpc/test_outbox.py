"""Tests what a stream leaves behind, however it ends."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from torchft_svc.errors import RequestRefused, Unreachable
from torchft_svc.rpc import outbox
from torchft_svc.rpc.heavy_writes import HEAVY_BYTES, HeavyWrites
from torchft_svc.rpc.outbox import MAX_UNREAD_BYTES, MAX_UNREAD_NEWS, Outbox


class _Vanished:
    """A call whose client does not read, and which then breaks."""

    def __init__(self) -> None:
        self.is_written_to = asyncio.Event()
        self._broken = asyncio.Event()

    def break_off(self) -> None:
        self._broken.set()

    def peer(self) -> str:
        return "somewhere"

    async def write(self, news: bytes) -> None:
        self.is_written_to.set()
        await self._broken.wait()
        raise ConnectionError(f"{len(news)} bytes could not be sent")


class _Reads:
    """A call whose client takes what it gets."""

    async def write(self, news: bytes) -> None:
        pass


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


async def _cancel_twice() -> list[str]:
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    outbox, call = Outbox(), _Vanished()
    context: Any = call
    stream = asyncio.create_task(outbox.exchange(_never(), context))
    outbox.tell(b"news")
    await call.is_written_to.wait()
    for _ in range(2):
        stream.cancel()
        await asyncio.sleep(0)
    call.break_off()
    await asyncio.wait([stream])
    left = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait_for(outbox.end(), 10)
    complaints += [f"{task.get_coro()!r} still runs" for task in left]
    del stream, left
    gc.collect()
    return complaints


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
    told = f"{num_taken} pieces of news were not read ({num_taken * len(piece)} bytes)"
    assert asyncio.run(_tell_the_deaf(piece, num_taken + 1)) == told


def test_long_news_that_are_not_taken_in_time_end_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "HEAVY_WRITE_S", 0.1)

    async def story() -> None:
        heavy = HeavyWrites()
        told, call = Outbox(heavy, "job"), _Vanished()
        told.tell(bytes(HEAVY_BYTES), b"more")
        context: Any = call
        with pytest.raises(RequestRefused, match=r"not read within 0.1 s \(65540 bytes\)"):
            await told.exchange(_never(), context)
        await asyncio.wait_for(heavy.begin("other", 1 << 40), 10)

    asyncio.run(story())


def test_a_client_that_goes_while_it_is_written_to_is_not_our_fault() -> None:
    async def story() -> None:
        told, call = Outbox(), _Vanished()
        told.tell(b"news")
        context: Any = call
        stream = asyncio.create_task(told.exchange(_never(), context))
        await call.is_written_to.wait()
        call.break_off()
        with pytest.raises(Unreachable, match=r"client at somewhere .* it has gone"):
            await stream

    asyncio.run(story())


async def _tell_the_deaf(piece: bytes, count: int) -> str:
    """Why the stream ends, when so many pieces have come before any could leave."""
    outbox = Outbox()
    for number in range(count):
        assert not outbox._failed.is_set(), f"at piece {number}"
        outbox.tell(piece)
    context: Any = _Reads()
    with pytest.raises(RequestRefused) as caught:
        await outbox.exchange(_never(), context)
    return str(caught.value)
