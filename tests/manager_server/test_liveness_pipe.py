"""Tests that an owner notices a manager that does not move, and suspects no other one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

from torchft_svc.manager_server import liveness_pipe
from torchft_svc.manager_server.liveness_pipe import LivenessPipe, write_signs

LOOK_S = 1 / 64
LOOKS_TO_SILENCE = 8


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_pipe, "_LOOK_S", LOOK_S)
    monkeypatch.setattr(liveness_pipe, "SILENCE_S", LOOKS_TO_SILENCE * LOOK_S)
    monkeypatch.setattr(liveness_pipe, "SIGN_INTERVAL_S", 0.0)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The owner's end, which `LivenessPipe` closes, and the manager's."""
    reading, writing = os.pipe()
    yield reading, writing
    with contextlib.suppress(OSError):
        os.close(writing)


def looks(reading: int, happens: Callable[[int], float] = lambda number: 0.0) -> tuple[bool, int]:
    """Whether it was silence, and after how many looks.

    ``happens`` before each of them; it returns for how long the owner is stopped.
    """
    at, num = 0.0, -2  # it reads the clock twice before

    def clock() -> float:
        nonlocal at, num
        num += 1
        at += LOOK_S + happens(num)
        return at

    with contextlib.closing(LivenessPipe(reading, clock)) as signs:
        return signs.await_silence(lambda: False), num


def test_a_manager_that_shows_nothing_is_silent_after_a_while(pipe: tuple[int, int]) -> None:
    assert looks(pipe[0]) == (True, LOOKS_TO_SILENCE)


def test_each_sign_of_life_gives_it_all_the_time_again(pipe: tuple[int, int]) -> None:
    def signs(number: int) -> float:
        os.write(pipe[1], b"." * (number in (0, LOOKS_TO_SILENCE - 2)))
        return 0.0

    silent, num = looks(pipe[0], signs)
    assert silent
    assert num == 2 * LOOKS_TO_SILENCE - 1


def test_who_was_stopped_itself_blames_nobody(pipe: tuple[int, int]) -> None:
    """Alone or with the manager, which needs a moment to go on, too."""
    silent, num = looks(pipe[0], lambda number: 1000.0 * (number == LOOKS_TO_SILENCE // 2))
    assert silent
    assert num == LOOKS_TO_SILENCE


def test_an_end_is_no_silence(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    with contextlib.closing(LivenessPipe(reading)) as signs:
        assert not signs.await_silence(lambda: True)
        os.close(writing)
        assert not signs.await_silence(lambda: False)


def test_signs_of_life_wait_for_nobody(pipe: tuple[int, int]) -> None:
    reading, writing = pipe

    async def story() -> None:
        showing = asyncio.create_task(write_signs(writing))
        await asyncio.sleep(0)
        assert os.read(reading, 1) == b"."
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))  # the owner does not read
        await asyncio.sleep(0)
        os.close(reading)
        await asyncio.sleep(0)
        assert not showing.done()
        showing.cancel()

    asyncio.run(story())
