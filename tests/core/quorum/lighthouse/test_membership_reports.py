"""Tests what groups report of their last quorum to a lighthouse that does not know it."""

from __future__ import annotations

import pytest
from support.core.scenes import JOB, SECONDS, Scene, config, formed, loss

from torchft_svc.core.limits import MAX_INT64
from torchft_svc.core.quorum.types import LastQuorum
from torchft_svc.errors import RequestRefused


def reported(**settings: object) -> Scene:
    """A new lighthouse; a and b were in quorum 5 at step 7 and have sessions, nobody asks yet."""
    scene = Scene(config(**settings), first_id=100)
    scene.opened("a", 5, 7)
    scene.opened("b", 5, 7)
    return scene


@pytest.mark.parametrize("policy", ["auto", "hold", "warn"])
def test_a_newcomer_does_not_begin_while_those_who_report_are_in_a_long_step(policy: str) -> None:
    scene = reported(on_step_regression=policy)
    scene.opened("c")
    scene.ask("c", step=3)
    scene.beat("a", "b")
    scene.until(99)
    assert scene.pop_quorums() == []
    assert scene.why() == "waiting for a, b: alive, but has not asked"
    scene.ask("b", step=7)
    scene.ask("a", step=7)
    assert scene.pop_quorums() == [(101, ["a", "b", "c"])]


def test_nor_does_a_group_that_was_left_out_before() -> None:
    scene = reported()
    scene.opened("c", 4, 3)
    scene.ask("c", step=3)
    scene.until(50)
    assert scene.pop_quorums() == []
    scene.ask("a", step=8)
    scene.ask("b", step=8)
    assert scene.pop_quorums() == [(101, ["a", "b", "c"])]


def test_those_who_report_are_waited_for_as_members_of_the_last_quorum() -> None:
    """Newcomers that have not asked are not waited for, as in any running job."""
    scene = reported()
    scene.opened("c")
    scene.ask("a", step=7)
    scene.before(10)
    assert scene.pop_quorums() == []
    scene.until(10)
    assert scene.pop_quorums() == [(101, ["a"])]
    scene.ask("b", step=7)
    scene.ask("a", step=8)
    assert scene.pop_quorums() == [(102, ["a", "b"])]


def test_who_is_behind_what_was_reported_is_held_back_until_the_newer_state_comes() -> None:
    scene = reported()
    scene.leave("b")
    scene.ask("a", step=6)  # its step was discarded, and b, which had committed it, is dead
    assert scene.pop_orders() == [loss("b")]
    assert scene.why().startswith("the job has committed step 7, the groups that ask have at most")
    scene.ask("c", step=7)
    assert scene.pop_quorums() == [(101, ["a", "c"])]


def test_when_nobody_is_left_of_those_who_reported_the_loss_is_reported() -> None:
    scene = reported()
    scene.ask("c", step=3)
    scene.leave("a")
    assert scene.pop_orders() == [loss("a")]
    scene.leave("b")
    quorum_order = scene.pop_orders()[-1]
    assert (quorum_order.callers, quorum_order.lost_from) == ((1,), 7)


def test_a_group_that_was_in_a_later_quorum_knows_better() -> None:
    """An operator had accepted a loss: a later quorum may be at a lower step, and what was given up
    does not come back."""
    scene = reported()
    scene.opened("c", 6, 4)
    scene.ask("a", step=7)
    scene.until(5)
    assert scene.why() == "waiting for c: alive, but has not asked"
    scene.ask("b", step=3)
    scene.ask("c", step=5)
    (order,) = scene.pop_orders()
    assert {each.replica_id: each.step for each in order.quorum.participants} == {
        "a": 0,
        "b": 3,
        "c": 5,
    }
    assert scene.jobs.committed_step(JOB) == 5


def test_what_is_reported_to_a_lighthouse_with_a_quorum_of_the_job_is_old() -> None:
    scene = formed("a", step=3)
    scene.opened("b", 9, 8)
    scene.ask("a", step=3)
    assert scene.pop_quorums() == [(10, ["a"])]
    assert scene.jobs.committed_step(JOB) == 3


def test_but_who_was_in_any_quorum_of_the_job_may_have_the_newer_state() -> None:
    """Rule Q7 lets a job go back only if no group of it is left."""
    scene = formed("a", "b", step=7)
    scene.leave("a", "its session ended")
    scene.ask("b", step=7)
    scene.opened("a", 1, 7)
    scene.leave("b")
    scene.pop_orders()
    scene.ask("c", step=3)
    assert scene.why() == "waiting for a: alive, but has not asked"
    scene.until(120)
    assert scene.pop_quorums() == []
    assert "committed step 7" in scene.why()


def test_who_is_back_after_its_session_broke_is_informed_that_the_others_went_on() -> None:
    scene = formed("a", "b", step=7)
    jobs = scene.jobs
    assert not jobs.is_past(JOB, "a", LastQuorum(1, 7)), "it lives, whatever its connections do"
    scene.leave("a", "its session ended")
    assert jobs.is_past(JOB, "a", LastQuorum(1, 7))
    scene.ask("b", step=7)
    assert jobs.is_past(JOB, "a", LastQuorum(1, 7)), "they have another quorum already"
    assert not jobs.is_past(JOB, "a", LastQuorum(9, 7)), "that was elsewhere, and later"
    assert not jobs.is_past(JOB, "c", LastQuorum(0, 0))
    assert not jobs.is_past("another", "a", LastQuorum(1, 7)), "nobody has gone on"


