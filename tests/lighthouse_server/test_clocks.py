"""A wall clock that jumps moves nothing: not who is alive, and not the order of ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from torchft_svc.core.quorum.lighthouse.lighthouse import ID_STRIDE
from torchft_svc.core.quorum.types import Member, QuorumConfig
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.proto import torchft_pb2 as pb

ROUND_S = 20.0
DAY_S = 86_400.0
BEFORE_ALL_IDS = 1_000_000.0  # 1970


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let the wall clock show a time; the monotonic one goes on."""

    def set_clock(wall_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: wall_s)

    return set_clock


async def one_round(driver: LighthouseDriver, *, step: int, seen_quorum_id: int = 0) -> pb.Quorum:
    """Both groups ask, at new addresses: that makes a new id."""
    asks = [
        Member(replica_id=name, step=step, seen_quorum_id=seen_quorum_id, address=f"h:{step}")
        for name in ("a:1", "b:1")
    ]
    answers = await asyncio.gather(*(driver.quorum("job", each, ROUND_S) for each in asks))
    assert answers[0] == answers[1]
    quorum = pb.LighthouseQuorumResponse.FromString(answers[0]).quorum
    assert [member.replica_id for member in quorum.participants] == ["a:1", "b:1"]
    return quorum


def test_i1_ids_grow_while_the_clock_jumps(set_clock: Callable[[float], None]) -> None:
    async def rounds() -> list[int]:
        now_s = time.time()
        driver = LighthouseDriver(QuorumConfig(min_replicas=2))
        ids = []
        for step, jump_s in enumerate((0, DAY_S, -DAY_S, -365 * DAY_S, 10_000 * DAY_S, 0)):
            set_clock(now_s + jump_s)
            ids.append((await one_round(driver, step=step)).quorum_id)
        driver.close()
        return ids

    ids = asyncio.run(rounds())
    assert ids == list(range(ids[0], ids[0] + 6 * ID_STRIDE, ID_STRIDE))


@pytest.mark.parametrize(
    "restarted_at_s", [BEFORE_ALL_IDS, 1.9e9 - DAY_S], ids=["1970", "a day before"]
)
def test_i1_a_lighthouse_restarted_in_the_past_goes_on_above(
    set_clock: Callable[[float], None], restarted_at_s: float
) -> None:
    async def two_lives() -> tuple[int, int]:
        set_clock(1.9e9)
        first = LighthouseDriver(QuorumConfig(min_replicas=2))
        before = (await one_round(first, step=1)).quorum_id
        first.close()
        set_clock(restarted_at_s)
        second = LighthouseDriver(QuorumConfig(min_replicas=2))
        after = (await one_round(second, step=2, seen_quorum_id=before)).quorum_id
        second.close()
        return before, after

    before, after = asyncio.run(two_lives())
    assert before < after <= before + ID_STRIDE
