"""Tests that background tasks end with the block that owns them, and that no fault is lost."""

from __future__ import annotations

import asyncio
import logging

import pytest

from torchft_svc.host.tasks import Tasks


def test_a_task_that_loses_its_cancellation_is_cancelled_again() -> None:
    """Raise as `asyncio.wait_for` of Python 3.11 does when a result comes at the same time."""
    lost = 0

    async def stubborn() -> None:
        nonlocal lost
        while lost < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
        await asyncio.sleep(60)

    async def story() -> None:
        async with Tasks() as tasks:
            task = tasks.start(stubborn(), "stubborn")
            await asyncio.sleep(0)
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(story(), 5))
    assert lost == 3


def test_a_fault_is_logged_and_the_siblings_go_on(caplog: pytest.LogCaptureFixture) -> None:
    finished = asyncio.Event()

    async def fails() -> None:
        raise ValueError("a fault")

    async def goes_on() -> None:
        await asyncio.sleep(0)
        finished.set()

    async def story() -> None:
        async with Tasks() as tasks:
            tasks.start(fails(), "the faulty one")
            tasks.start(goes_on(), "the other")
            await asyncio.wait_for(finished.wait(), 5)

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    (record,) = caplog.records
    assert record.getMessage() == "task the faulty one failed"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "a fault"
