"""Many managers lose one lighthouse in one moment: all draw their pauses, and are back in time."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from support.bounds import check
from support.running import eventually, lighthouse_process, steady_address

from tools.chaos.bounds import LIGHTHOUSE_BACK_S
from torchft_svc.core.link import LinkState
from torchft_svc.core.quorum.session_messages import Beat, Leave
from torchft_svc.core.route import MAX_PAUSE_S, MIN_PAUSE_S
from torchft_svc.host.tasks import Tasks
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.link import LighthouseLink

NUM_MANAGERS = 50
# After so many attempts a pause is as long as it gets.
NUM_TRIED = int(MAX_PAUSE_S / MIN_PAUSE_S).bit_length() + 1
DEADLINE_S = 60.0


class Dice:
    """Counts how often it was thrown."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.num = 0

    def __call__(self) -> float:
        self.num += 1
        return self._random.random()


@pytest.mark.processes
def test_fifty_sessions_are_back_soon_after_their_lighthouse() -> None:
    address = steady_address()
    dice = [Dice(seed) for seed in range(NUM_MANAGERS)]

    async def all_connected(links: list[LighthouseLink]) -> None:
        await asyncio.to_thread(
            eventually,
            lambda: all(link.machine.state is LinkState.OPEN for link in links),
            DEADLINE_S,
        )

    async def story() -> None:
        async with Tasks() as tasks:
            links = [LighthouseLink(config(address, i), tasks, dice[i]) for i in range(len(dice))]
            with await asyncio.to_thread(lighthouse_process, bind=address):
                for link in links:
                    link.on_news = link.on_outcome = lambda *what: None
                    link.beat = Beat
                    link.start()
                await all_connected(links)
            for each in dice:
                each.num = 0  # what was drawn before were beats
            await asyncio.to_thread(
                eventually,
                lambda: min(each.num for each in dice) >= NUM_TRIED,
                DEADLINE_S,
                "each pause is drawn",
            )
            with await asyncio.to_thread(lighthouse_process, bind=address):
                back_at = time.monotonic()
                await all_connected(links)
                check("fifty sessions are back", time.monotonic() - back_at, LIGHTHOUSE_BACK_S)
                await asyncio.gather(*(link.leave(Leave("the test ends")) for link in links))

    asyncio.run(story())


def config(lighthouse: str, number: int) -> ManagerConfig:
    return ManagerConfig(
        lighthouse_address=lighthouse,
        replica_name=f"group-{number}",
        group_world_size=1,
        store_address="127.0.0.1:1",
        heartbeat_interval_s=0.5,
    )
