"""A decision to wait is made again as soon as it does not hold any more, and not before."""

from __future__ import annotations

import pytest
from support.core.scenes import config, formed

from torchft_svc.core.outlook import Outlook
from torchft_svc.core.step import Phase


def test_who_asks_again_may_have_asked_before_all_others() -> None:
    """The others' wait, counted from b's request, is over when a is back: a began it at 100."""
    scene = formed("a:1", "b:1", "c:1", step=7)
    asked = scene.ask("a:1", 8)
    scene.until(108)
    scene.withdraw(asked)
    scene.until(109)
    scene.ask("b:1", 8)
    scene.until(112)
    assert scene.take_quorums() == []
    scene.ask("a:1", 8)
    assert scene.take_quorums() == [(2, ["a:1", "b:1"])]


@pytest.mark.parametrize("end", ["dies", "asks", "has healed"])
def test_who_gives_up_while_others_heal_is_late_when_they_do_not_any_more(end: str) -> None:
    """Its time was up at 110, theirs would be at 140."""
    scene = formed("a:1", "b:1", "c:1", "d:1", step=7, settings=config(heal_timeout_s=40.0))
    scene.does("b:1", Phase.HEALING, 7)
    scene.ask("a:1", 8)
    asked = scene.ask("c:1", 8)
    scene.ask("d:1", 8)
    scene.until(115)
    scene.withdraw(asked)
    assert scene.why() == "waiting for b:1: alive, but has not asked; b:1 heals since 15 s"
    if end == "dies":
        scene.leave("b:1")
        assert scene.take_quorums() == [(2, ["a:1", "d:1"])]
    else:
        if end == "has healed":
            scene.does("b:1", Phase.TRAINING, 7)
        scene.ask("b:1", 8)
        assert scene.take_quorums() == [(2, ["a:1", "b:1", "d:1"])]


def test_who_gives_up_early_while_others_heal_has_no_more_time_than_ever() -> None:
    scene = formed("a:1", "b:1", "c:1", "d:1", step=7, settings=config(heal_timeout_s=40.0))
    scene.does("b:1", Phase.HEALING, 7)
    scene.does("d:1", Phase.HEALING, 7)
    scene.ask("a:1", 8)
    asked = scene.ask("c:1", 8)
    scene.until(105)
    scene.does("d:1", Phase.TRAINING, 7)  # it has until 115 now
    scene.ask("d:1", 8)
    scene.withdraw(asked)
    scene.ask("b:1", 8)
    scene.before(110)
    assert scene.take_quorums() == []
    scene.until(110)
    assert scene.take_quorums() == [(2, ["a:1", "b:1", "d:1"])]


def test_an_arrival_does_not_end_the_wait() -> None:
    """So it costs the same for ten groups and ten thousand."""
    outlook = Outlook(join_timeout_s=10.0)
    assert not outlook.holds(100.0, num_awaited=2, num_absent=2)
    outlook.awaits(110.0, first_at=100.0)
    outlook.member_asked(101.0)
    outlook.member_withdrew(102.0)
    outlook.heal_is_over()
    outlook.crowd_changed()
    assert outlook.holds(109.0, num_awaited=1, num_absent=1)
    assert not outlook.holds(109.0, num_awaited=0, num_absent=1)
    assert not outlook.holds(110.0, num_awaited=1, num_absent=1)
