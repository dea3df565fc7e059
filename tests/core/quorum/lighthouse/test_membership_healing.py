"""How long the others wait for a group that heals, and what is said when that was not enough."""

from __future__ import annotations

import pytest
from support.core.scenes import JOB, Scene, config, formed

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.jobs import ReportLeftHealing
from torchft_svc.core.quorum.types import QuorumConfig
from torchft_svc.errors import ConfigError

HEAL = config(heal_timeout_s=40.0)


def healing(settings: QuorumConfig = HEAL) -> Scene:
    """A scene in which b heals and a has finished its step at 100."""
    scene = formed("a:1", "b:1", step=7, settings=settings)
    scene.report("b:1", Phase.HEALING, 7)
    scene.ask("a:1", 8)
    assert scene.pop_orders() == []
    return scene


def left_healing(replica_id: str, for_s: float) -> ReportLeftHealing:
    return ReportLeftHealing(JOB, replica_id, for_s)


def test_who_heals_is_waited_for_longer() -> None:
    scene = healing()
    scene.until(139)
    assert scene.pop_orders() == []
    assert scene.why() == "waiting for b:1: alive, but has not asked; b:1 heals since 39 s"
    scene.ask("b:1", 8)
    assert scene.pop_quorums() == [(1, ["a:1", "b:1"])]


def test_who_heals_for_too_long_is_left_out_and_named_once() -> None:
    scene = healing()
    scene.before(140)
    assert scene.pop_orders() == []
    scene.until(140)
    left, quorum = scene.pop_orders()
    assert [each.replica_id for each in quorum.quorum.participants] == ["a:1"]
    assert left == left_healing("b:1", 40.0)
    scene.ask("b:1", 7)  # it begins again, and is as slow
    scene.ask("a:1", 9)
    scene.report("b:1", Phase.HEALING, 7)
    scene.ask("a:1", 10)
    scene.pop_orders()
    scene.until(180)
    (quorum,) = scene.pop_orders()
    assert [each.replica_id for each in quorum.quorum.participants] == ["a:1"]


def test_without_the_setting_it_is_the_join_timeout() -> None:
    scene = healing(config())
    scene.until(110)
    left, quorum = scene.pop_orders()
    assert [each.replica_id for each in quorum.quorum.participants] == ["a:1"]
    assert left == left_healing("b:1", 10.0)


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.VOTING, Phase.IDLE])
def test_who_has_healed_gets_the_join_timeout_to_end_its_step(phase: Phase) -> None:
    scene = healing()
    scene.until(125)
    scene.report("b:1", phase, 8)
    scene.report("b:1", Phase.IDLE, 8)
    scene.before(135)
    assert scene.pop_orders() == []
    scene.until(135)
    assert scene.pop_quorums() == [(2, ["a:1"])], "it is late, and does not heal"


def test_a_heal_that_ends_early_leaves_the_join_timeout_as_it_is() -> None:
    scene = healing()
    scene.until(102)
    scene.report("b:1", Phase.TRAINING, 7)
    scene.before(112)
    assert scene.pop_orders() == []
    scene.until(112)
    assert scene.pop_quorums() == [(2, ["a:1"])]


def test_the_heal_timeout_is_the_limit_for_what_follows_too() -> None:
    scene = healing()
    scene.until(138)
    scene.report("b:1", Phase.TRAINING, 8)
    scene.until(140)
    assert scene.pop_quorums() == [(2, ["a:1"])]


def test_a_heal_that_is_interrupted_for_a_moment_is_one_heal() -> None:
    """The healing group reports it when it waits for the others' gradients."""
    scene = healing()
    scene.until(105)
    scene.report("b:1", Phase.QUORUM, 7)
    scene.until(106)
    scene.report("b:1", Phase.HEALING, 7)
    scene.until(120)
    assert "b:1 heals since 20 s" in scene.why()
    scene.until(140)
    assert scene.pop_quorums() == [(2, ["a:1"])]


@pytest.mark.parametrize("end", ["dies", "leaves"])
def test_one_that_is_gone_is_not_waited_for(end: str) -> None:
    scene = healing(config(heal_timeout_s=40.0, heartbeat_timeout_s=20.0))
    if end == "leaves":
        scene.leave("b:1")
    else:
        scene.until(119)
        scene.beat("a:1")
        scene.until(120)
    assert scene.pop_quorums() == [(2, ["a:1"])]


def test_one_whose_session_broke_is_waited_for_again_when_it_reports_that_it_heals() -> None:
    scene = formed("a:1", "b:1", "c:1", step=7, settings=HEAL)
    scene.report("b:1", Phase.HEALING, 7)
    scene.report("c:1", Phase.HEALING, 7)
    scene.ask("a:1", 8)
    scene.until(120)
    scene.leave("b:1")
    scene.beat("b:1")
    assert scene.why() == "waiting for c:1: alive, but has not asked; c:1 heals since 20 s"
    scene.report("b:1", Phase.HEALING, 7)
    scene.ask("c:1", 8)
    assert scene.why() == "waiting for b:1: alive, but has not asked; b:1 heals since 0 s"
    scene.until(140)
    assert scene.pop_quorums() == [(2, ["a:1", "c:1"])]
    scene.report("b:1", Phase.HEALING, 7)
    scene.ask_all("a:1", "c:1", step=9)
    assert scene.pop_quorums() == [(2, ["a:1", "c:1"])], "its time was up"


def test_one_that_heals_once_more_is_waited_for_again() -> None:
    scene = formed("a:1", "b:1", "c:1", step=7, settings=HEAL)
    scene.report("b:1", Phase.HEALING, 7)
    scene.report("b:1", Phase.QUORUM, 7)  # its heal has failed
    scene.report("c:1", Phase.HEALING, 7)
    scene.ask("a:1", 8)
    scene.until(115)
    assert scene.why().startswith("waiting for c:1: ")
    scene.report("b:1", Phase.HEALING, 7)
    scene.ask("c:1", 8)
    assert scene.why().startswith("waiting for b:1: ")
    scene.until(140)
    assert scene.pop_quorums() == [(2, ["a:1", "c:1"])], "the heal timeout is over"


def test_others_are_waited_for_as_before() -> None:
    scene = formed("a:1", "b:1", "c:1", step=7, settings=HEAL)
    scene.report("b:1", Phase.HEALING, 7)
    scene.report("c:1", Phase.TRAINING, 7)
    scene.ask("a:1", 8)
    scene.until(110)
    assert scene.why() == "waiting for b:1: alive, but has not asked; b:1 heals since 10 s"
    scene.ask("b:1", 8)
    assert scene.pop_quorums() == [(2, ["a:1", "b:1"])]


def test_a_heal_timeout_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"heal_timeout_s.*must not be below join_timeout_s=10"):
        config(heal_timeout_s=9.0)
    with pytest.raises(ConfigError, match="heal_timeout_s"):
        config(heal_timeout_s=float("inf"))
