"""Tests what only an agent's link does: states, worlds, and refusals (rules L19 to L21)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from support.core.links import NODE, REFUSED, SETTINGS, STATE, AgentPlay, without_beats

from torchft_svc.core.launch.agent_link import STEADY_S, DeliverNews, LinkTrouble
from torchft_svc.core.launch.world import (
    AgentHello,
    AgentLeave,
    AgentStatus,
    AgentWelcome,
    RunClosed,
    RunMove,
    RunWaiting,
    WarmUp,
    World,
    WorldPaused,
)
from torchft_svc.core.limits import MAX_REASON_LENGTH
from torchft_svc.core.link import (
    LEAVE_TIMEOUT_S,
    WELCOME_TIMEOUT_S,
    Close,
    ConfirmLeft,
    Connect,
    LinkState,
    Probe,
    SendBeat,
)
from torchft_svc.core.route import LOOK_BACK_S, MAX_PAUSE_S, MIN_PAUSE_S
from torchft_svc.errors import NotLeader, RequestRefused, TorchFTError, Unauthorized

WORLDS = [World(round_, (NODE,), 2000) for round_ in range(4)]
WORKING = [
    dataclasses.replace(STATE, status=AgentStatus.WORKING, round=round_) for round_ in range(4)
]
REFUSAL = RequestRefused("it has other settings")
DISTRUST = Unauthorized("lighthouse at a: nobody is known here")


def trouble(error: TorchFTError, *, is_final: bool) -> DeliverNews:
    return DeliverNews(LinkTrouble(error, is_final))


# -- states and worlds (L19) -----------------------------------------------------------------------


def test_l19_the_first_state_connects_and_later_ones_are_sent_at_once() -> None:
    link = AgentPlay()
    assert link.until(60.0) == []
    assert link.report() == [Connect(1, "a")]
    assert link.machine.hello() == AgentHello(NODE, SETTINGS, STATE)
    assert link.report(WORKING[1]) == [], "it is sent with the hello, or after the welcome"
    assert link.open() == [SendBeat(), DeliverNews(AgentWelcome(0.0))]
    assert link.report(WORKING[2]) == [SendBeat()]
    assert link.machine.agent_state == WORKING[2]


def test_l19_a_hello_has_the_world_of_the_state_not_a_later_one() -> None:
    """The agent may not have acted yet on the world that came last."""
    link = AgentPlay().opened()
    for number in (1, 2):
        assert link.receive(WORLDS[number]) == [DeliverNews(WORLDS[number])]
    link.report(WORKING[1])
    assert link.machine.hello() == AgentHello(NODE, SETTINGS, WORKING[1], WORLDS[1])
    link.report(WORKING[2])
    assert link.machine.hello().world == WORLDS[2]
    link.receive(WORLDS[3])
    link.report(WORKING[1])
    assert link.machine.hello().world is None, "the last two are kept"


@pytest.mark.parametrize("news", [RunWaiting("it goes on"), WarmUp(WORLDS[2])])
def test_l13_a_node_that_was_left_out_shows_the_next_lighthouse_no_world(news: Any) -> None:
    """A world would pass for the whole run if it comes before those that have gone on."""
    link = AgentPlay().opened()
    link.receive(WORLDS[1])
    link.report(WORKING[1])
    link.receive(WorldPaused("too few"))
    assert link.machine.hello().world == WORLDS[1]
    assert link.receive(news) == [DeliverNews(news)]
    assert link.machine.hello() == AgentHello(NODE, SETTINGS, WORKING[1])
    link.receive(WORLDS[3])
    link.report(WORKING[3])
    assert link.machine.hello().world == WORLDS[3]


def test_news_over_a_connection_that_is_over_are_ignored() -> None:
    link = AgentPlay().opened()
    link.close()
    assert link.receive(WORLDS[1]) == []
    assert link.receive(RunClosed("over", failed=False)) == []
    assert link.receive(RunMove("a")) == []
    assert link.machine.hello().world is None


def test_a_run_that_is_closed_ends_the_link() -> None:
    link = AgentPlay().opened()
    closed = RunClosed("over", failed=False)
    assert link.receive(closed) == [DeliverNews(closed), Close(1), ConfirmLeft()]
    assert link.machine.state is LinkState.LEFT
    assert link.report(WORKING[1]) == []
    assert link.leave() == [ConfirmLeft()], "nobody waits, as nobody listens"
    assert link.machine.next_deadline(link.now) == math.inf


# -- refusals (L20) --------------------------------------------------------------------------------


def test_l20_a_refused_node_does_not_try_again() -> None:
    link = AgentPlay("a", "b")
    link.start()
    assert link.close(1, REFUSAL) == [Close(1), trouble(REFUSAL, is_final=True), ConfirmLeft()]
    assert link.until(60.0) == []


@pytest.mark.parametrize(("open_s", "is_final"), [(STEADY_S, True), (STEADY_S + 0.1, False)])
def test_l20_an_agent_that_was_refused_after_a_while_comes_back(
    open_s: float, is_final: bool
) -> None:
    """The agent was frozen, for example, and has not read what it was sent."""
    link = AgentPlay().opened()
    link.until(open_s)
    assert trouble(REFUSAL, is_final=is_final) in link.close(1, REFUSAL)
    again = link.until(link.now + MAX_PAUSE_S)
    assert (Connect(2, "a") in again) is not is_final


def test_l20_a_steady_connection_of_before_excuses_no_refusal() -> None:
    link = AgentPlay().opened()
    link.until(2 * STEADY_S)
    link.close(1)
    link.until(link.now + MIN_PAUSE_S)
    assert trouble(REFUSAL, is_final=True) in link.close(2, REFUSAL)


def test_l20_distrust_is_final_when_all_of_the_list_have_been_asked() -> None:
    link = AgentPlay("a", "b")
    link.start()
    assert link.close(1, DISTRUST) == [Close(1), trouble(DISTRUST, is_final=False)]
    link.until(MAX_PAUSE_S)
    assert trouble(DISTRUST, is_final=True) in link.close(2, DISTRUST)


def test_l20_an_agent_that_was_connected_before_goes_on_when_it_is_not_trusted_any_more() -> None:
    link = AgentPlay().opened()
    link.close()
    for number in range(2, 6):
        assert link.until(link.now + MAX_PAUSE_S) == [Connect(number, "a")]
        assert link.close(number, DISTRUST) == [Close(number), trouble(DISTRUST, is_final=False)]


@pytest.mark.parametrize("error", [REFUSED, NotLeader("")])
def test_any_other_trouble_is_reported_and_tried_again(error: TorchFTError) -> None:
    link = AgentPlay()
    link.start()
    for number in range(1, 5):
        assert link.close(number, error) == [Close(number), trouble(error, is_final=False)]
        link.until(link.now + MAX_PAUSE_S)


# -- to an earlier lighthouse, together (L21) ------------------------------------------------------


def at_second() -> AgentPlay:
    link = AgentPlay("a", "b")
    link.start()
    link.close(1)
    link.until(MIN_PAUSE_S)
    assert without_beats(link.open(2)) == [DeliverNews(AgentWelcome(0.0))]
    return link


def test_l21_whoever_finds_an_earlier_lighthouse_informs_the_present_one() -> None:
    link = at_second()
    assert without_beats(link.until(link.now + LOOK_BACK_S / 2)) == [], "the others arrive"
    assert without_beats(link.until(link.now + LOOK_BACK_S / 2)) == [Probe(2, ("a",))]
    assert link.probed("a", number=2) == [RunMove("a")]
    assert without_beats(link.until(60.0)) == [], "it stays until it is sent there"
    assert link.machine.state is LinkState.OPEN


def test_l21_an_agent_that_is_sent_to_an_earlier_lighthouse_goes_there_at_once() -> None:
    link = at_second()
    link.receive(WORLDS[1], 2)
    link.report(WORKING[1])
    assert link.receive(RunMove("a"), 2) == [Close(2), Connect(3, "a")]
    assert link.machine.hello().world == WORLDS[1], "it arrives in its world (L13)"
    assert link.close(2, None) == []
    assert without_beats(link.open(3)) == [DeliverNews(AgentWelcome(0.0))]
    assert link.log[-1] == "lighthouse a accepts this run again, returning to it"


def test_l21_an_address_that_is_not_in_the_list_means_the_first_one() -> None:
    link = at_second()
    assert link.receive(RunMove("evil"), 2) == [Close(2), Connect(3, "a")]


# -- leaving ---------------------------------------------------------------------------------------


LEAVE = AgentLeave("it has enough", closes=True)


def test_a_last_message_waits_for_a_lighthouse() -> None:
    """The run may be over for all with it."""
    link = AgentPlay()
    link.start()
    assert link.leave(closes=True) == []
    assert link.open() == [LEAVE, DeliverNews(AgentWelcome(0.0))], "and no state before it"
    assert link.close(1, None) == [Close(1), ConfirmLeft()]


def test_a_last_message_whose_connection_broke_is_sent_again() -> None:
    link = AgentPlay().opened()
    assert link.leave(closes=True) == [LEAVE]
    assert link.close() == [Close(1), trouble(REFUSED, is_final=False)]
    assert link.until(MIN_PAUSE_S) == [Connect(2, "a")]
    assert LEAVE in link.open(2)


def test_a_node_that_leaves_while_the_run_moves_leaves_at_the_earlier_lighthouse() -> None:
    link = at_second()
    link.leave(closes=True)
    assert link.receive(RunMove("a"), 2) == [Close(2), Connect(3, "a")]
    assert LEAVE in link.open(3)


@pytest.mark.parametrize("is_opening", [True, False])
def test_a_last_message_waits_for_no_longer_than_that(is_opening: bool) -> None:
    assert LEAVE_TIMEOUT_S < WELCOME_TIMEOUT_S
    link = AgentPlay()
    link.start()
    if not is_opening:
        link.close()
    link.leave()
    left = [each for each in link.until(LEAVE_TIMEOUT_S) if not isinstance(each, Connect)]
    assert left[-1] == ConfirmLeft()
    assert link.machine.state is LinkState.LEFT


def test_an_agent_that_has_never_begun_leaves_at_once() -> None:
    assert AgentPlay().leave() == [ConfirmLeft()]


def test_a_reason_that_a_lighthouse_would_refuse_is_made_fit() -> None:
    link = AgentPlay().opened()
    leave = AgentLeave("worker 0 failed:\n" + MAX_REASON_LENGTH * "x")
    (sent,) = link(lambda machine: machine.leave(leave, link.now))
    sent.check()
    assert sent.reason.startswith("worker 0 failed:?xxx")
