"""A group that waits to join is announced to those that train, once."""

from __future__ import annotations

from support.core.scenes import JOB, formed

from torchft_svc.core.announcements import MAX_ANNOUNCED, MAX_ANNOUNCEMENTS


def test_a_newcomer_is_announced_once() -> None:
    scene = formed("a", "b")
    assert scene.take_newcomers() == []
    caller = scene.ask("c")
    assert scene.take_newcomers() == ["c"]
    scene.withdraw(caller)
    scene.ask("c")
    scene.ask("a", step=1)
    assert scene.take_newcomers() == []
    assert scene.house.quorum_left(JOB) in (["a", "b"], ["b", "a"])


def test_a_newcomer_that_joins_at_once_is_not_announced() -> None:
    scene = formed("a")
    scene.leave("a")
    scene.beat("b")
    scene = formed("a", "b")
    scene.ask_all("a", "b", step=1)
    assert scene.take_newcomers() == []


def test_who_is_kept_out_is_announced_to_the_next_quorum_too() -> None:
    scene = formed("a", "b")
    scene.ask("c")
    scene.ask("a", step=1, shrink_only=True)
    scene.ask("b", step=1)
    assert scene.take_quorums() == [(1, ["a", "b"])]
    assert scene.take_newcomers() == ["c", "c"]
    scene.ask_all("a", "b", step=2)
    assert scene.take_quorums() == [(2, ["a", "b", "c"])]
    assert scene.take_newcomers() == []


def test_a_group_that_waits_for_its_name_is_announced_when_it_gets_it() -> None:
    scene = formed("a:1", "b:1")
    scene.ask("b:2")
    assert scene.take_newcomers() == []
    scene.leave("b:1")
    assert scene.take_newcomers() == ["b:2"]


def test_a_crowd_is_not_announced_one_by_one() -> None:
    scene = formed("a")
    for number in range(MAX_ANNOUNCED + 20):
        scene.ask(f"b{number}")
    assert len(scene.take_newcomers()) == MAX_ANNOUNCED


def test_the_more_are_to_be_told_the_fewer_are_announced() -> None:
    scene = formed(*(f"a{number:03}" for number in range(MAX_ANNOUNCED + 100)))
    for number in range(MAX_ANNOUNCED):
        scene.ask(f"b{number}")
    assert len(scene.take_newcomers()) == MAX_ANNOUNCEMENTS // (MAX_ANNOUNCED + 100)


def test_a_first_quorum_has_nobody_to_tell() -> None:
    scene = formed("a")
    scene.leave("a")
    scene.ask("b", job="other")
    assert scene.take_newcomers() == []