def test_the_only_group_is_back_at_once_after_its_session_broke() -> None:
    """A newcomer that lives beside it is not waited for, as if the job had never ended."""
    scene = formed("a", step=7)
    scene.opened("b")
    scene.leave("b")
    scene.leave("a", "its session ended")
    scene.opened("b")
    scene.opened("a", 1, 7)
    scene.pop_orders()
    scene.ask("a", step=8)
    assert scene.pop_quorums() == [(2, ["a"])]


def test_an_acceptance_ends_when_a_later_step_is_reported() -> None:
    scene = Scene(config(on_step_regression="hold", min_replicas=2))
    scene.opened("a", 5, 7)
    scene.ask("a", step=6)
    scene.accept_loss()
    scene.opened("b", 6, 9)
    scene.ask("b", step=8)
    assert scene.pop_quorums() == []
    assert "committed step 9" in scene.why()


@pytest.mark.parametrize(("quorum_id", "max_step"), [(-1, 0), (1, -1), (MAX_INT64, 0)])
def test_what_cannot_be_is_refused(quorum_id: int, max_step: int) -> None:
    scene = Scene()
    with pytest.raises(RequestRefused):
        scene.jobs.opened(JOB, "a", LastQuorum(quorum_id, max_step), 0.0)
    assert scene.jobs.status("", 0.0) == []


@pytest.mark.parametrize("policy", ["auto", "hold"])
@pytest.mark.parametrize(("committed_in", "known"), [(0, 13), (4, 14), (5, 13)])
def test_a_question_reports_how_far_the_job_is_also_after_its_group_has_died(
    policy: str, committed_in: int, known: int
) -> None:
    """The group has no session, or a new manager, which knew of no quorum when its session began.

    The last step that it committed in its last quorum may be its own alone.
    """
    scene = Scene(config(on_step_regression=policy, min_replicas=2), first_id=100)
    scene.ask("a", step=14, seen_quorum_id=5, step_quorum_id=committed_in, has_history=True)
    scene.opened("b")
    scene.opened("c")
    scene.leave("a")
    scene.ask_all("b", "c")
    if policy == "hold":
        assert scene.why().startswith(f"the job has committed step {known}, ")
    else:
        assert scene.pop_orders()[-1].lost_from == known


def test_a_question_of_a_group_that_is_behind_takes_back_nothing() -> None:
    """The group was in a later quorum, at another lighthouse, and had not healed there."""
    scene = formed("a", step=7, settings=config(on_step_regression="hold"))
    scene.leave("a")
    scene.pop_orders()
    scene.ask("b", step=0, seen_quorum_id=9, has_history=True)
    assert scene.pop_orders() == []
    assert scene.why().startswith("the job has committed step 7, ")


def test_who_has_asked_does_not_go_first() -> None:
    """Unlike sessions, questions come one after the other: a newer state may be there already."""
    scene = Scene(first_id=100)
    scene.opened("b")
    scene.ask("a", step=1, seen_quorum_id=5, has_history=True)
    scene.ask("b", step=1, seen_quorum_id=6, has_history=True)
    assert scene.pop_quorums() == [(101, ["a", "b"])]


def begun_anew() -> Scene:
    """A newcomer was the first to ask a restarted lighthouse, and trains alone."""
    scene = Scene(first_id=100)
    scene.ask("c")
    scene.ask("c", step=1)
    assert scene.pop_quorums() == [(101, ["c"]), (101, ["c"])]
    return scene


def test_members_that_come_back_after_a_newcomer_has_begun_anew_are_believed() -> None:
    scene = begun_anew()
    scene.opened("a", 5, 836)
    scene.ask("a", step=837, seen_quorum_id=5, has_history=True, last_num_groups=2)
    scene.ask("c", step=2)
    (order,) = scene.pop_orders()
    assert [each.replica_id for each in order.quorum.up_to_date] == ["a"]
    assert order.quorum.max_step == 837
    scene.ask("b", step=836, seen_quorum_id=5, has_history=True, last_num_groups=2)
    scene.ask("a", step=838, seen_quorum_id=102, has_history=True, last_num_groups=2)
    scene.ask("c", step=838, seen_quorum_id=102, has_history=True, last_num_groups=2)
    assert scene.pop_quorums() == [(103, ["a", "b", "c"])]


@pytest.mark.parametrize("late_s", [0.0, 0.1])
def test_who_comes_back_later_than_the_heartbeat_timeout_heals(late_s: float) -> None:
    scene = begun_anew()
    scene.beat("c")
    timeout_s = SECONDS.heartbeat_timeout_s
    while scene.now < timeout_s - 1:
        scene.until(scene.now + 1)
        scene.beat("c")
    scene.until(timeout_s - 0.1 + late_s)
    scene.ask("a", step=837, seen_quorum_id=5, has_history=True, last_num_groups=2)
    scene.ask("c", step=2)
    (order,) = scene.pop_orders()
    assert order.quorum.max_step == (2 if late_s else 837)


@pytest.mark.parametrize("seen_quorum_id", [0, 101, 102])
def test_only_groups_of_an_earlier_quorum_are_back(seen_quorum_id: int) -> None:
    scene = begun_anew()
    scene.ask("a", step=837, seen_quorum_id=seen_quorum_id, has_history=seen_quorum_id > 0)
    scene.ask("c", step=2)
    (order,) = scene.pop_orders()
    assert order.quorum.max_step == 2


def test_who_began_together_with_a_group_of_the_job_has_not_begun_anew() -> None:
    scene = Scene(first_id=100)
    scene.ask("a", step=3, seen_quorum_id=5, has_history=True)
    assert scene.pop_quorums() == [(101, ["a"])]
    scene.ask("b", step=837, seen_quorum_id=4, has_history=True)
    scene.ask("a", step=4, seen_quorum_id=101, has_history=True)
    (order,) = scene.pop_orders()
    assert order.quorum.max_step == 4
