"""One name, several incarnations: who keeps the name, who waits, who is refused."""

from __future__ import annotations

import pytest
from support.core.scenes import Refused, answer, formed, loss, member

SILENT = "no sign of life for 100 s"


TAKEN = "the name of {!r} is taken: {!r} is alive; give every replica group a name of its own"


def test_an_incarnation_waits_until_the_one_before_is_dead() -> None:
    scene = formed("a:1", "b:1")
    scene.until(150)
    scene.beat("b:1")
    caller = scene.ask("a:2", step=1)
    assert scene.why() == "a:2 waits until a:1, which had its name before, is dead or has left"
    scene.before(200)
    scene.beat("b:1")
    assert scene.pop_orders() == []
    scene.ask("b:1", step=1)
    scene.until(200)
    assert scene.pop_orders() == [
        loss("a:1", SILENT),
        answer(2, member("a:2", 1), member("b:1", 1), callers=(caller, 4)),
    ]


def test_an_incarnation_goes_on_at_once_when_the_one_before_leaves() -> None:
    scene = formed("a:1")
    caller = scene.ask("a:2", step=1)
    scene.leave("a:1")
    assert scene.pop_orders() == [loss("a:1"), answer(2, member("a:2", 1), callers=(caller,))]


@pytest.mark.parametrize("sign", ["beat", "ask"])
def test_an_incarnation_is_refused_when_the_one_before_lives(sign: str) -> None:
    scene = formed("a:1")
    caller = scene.ask("a:2")
    if sign == "beat":
        scene.beat("a:1")
        assert scene.pop_orders() == [Refused(caller, "RequestRefused", TAKEN.format("a:2", "a:1"))]
    else:
        scene.ask("a:1")
        assert scene.pop_orders() == [
            Refused(caller, "RequestRefused", TAKEN.format("a:2", "a:1")),
            answer(1, member("a:1"), callers=(3,)),
        ]


def test_of_three_incarnations_the_eldest_that_lives_wins() -> None:
    scene = formed("a:1")
    second, third = scene.ask("a:2"), scene.ask("a:3")
    assert scene.why() == (
        "a:2 waits until a:1, which had its name before, is dead or has left; "
        "a:3 waits until a:1, a:2, which had its name before, is dead or has left"
    )
    scene.beat("a:2")
    assert scene.pop_orders() == [Refused(third, "RequestRefused", TAKEN.format("a:3", "a:2"))]
    third = scene.ask("a:3")
    scene.beat("a:1")
    assert scene.pop_orders() == [
        Refused(second, "RequestRefused", TAKEN.format("a:2", "a:1")),
        Refused(third, "RequestRefused", TAKEN.format("a:3", "a:1")),
    ]


def test_of_three_incarnations_the_last_waits_for_both() -> None:
    scene = formed("a:1")
    second, third = scene.ask("a:2"), scene.ask("a:3")
    scene.leave("a:2")
    sentence = "no quorum: 'a:2' is out: bye"
    assert scene.pop_orders() == [loss("a:2"), Refused(second, "QuorumFailed", sentence)]
    scene.leave("a:1")
    assert scene.pop_orders() == [loss("a:1"), answer(2, member("a:3"), callers=(third,))]


def test_a_held_request_can_be_repeated_and_withdrawn() -> None:
    scene = formed("a:1")
    first, second = scene.ask("a:2"), scene.ask("a:2")
    sentence = "no quorum: a newer request of 'a:2' has taken the place of this one"
    assert scene.pop_orders() == [Refused(first, "QuorumFailed", sentence)]
    scene.withdraw(first)
    scene.withdraw(second)
    scene.leave("a:1")
    assert scene.pop_orders() == [loss("a:1")]


def test_an_old_incarnation_that_wakes_up_is_the_intruder() -> None:
    scene = formed("a:1")
    scene.leave("a:1")
    scene.ask("a:2")
    scene.pop_orders()
    caller = scene.ask("a:1")
    scene.beat("a:2")
    assert scene.pop_orders() == [Refused(caller, "RequestRefused", TAKEN.format("a:1", "a:2"))]


def test_waiting_for_a_name_is_no_sign_of_life() -> None:
    """The successor fell silent at 150; it gets no second life when its name becomes free."""
    scene = formed("a:1")
    scene.until(150)
    scene.ask("a:2", step=1)
    scene.ask("b", step=1)
    scene.until(199)
    scene.beat("b")
    scene.until(200)
    assert scene.pop_quorums() == [(2, ["a:2", "b"])]
    scene.until(250)
    assert loss("a:2", SILENT) in scene.pop_orders()


@pytest.mark.parametrize("replica_id", ["a", ":1", "a:b:1"])
def test_names_without_an_incarnation_or_with_colons(replica_id: str) -> None:
    scene = formed(replica_id)
    scene.ask("a:1:2")
    scene.ask(replica_id)
    assert [names for _, names in scene.pop_quorums()] == [sorted(["a:1:2", replica_id])]
