"""Tests which hung groups are left out of their quorum, and which news they and others receive."""

from __future__ import annotations

from typing import Any

import pytest
from support.core.scenes import JOB, Scene, config, formed, loss

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.jobs import ReportEviction, ReportHang, ReportStraggler

EVICT = config(hang_timeout_s=5, on_hang="evict")


def training(*names: str, **changes: Any) -> Scene:
    """A scene in which these groups have begun step 7 at 100."""
    scene = formed(*names, step=7, settings=config(hang_timeout_s=5, on_hang="evict", **changes))
    for replica_id in names:
        scene.report(replica_id, Phase.TRAINING, 7)
    return scene


def hangs(replica_id: str, for_s: float = 5.0) -> ReportHang:
    return ReportHang(JOB, replica_id, Phase.TRAINING, 7, for_s, kill=False)


def left_out(replica_id: str, for_s: float = 5.0) -> ReportEviction:
    return ReportEviction(JOB, replica_id, f"it hangs: training in step 7 for {for_s:.1f} s")


def test_whom_others_wait_for_is_left_out() -> None:
    scene = training("a:1", "b:1")
    scene.report("b:1", Phase.QUORUM, 7)
    scene.until(105)
    assert scene.pop_orders() == [hangs("a:1"), left_out("a:1")]
    scene.report("a:1", Phase.TRAINING, 7, for_s=5)  # its beats go on
    scene.report("b:1", Phase.QUORUM, 7)
    scene.until(109)
    assert scene.pop_orders() == []
    scene.ask("b:1", 7)
    assert scene.pop_quorums() == [(2, ["b:1"])]


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.VOTING, Phase.IDLE, Phase.HEALING])
def test_nobody_is_left_out_whom_nobody_waits_for(phase: Phase) -> None:
    """All may stand still in the same place, some a moment longer."""
    scene = training("a:1", "b:1")
    scene.until(101)
    scene.report("b:1", phase, 7)
    scene.until(105)
    assert scene.pop_orders() == [hangs("a:1")]
    scene.until(120)
    scene.pop_orders()
    assert not scene.jobs.status(JOB, scene.now)[0].groups[0].left_out
    scene.report("b:1", Phase.QUORUM, 7)
    assert scene.pop_orders() == [left_out("a:1", 20.0)]


def test_a_group_that_does_not_report_waits_once_it_asks() -> None:
    scene = formed("a:1", "b:1", step=7, settings=EVICT)
    scene.report("a:1", Phase.TRAINING, 7)
    scene.beat("b:1")
    scene.jobs._jobs[JOB].hangs.forget_group("b:1")  # of the public release: nothing but heartbeats
    scene.until(107)
    assert scene.pop_orders() == [hangs("a:1")]
    scene.ask("b:1", 7)
    reported, quorum = scene.pop_orders()
    assert reported == left_out("a:1", 7.0)
    assert [each.replica_id for each in quorum.quorum.participants] == ["b:1"]


def test_those_who_have_asked_already_go_on_at_once() -> None:
    scene = training("a:1", "b:1", "c:1")
    scene.ask("b:1", 8)
    scene.ask("c:1", 8)
    assert "waiting for a:1" in scene.why()
    scene.until(105)
    assert scene.pop_quorums() == [(2, ["b:1", "c:1"])]


def test_one_who_comes_back_joins_and_heals() -> None:
    scene = training("a:1", "b:1")
    scene.ask("b:1", 8)
    scene.until(105)
    scene.pop_orders()
    scene.ask("a:1", 8)  # it had all gradients, and committed the step, too
    scene.ask("b:1", 9)
    (order,) = [each for each in scene.pop_orders() if hasattr(each, "quorum")]
    assert order.quorum.joining == {"a:1"}
    assert [each.replica_id for each in order.quorum.up_to_date] == ["b:1"]


def test_too_few_are_left_until_it_is_back() -> None:
    """The groups that were informed that it is out meet it under another id."""
    scene = training("a:1", "b:1", min_replicas=2)
    scene.ask("b:1", 8)
    scene.until(105)
    assert scene.pop_orders() == [hangs("a:1"), left_out("a:1")]
    assert "1 of at least 2 groups ask" in scene.why()
    scene.until(130)
    scene.ask("a:1", 8)
    assert scene.pop_quorums() == [(2, ["a:1", "b:1"])]


def test_newcomers_do_not_begin_while_only_who_hangs_is_left() -> None:
    scene = training("a:1", "b:1", on_step_regression="warn")
    scene.report("b:1", Phase.QUORUM, 7)
    scene.until(105)
    scene.pop_orders()
    scene.leave("b:1")
    scene.ask("c:1", 7)
    scene.until(160)
    assert scene.pop_orders() == [loss("b:1")]
    assert "waiting for a:1" in scene.why()
    scene.ask("a:1", 7)
    assert scene.pop_quorums() == [(2, ["a:1", "c:1"])]


