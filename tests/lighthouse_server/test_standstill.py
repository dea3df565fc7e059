"""Tests that a lighthouse that stood still blames nobody for what it did not receive."""

from __future__ import annotations

import asyncio
import time

import pytest

from torchft_svc.core.quorum.types import Member, QuorumConfig
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.proto import torchft_pb2 as pb

TIMEOUT_S = 1.0
STANDSTILL_S = 1.5 * TIMEOUT_S
LONG_S = 20.0


def test_who_waits_outlives_a_standstill(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The standstill is longer than every timeout: nobody is dead or late because of it."""
    config = QuorumConfig(
        min_replicas=1,
        heartbeat_timeout_s=TIMEOUT_S,
        join_timeout_s=TIMEOUT_S,
    )

    async def rounds() -> list[list[str]]:
        driver = LighthouseDriver(config)

        def ask(name: str, step: int) -> asyncio.Task[bytes]:
            member = Member(replica_id=name, step=step)
            return asyncio.create_task(driver.quorum("job", member, LONG_S))

        found = []
        driver.heartbeat("job", "b:1")
        for step in (1, 2):
            first = ask("a:1", step)
            await asyncio.sleep(0)  # it asks
            if step == 2:
                time.sleep(STANDSTILL_S)  # noqa: ASYNC251 - all of this process stands still
            second = ask("b:1", step)
            answers = [await each for each in (first, second)]
            assert answers[0] == answers[1]
            quorum = pb.LighthouseQuorumResponse.FromString(answers[0]).quorum
            found.append([member.replica_id for member in quorum.participants])
        driver.close()
        return found

    with caplog.at_level("INFO"):
        assert asyncio.run(rounds()) == [["a:1", "b:1"]] * 2
    assert "group lost" not in caplog.text
    assert "this process did not run for" in caplog.text
