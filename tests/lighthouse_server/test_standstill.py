"""A lighthouse that stood still blames nobody for what it did not hear."""

from __future__ import annotations

import asyncio
import time

import pytest

from torchft_svc.core.pausable_clock import PausableClock, usual_look_s
from torchft_svc.core.types import Member, QuorumConfig
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.proto import torchft_pb2 as pb

TIMEOUT_S = 1.0
STANDSTILL_S = 1.5 * TIMEOUT_S
LONG_S = 20.0


@pytest.mark.parametrize(
    ("instants", "told"),
    [
        ([101, 102.9, 103], [1, 2.9, 3]),  # late, but as a busy machine is
        ([101, 108, 109], [1, 2, 3]),  # stopped for 6 s
        ([103, 106, 107], [1, 2, 3]),  # twice
    ],
)
def test_time_without_a_look_does_not_count(instants: list[float], told: list[float]) -> None:
    clock = PausableClock(1.0, 100.0)
    assert [clock.now(at) - 100 for at in instants] == pytest.approx(told)
    assert clock.missed_s == pytest.approx(instants[-1] - told[-1] - 100)


@pytest.mark.parametrize(
    ("timeout_s", "look_s"), [(0.001, 0.02), (0.8, 0.1), (5.0, 0.5), (1e9, 0.5)]
)
def test_it_looks_a_few_times_in_every_timeout(timeout_s: float, look_s: float) -> None:
    assert usual_look_s(timeout_s) == pytest.approx(look_s)


def test_who_waits_and_who_trains_outlive_a_standstill(caplog: pytest.LogCaptureFixture) -> None:
    """It is longer than every timeout: nobody is dead, late or hung because of it."""
    config = QuorumConfig(
        min_replicas=1,
        heartbeat_timeout_s=TIMEOUT_S,
        join_timeout_s=TIMEOUT_S,
        hang_timeout_s=TIMEOUT_S,
        on_hang="kill",
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
            doing = pb.SessionBeat(phase=pb.PHASE_TRAINING, step=step)
            driver.heartbeat("job", "b:1", doing)
        driver.close()
        return found

    with caplog.at_level("INFO"):
        assert asyncio.run(rounds()) == [["a:1", "b:1"]] * 2
    assert "group lost" not in caplog.text
    assert "group hangs" not in caplog.text
    assert "this process did not run for" in caplog.text
