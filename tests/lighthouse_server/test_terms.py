"""What a lighthouse tells whose term has ended, and what it forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from torchft_svc.core.types import NO_QUORUM, Member, QuorumConfig
from torchft_svc.errors import NotLeader
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.questions import Outcome
from torchft_svc.rpc.outbox import Outbox

LONG_S = 20.0


class Written(list[bytes]):
    """Takes what is written to a stream."""

    async def write(self, news: bytes) -> None:
        self.append(news)


async def _none() -> AsyncIterator[None]:
    await asyncio.sleep(LONG_S)
    yield


def test_who_does_not_lead_any_more_publishes_nothing_and_forgets_everybody() -> None:
    leader = ["here:1"]

    def check_leads() -> None:
        if leader != ["here:1"]:
            raise NotLeader(leader[0])

    async def story() -> list[Outcome]:
        driver = LighthouseDriver(QuorumConfig(), check_leads)
        heard: list[Outcome] = []
        waits, written = Outbox(), Written()
        driver.open_session("other", "b:1", NO_QUORUM, waits)
        leader[0] = "there:1"
        # Its quorum would be published at once, if the lighthouse did not look again.
        driver.ask("job", Member(replica_id="a:1"), LONG_S, heard.append)
        assert driver.status("") == []
        with pytest.raises(NotLeader, match="there:1"):
            await asyncio.wait_for(waits.exchange(_none(), lambda _: True, written), LONG_S)
        driver.close()
        return heard

    (told,) = asyncio.run(story())
    assert isinstance(told, NotLeader)
