"""Tests what a lighthouse sends whose term has ended, and what it forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from torchft_svc.core.quorum.lighthouse.copies import HeldCopy
from torchft_svc.core.quorum.types import Member, QuorumConfig
from torchft_svc.errors import NotLeader
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.proto import torchft_pb2 as pb

LONG_S = 20.0


class Written(list[bytes]):
    """A context that takes what is written to a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.welcomed = asyncio.Event()

    async def write(self, news: bytes) -> None:
        self.append(news)
        self.welcomed.set()


async def _hello_only() -> AsyncIterator[pb.SessionRequest]:
    yield pb.SessionRequest(hello=pb.SessionHello(replica_id="b:1"))
    await asyncio.sleep(LONG_S)


def test_who_does_not_lead_any_more_publishes_nothing_and_forgets_everybody() -> None:
    leader = ["here:1"]

    def check_leads() -> None:
        if leader != ["here:1"]:
            raise NotLeader(leader[0])

    async def lose_the_lease(waits: str) -> None:
        """Lose the lease while one call ``waits`` and one session is open."""
        driver, context = LighthouseDriver(QuorumConfig(min_replicas=2), check_leads), Written()
        stream: Any = context
        session = asyncio.create_task(driver.session("other", _hello_only(), stream))
        waiting = asyncio.create_task(driver.quorum("job", Member(replica_id=waits), LONG_S))
        await asyncio.wait_for(context.welcomed.wait(), LONG_S)
        assert len(driver.status("")) == 2
        leader[0] = "there:1"
        # Its quorum would be published at once, if the lighthouse did not look again.
        with pytest.raises(NotLeader, match="there:1"):
            await driver.quorum("job", Member(replica_id="c:1"), LONG_S)
        assert driver.status("") == []
        for each in (session, waiting):
            with pytest.raises(NotLeader, match="there:1"):
                await asyncio.wait_for(each, LONG_S)
        driver.close()

    asyncio.run(lose_the_lease("a:1"))


def test_b5_who_is_elected_knows_the_copies_that_were_reported_before() -> None:
    def check_leads() -> None:
        raise NotLeader("there:1")

    async def report() -> int:
        driver = LighthouseDriver(QuorumConfig(min_replicas=1), check_leads)
        with pytest.raises(NotLeader):
            driver.record_copies("job", "holder", (HeldCopy(step=5, address="h:1"),))
        num_copies = len(driver.members("job").copies)
        driver.close()
        return num_copies

    assert asyncio.run(report()) == 1