def test_all_but_one_hang_and_the_last_one_dies() -> None:
    """One of those who are waited for again moves, and the other one does not hold it up."""
    scene = training("a:1", "b:1", "c:1")
    scene.report("c:1", Phase.QUORUM, 7)
    scene.until(105)
    assert scene.pop_orders()[2:] == [left_out("a:1"), left_out("b:1")]
    scene.leave("c:1")
    scene.pop_orders()
    scene.ask("a:1", 7)
    reported, quorum = scene.pop_orders()
    assert reported == left_out("b:1")
    assert [each.replica_id for each in quorum.quorum.participants] == ["a:1"]


@pytest.mark.parametrize("end", ["it dies", "it leaves", "its session breaks"])
def test_what_becomes_of_it(end: str) -> None:
    scene = training("a:1", "b:1", heartbeat_timeout_s=30.0)
    scene.until(102)
    scene.report("b:1", Phase.QUORUM, 7)
    scene.until(105)
    scene.pop_orders()
    if end == "it dies":
        scene.until(129)
        scene.beat("b:1")
        scene.until(130)
        assert scene.pop_orders() == [loss("a:1", "no sign of life for 30 s")]
    else:
        scene.leave("a:1")
        assert scene.pop_orders() == [loss("a:1")]
    if end == "its session breaks":
        scene.opened("a:1", 1, 7)
        scene.report("a:1", Phase.TRAINING, 7, for_s=5)
        assert scene.pop_orders() == [hangs("a:1"), left_out("a:1")]
    scene.ask("b:1", 7)
    assert scene.pop_quorums() == [(2, ["b:1"])]


def test_it_restarts_under_its_name() -> None:
    scene = training("a:1", "b:1")
    scene.report("b:1", Phase.QUORUM, 7)
    scene.until(105)
    scene.ask("a:2")
    scene.ask("b:1", 7)
    assert scene.pop_quorums() == [(2, ["b:1"])]
    scene.leave("a:1")  # whose process was ended for that
    scene.ask("b:1", 8)
    assert scene.pop_quorums() == [(3, ["a:2", "b:1"])]


def test_a_lighthouse_that_was_restarted_leaves_it_out_again() -> None:
    scene = Scene(EVICT, first_id=10)
    for replica_id in ("a:1", "b:1"):
        scene.opened(replica_id, 7, 3)
    scene.report("a:1", Phase.TRAINING, 3, for_s=8)
    assert len(scene.pop_orders()) == 1, "b:1 has not reported yet what it does"
    scene.report("b:1", Phase.QUORUM, 3)
    (reported,) = scene.pop_orders()
    assert (reported.replica_id, reported.quorum_id) == ("a:1", 7)
    scene.ask("b:1", 3, seen_quorum_id=7)
    assert scene.pop_quorums() == [(11, ["b:1"])]


def test_the_status_says_so() -> None:
    scene = training("a:1", "b:1")
    scene.ask("b:1", 8)
    scene.until(105)
    a, b = scene.jobs.status(JOB, scene.now)[0].groups
    assert (a.hung, a.left_out, a.in_quorum) == (True, True, False)
    assert (b.hung, b.left_out, b.in_quorum) == (False, False, True)
    scene.ask("a:1", 8)
    assert not scene.jobs.status(JOB, scene.now)[0].groups[0].left_out


@pytest.mark.parametrize("on_hang", ["report", "kill"])
def test_nobody_is_left_out_unless_that_is_wanted(on_hang: str) -> None:
    settings = config(hang_timeout_s=5, on_hang=on_hang)
    scene = formed("a:1", "b:1", step=7, settings=settings)
    scene.report("a:1", Phase.TRAINING, 7)
    scene.report("b:1", Phase.QUORUM, 7)
    scene.until(120)
    (reported,) = scene.pop_orders()
    assert reported == ReportHang(JOB, "a:1", Phase.TRAINING, 7, 5.0, kill=on_hang == "kill")


@pytest.mark.parametrize(
    ("phase", "is_reported"),
    [(Phase.TRAINING, True), (Phase.QUORUM, True), (Phase.IDLE, True), (Phase.HEALING, False)],
)
def test_q4_a_straggler_is_informed_that_the_others_go_on(phase: Phase, is_reported: bool) -> None:
    """A straggler may be in a collective with a frozen group, and in no quorum whose losses
    count."""
    scene = formed("a:1", "b:1", step=7, settings=config(join_timeout_s=3, heal_timeout_s=3))
    scene.report("b:1", phase, 7)
    scene.ask("a:1", 8)
    scene.until(103)
    reported = [order for order in scene.pop_orders() if isinstance(order, ReportStraggler)]
    assert reported == ([ReportStraggler(JOB, "b:1", 1, ("b:1",))] if is_reported else [])
    assert scene.jobs._jobs[JOB].members.quorum_left() == ["a:1"]
    scene.ask("a:1", 9)
    assert not any(isinstance(order, ReportStraggler) for order in scene.pop_orders()), "once"
