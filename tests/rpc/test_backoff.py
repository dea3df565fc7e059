"""Pauses between attempts: bounded, far below the heartbeat timeout, and spread over a fleet."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from torchft_svc.core.types import QuorumConfig
from torchft_svc.rpc.backoff import Backoff
from torchft_svc.rpc.channel import MAX_RECONNECT_MS

MAX_S = MAX_RECONNECT_MS / 1000
NUM_MANAGERS = 1000
OUTAGE_S = 10.0
BIN_S = 0.01


def pauses(backoff: Backoff, num: int) -> list[float]:
    """Of a service that does not come back."""
    found = []
    for _ in range(num):
        found.append(backoff.pause_s())
        backoff.tried(failed=True)
    return found


def test_pauses_double_up_to_the_longest_and_begin_again() -> None:
    longest, shortest = Backoff(lambda: 1.0), Backoff(lambda: 0.0)
    assert pauses(longest, 8) == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    assert pauses(shortest, 7) == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    longest.tried(failed=False)
    assert longest.pause_s() == 0.02


def test_a_pause_is_far_below_the_heartbeat_timeout() -> None:
    assert QuorumConfig().heartbeat_timeout_s >= 10 * MAX_S


def test_a_fleet_that_lost_its_lighthouse_in_one_moment_comes_back_spread() -> None:
    """Every attempt fails at once, which is the worst case: nothing but the draws parts them."""
    attempts: Counter[int] = Counter()
    for number in range(NUM_MANAGERS):
        backoff, at = Backoff(random.Random(number).random), 0.0
        while at < OUTAGE_S:
            pause_s = backoff.pause_s()
            assert pause_s <= MAX_S, (
                "so long after its return the lighthouse is found at the latest"
            )
            at += pause_s
            attempts[int(at / BIN_S)] += 1
            backoff.tried(failed=True)
    later = [attempts[number] for number in range(int(1 / BIN_S), int(OUTAGE_S / BIN_S))]
    assert sum(later) == pytest.approx((OUTAGE_S - 1) * NUM_MANAGERS / (0.75 * MAX_S), rel=0.05)
    assert max(later) < 0.1 * NUM_MANAGERS, "of all managers in one hundredth of a second"
