"""Tests the order in which a manager tries its lighthouses, as a table of what happens."""

from __future__ import annotations

import pytest

from torchft_svc.rpc.route import Route

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
            route.worked()
        elif kind == "back":
            route.go_back(name)
        else:
            goes_on = route.go_on(name)
        assert route.current + ("" if goes_on else " pause") == expected, number


def test_whoever_is_not_at_the_first_looks_back_at_those_before() -> None:
    route = Route(["a", "b", "c"])
    assert route.preferred == ()
    route.go_on()
    route.go_on()
    assert route.preferred == ("a", "b")
    route.go_on("the leader, by another name")
    assert route.preferred == ()
