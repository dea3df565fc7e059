"""Tests in which order a manager tries its lighthouses, and after which pauses."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from torchft_svc.core.quorum.types import QuorumConfig
from torchft_svc.core.route import (
    LASTING_S,
    MANAGER_PATIENCE_S,
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    AttachEnd,
    AttachRetry,
    Backoff,
    Reattach,
    Route,
)

NUM_MANAGERS = 1000
OUTAGE_S = 10.0
BIN_S = 0.01

# What happens, and where the manager is after it; "pause" follows where all have failed.
STORIES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "one alone": (
        "a",
        [("fails", "a pause"), ("works", "a"), ("fails", "a"), ("fails", "a pause")],
    ),
    "in order": ("abc", [("fails", "b"), ("fails", "c"), ("fails", "a pause"), ("fails", "b")]),
    "what worked is tried again first, then the list from its beginning": (
        "abc",
        [("fails", "b"), ("works", "b"), ("fails", "b"), ("fails", "a"), ("fails", "c")],
    ),
    "a leader is gone to at once": ("abc", [("names c", "c"), ("works", "c")]),
    "a leader that fails leaves the list": ("ab", [("names x", "x"), ("fails", "b")]),
    "two that name each other": ("ab", [("names b", "b"), ("names a", "a"), ("names b", "b")]),
    "a leader that is not there is gone to once": (
        "ab",
        [("names x", "x"), ("fails", "b"), ("names x", "a pause"), ("names x", "x")],
    ),
    "back to the first": ("ab", [("fails", "b"), ("works", "b"), ("back a", "a"), ("fails", "a")]),
}


@pytest.mark.parametrize(("addresses", "story"), STORIES.values(), ids=list(STORIES))
def test_the_way_through_a_list(addresses: str, story: list[tuple[str, str]]) -> None:
    route = Route(list(addresses))
    assert route.current == addresses[0]
    for number, (event, expected) in enumerate(story):
        goes_on = True
        kind, _, name = event.partition(" ")
        if kind == "works":
            route.record_answer()
        elif kind == "back":
            route.return_to(name)
        else:
            goes_on = route.choose_next(name)
        assert route.current + ("" if goes_on else " pause") == expected, number


def test_whoever_is_not_at_the_first_looks_back_at_those_before() -> None:
    route = Route(["a", "b", "c"])
    assert route.preferred == ()
    route.choose_next()
    route.choose_next()
    assert route.preferred == ("a", "b")
    route.choose_next("the leader, by another name")
    assert route.preferred == ()


def pauses(backoff: Backoff, num: int) -> list[float]:
    """The pauses of a service that does not come back."""
    found = []
    for _ in range(num):
        found.append(backoff.pause_s())
        backoff.record_attempt(failed=True)
    return found


def test_pauses_double_up_to_the_longest_and_begin_again() -> None:
    longest, shortest = Backoff(lambda: 1.0), Backoff(lambda: 0.0)
    assert pauses(longest, 8) == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    assert pauses(shortest, 7) == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    longest.record_attempt(failed=False)
    assert longest.pause_s() == 0.02


def test_a_pause_is_far_below_the_heartbeat_timeout() -> None:
    assert QuorumConfig().heartbeat_timeout_s >= 10 * MAX_PAUSE_S


def test_a_fleet_that_lost_its_lighthouse_in_one_moment_comes_back_spread() -> None:
    """Every attempt fails at once, which is the worst case: nothing but the draws parts them."""
    attempts: Counter[int] = Counter()
    for number in range(NUM_MANAGERS):
        backoff, at = Backoff(random.Random(number).random), 0.0
        while at < OUTAGE_S:
            pause_s = backoff.pause_s()
            assert pause_s <= MAX_PAUSE_S, (
                "so long after its return the lighthouse is found at the latest"
            )
            at += pause_s
            attempts[int(at / BIN_S)] += 1
            backoff.record_attempt(failed=True)
    later = [attempts[number] for number in range(int(1 / BIN_S), int(OUTAGE_S / BIN_S))]
    assert sum(later) == pytest.approx(
        (OUTAGE_S - 1) * NUM_MANAGERS / (0.75 * MAX_PAUSE_S), rel=0.05
    )
    assert max(later) < 0.1 * NUM_MANAGERS, "of all managers in one hundredth of a second"


def test_a_stream_to_the_manager_is_opened_again() -> None:
    retry = AttachRetry(lambda: 1.0)
    first = MIN_PAUSE_S
    broken = Reattach(first, is_broken=True, is_cut=False, is_lost=True)
    assert retry.ended(AttachEnd.BROKEN, 10.0) == broken
    known = dataclasses.replace(broken, is_broken=False, pause_s=2 * first)
    assert retry.ended(AttachEnd.BROKEN, 10.1) == known
    moved = dataclasses.replace(known, is_lost=False, pause_s=4 * first)
    assert retry.ended(AttachEnd.MOVED, 10.2) == moved
    retry.received()
    closed = Reattach(8 * first, is_broken=True, is_cut=True, is_lost=False)
    assert retry.ended(AttachEnd.CLOSED, 10.3) == closed
    retry.received()
    refused = dataclasses.replace(closed, pause_s=first)
    assert retry.ended(AttachEnd.REFUSED, 10.4) == refused
    assert not retry.ended(AttachEnd.MOVED, 10.5).is_cut
    for number in range(1, 9):  # managers that die one after the other
        retry.received()
        again = dataclasses.replace(broken, pause_s=first)
        assert retry.ended(AttachEnd.BROKEN, 10.5 + number * LASTING_S) == again
    retry.received()
    assert retry.ended(AttachEnd.BROKEN, 18.6).pause_s == 2 * first, "it fails at once"


def test_who_finds_no_manager_for_long_is_out_of_its_quorum() -> None:
    retry = AttachRetry(lambda: 1.0)
    retry.ended(AttachEnd.BROKEN, 10.0)
    late_at = 10.0 + MANAGER_PATIENCE_S
    assert not retry.ended(AttachEnd.BROKEN, late_at - 0.1).is_cut
    assert retry.ended(AttachEnd.BROKEN, late_at).is_cut
    assert not retry.ended(AttachEnd.BROKEN, late_at + 0.1).is_cut, "the worker knows already"
    retry.received()
    assert not retry.ended(AttachEnd.BROKEN, late_at + 1.0).is_cut
