"""Tests what the links of managers and agents have in common: each rule over both of them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from support.core.links import REFUSED, AgentPlay, LinkPlay, ManagerPlay, without_beats

from torchft_svc.core.link import (
    LEAVE_TIMEOUT_S,
    LOG_AGAIN_S,
    MAX_WANTED_INTERVAL_S,
    MOMENTS_PER_INTERVAL,
    TRANSITIONS,
    WELCOME_TIMEOUT_S,
    Close,
    ConfirmLeft,
    Connect,
    LinkState,
    Probe,
    SendBeat,
    beat_together,
)
from torchft_svc.core.route import LOOK_BACK_S, MAX_PAUSE_S, MIN_PAUSE_S
from torchft_svc.errors import NotLeader, TorchFTError, Unreachable

BOTH = pytest.mark.parametrize("play", [ManagerPlay, AgentPlay], ids=["manager", "agent"])


def shared(orders: list[Any]) -> list[Any]:
    """The orders that both kinds of links have."""
    kinds = Connect | Close | Probe | SendBeat | ConfirmLeft
    return [order for order in orders if isinstance(order, kinds)]


def calm(orders: list[Any]) -> list[Any]:
    """The same, without beats."""
    return without_beats(shared(orders))


# -- connecting (F2) -------------------------------------------------------------------------------


@BOTH
def test_pauses_between_attempts_grow_and_end_with_a_welcome(play: type[LinkPlay]) -> None:
    link = play()
    assert shared(link.start()) == [Connect(1, "a")]
    waits = []
    for number in range(1, 9):
        assert shared(link.close(number)) == [Close(number)]
        began_at = link.now
        assert link.until(began_at + MAX_PAUSE_S)[0] == Connect(number + 1, "a")
        connection = link.machine._connection
        waits.append(round(connection.closes_at - WELCOME_TIMEOUT_S - began_at, 6))
    assert waits == [0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5, 0.5]
    link.open(9)
    assert shared(link.close(9)) == [Close(9)]
    assert link.until(link.now + MIN_PAUSE_S) == [Connect(10, "a")]


@BOTH
@pytest.mark.parametrize("reached_after_s", [None, 1.5])
def test_a_lighthouse_that_does_not_answer_is_given_up(
    play: type[LinkPlay], reached_after_s: float | None
) -> None:
    """The time begins when it was reached, at the latest."""
    link = play("a", "b")
    link.start()
    if reached_after_s is not None:
        link.until(reached_after_s)
        link(lambda machine: machine.introduced(1, link.now))
    due_at = link.now + WELCOME_TIMEOUT_S
    assert link.until(due_at - 0.01) == []
    assert shared(link.until(due_at + MIN_PAUSE_S)) == [Close(1), Connect(2, "b")]
    assert "does not answer" in link.log[0]
    assert link.open(1) == [], "its welcome comes too late"


@BOTH
def test_a_lighthouse_that_ends_its_stream_is_lost_like_one_that_breaks(
    play: type[LinkPlay],
) -> None:
    link = play("a", "b").opened()
    assert shared(link.close(1, None)) == [Close(1)]
    assert link.log == [
        "lost the lighthouse: lighthouse at a cannot be reached: it ended the session"
    ]
    assert link.until(link.now + MIN_PAUSE_S) == [Connect(2, "a")], "first to the same one"
    link.close(2)
    assert link.until(link.now + MIN_PAUSE_S) == [Connect(3, "b")], "then through the list"


@BOTH
def test_the_leader_is_tried_next(play: type[LinkPlay]) -> None:
    link = play("a", "b", "c")
    link.start()
    link.close(1, NotLeader("c"))
    assert link.until(MIN_PAUSE_S) == [Connect(2, "c")]


@BOTH
def test_a_leader_outside_of_the_list_is_tried_once(play: type[LinkPlay]) -> None:
    """Two that name each other are no way out."""
    link = play("a", "b")
    link.start()
    link.close(1, NotLeader("x"))
    assert link.until(MIN_PAUSE_S) == [Connect(2, "x")]
    link.close(2, NotLeader("x"))
    assert link.until(2 * MIN_PAUSE_S) == [Connect(3, "b")]


@BOTH
def test_inputs_of_a_connection_that_is_over_are_ignored(play: type[LinkPlay]) -> None:
    link = play().opened()
    link.close(1)
    link.until(1.0)
    before = repr(vars(link.machine))
    for late in (
        lambda machine: machine.welcomed(1, 0.0, 1.0),
        lambda machine: machine.introduced(1, 1.0),
        lambda machine: machine.not_supported(1, 1.0),
        lambda machine: machine.beat_was_late(1, 1.0),
        lambda machine: machine.probed(1, ("a",), 1.0),
        lambda machine: machine.closed(1, REFUSED, 1.0),
        lambda machine: machine.closed(1, None, 1.0),
    ):
        assert link(late) == []
    assert link.open(1) == []
    assert repr(vars(link.machine)) == before


# -- the trouble log -------------------------------------------------------------------------------


@BOTH
def test_a_trouble_is_logged_at_once_then_rarely_and_when_it_is_over(play: type[LinkPlay]) -> None:
    link = play()
    link.start()
    number = 1
    while link.now < LOG_AGAIN_S + MAX_PAUSE_S:
        link.close(number)
        link.until(link.now + MAX_PAUSE_S)
        number += 1
    assert link.log == [
        "there is no lighthouse: lighthouse at a cannot be reached: refused",
        "no lighthouse for 5 s: lighthouse at a cannot be reached: refused",
    ]
    link.open(number)
    assert link.log[2:] == ["connected to lighthouse a"]
    link.close(number)
    assert link.log[3:] == ["lost the lighthouse: lighthouse at a cannot be reached: refused"]


# -- beats -----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("wanted_s", "interval_s"),
    [(0.0, None), (20.0, 20.0), (1e9, MAX_WANTED_INTERVAL_S), (-1e9, None)],
)
def test_a_lighthouse_may_want_fewer_beats_but_not_none(
    play: type[LinkPlay], wanted_s: float, interval_s: float | None
) -> None:
    link = play()
    interval_s = link.interval_s if interval_s is None else interval_s
    link.start()
    link.open(interval_s=wanted_s)
    assert link.until(0.99 * interval_s) == []
    assert link.until(2.01 * interval_s) == [SendBeat()] * 2


@BOTH
@pytest.mark.parametrize("chance", [0.0, 0.35, 1.0])
@pytest.mark.parametrize("wall_offset_s", [0.0, 1_795_000_000.1])
def test_clients_that_beat_rarely_beat_at_the_same_moments(
    play: type[LinkPlay], chance: float, wall_offset_s: float
) -> None:
    """The clients' own clocks differ, the wall's does not."""
    link = play(chance=chance, wall_offset_s=wall_offset_s)  # type: ignore[call-arg]
    link.start()
    link.open(interval_s=4.0)
    times = []
    while (due := link.machine.next_deadline(link.now)) <= 60.0:
        times += [due] * len(link.until(due))
    assert len(times) >= 60 // 4
    moment_s = 4.0 / MOMENTS_PER_INTERVAL
    for before, at in itertools.pairwise(times):
        assert (1 - 0.1) * 4.0 - moment_s < at - before <= 4.0
        num_moments = (at + wall_offset_s) / moment_s
        assert num_moments == pytest.approx(round(num_moments), rel=0, abs=1e-4)


def test_clients_that_beat_often_spread_their_beats() -> None:
    assert beat_together(10.01, 0.5, 0.5, 0.0) == 10.51


@BOTH
def test_what_people_wait_for_does_not_wait_for_the_next_beat(play: type[LinkPlay]) -> None:
    link = play()
    link.start()
    assert link(lambda machine: machine.beat_at_once(0.0)) == [], "there is no session yet"
    link.open()
    assert link(lambda machine: machine.beat_at_once(link.now)) == [SendBeat()]
    link.leave()
    assert link(lambda machine: machine.beat_at_once(link.now)) == [], "a beat would bring it back"


# -- leaving ---------------------------------------------------------------------------------------


@BOTH
def test_a_lighthouse_that_does_not_answer_holds_up_nobody_who_leaves(play: type[LinkPlay]) -> None:
    link = play().opened()
    assert len(link.leave()) == 1
    assert link.until(LEAVE_TIMEOUT_S - 0.01) == [], "no beat brings it back"
    assert link.until(LEAVE_TIMEOUT_S) == [Close(1), ConfirmLeft()]
    assert link.machine.state is LinkState.LEFT
    assert link.machine.next_deadline(link.now) == math.inf
    assert link.leave() == [ConfirmLeft()], "once more"


@BOTH
def test_who_leaves_is_gone_when_the_lighthouse_ends_the_stream(play: type[LinkPlay]) -> None:
    link = play().opened()
    link.leave()
    assert link.close(1, None) == [Close(1), ConfirmLeft()]
    assert link.until(60.0) == []


# -- a list of lighthouses (F2, F3, L21) -----------------------------------------------------------


def at_second(play: type[LinkPlay]) -> LinkPlay:
    """Connected with the second of two, because the first one refuses."""
    link = play("a", "b")
    link.start()
    link.close(1)
    assert link.until(MIN_PAUSE_S) == [Connect(2, "b")]
    opened = calm(link.open(2))
    if not link.looks_at_once:
        opened = calm(link.until(link.now + LOOK_BACK_S))
    assert opened == [Probe(2, ("a",))], "whoever is not at the first one looks back"
    assert link.probed(number=2) == []
    return link


@BOTH
def test_it_looks_back_every_second_one_look_at_a_time(play: type[LinkPlay]) -> None:
    link = at_second(play)
    looked_at = link.now
    assert calm(link.until(looked_at + LOOK_BACK_S)) == [Probe(2, ("a",))]
    assert calm(link.until(5.0)) == [], "one look at a time"
    assert link.probed(number=2) == []
    assert calm(link.until(5.0)) == [Probe(2, ("a",))], "a slow look makes none rarer"
    link.probed("a", number=2)
    assert calm(link.until(5.5)) == [], "it has found one"


@BOTH
def test_at_the_first_lighthouse_nobody_looks_back(play: type[LinkPlay]) -> None:
    link = play("a", "b").opened()
    assert calm(link.until(60.0)) == []


@BOTH
def test_of_several_earlier_ones_the_first_is_better(play: type[LinkPlay]) -> None:
    link = play("a", "b", "c")
    link.start()
    for number in (1, 2):
        link.close(number)
        link.until(link.now + MIN_PAUSE_S)
    opened = calm(link.open(3))
    if not link.looks_at_once:
        opened = calm(link.until(link.now + LOOK_BACK_S))
    assert opened == [Probe(3, ("a", "b"))]
    (found,) = (each for each in link.probed("b", "a", number=3) if each not in (SendBeat(),))
    assert "'a'" in repr(found) or "lighthouse a" in repr(found)


# -- the table of states ---------------------------------------------------------------------------


def test_every_state_has_a_row_and_is_reached() -> None:
    assert set(TRANSITIONS) == set(LinkState)
    reached = {state for row in TRANSITIONS.values() for state in row}
    assert reached == set(LinkState)


def test_a_state_that_must_not_follow_is_our_own_mistake() -> None:
    link = ManagerPlay().opened()
    with pytest.raises(AssertionError, match="cannot become"):
        link.machine._enter_state(LinkState.OPEN)


@BOTH
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (REFUSED, "refused"),
        (NotLeader(""), "does not lead"),
        (Unreachable("lighthouse", "a", "reset"), "reset"),
    ],
)
def test_a_loss_ends_in_another_attempt(
    play: type[LinkPlay], error: TorchFTError, why: str
) -> None:
    link = play().opened()
    link.close(1, error)
    assert why in link.log[-1]
    assert link.until(link.now + MAX_PAUSE_S)[0] == Connect(2, "a")
