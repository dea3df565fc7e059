"""What groups tell of their last quorum to a lighthouse that is new to their job, or forgot it."""

from __future__ import annotations

import pytest
from support.core.scenes import JOB, Scene, config, formed, loss

from torchft_svc.core.types import MAX_INT64, LastQuorum
from torchft_svc.errors import RequestRefused


def told(**settings: object) -> Scene:
    """A new lighthouse; a and b were in quorum 5 at step 7 and have sessions, nobody asks yet."""
    scene = Scene(config(**settings), first_id=100)
    scene.opened("a", 5, 7)
    scene.opened("b", 5, 7)
    return scene


@pytest.mark.parametrize("policy", ["auto", "hold", "warn"])
def test_a_newcomer_does_not_begin_while_those_who_tell_are_in_a_long_step(policy: str) -> None:
    scene = told(on_step_regression=policy)
    scene.opened("c")
    scene.ask("c", step=3)
    scene.beat("a", "b")
    scene.until(99)
    assert scene.take_quorums() == []
    assert scene.why() == "waiting for a, b: alive, but has not asked"
    scene.ask("b", step=7)
    scene.ask("a", step=7)
    assert scene.take_quorums() == [(101, ["a", "b", "c"])]


def test_nor_does_a_group_that_was_left_out_before() -> None:
    scene = told()
    scene.opened("c", 4, 3)
    scene.ask("c", step=3)
    scene.until(50)
    assert scene.take_quorums() == []
    scene.ask("a", step=8)
    scene.ask("b", step=8)
    assert scene.take_quorums() == [(101, ["a", "b", "c"])]


def test_those_who_tell_are_waited_for_as_members_of_the_last_quorum() -> None:
    """And newcomers that have not asked are not, as in any running job."""
    scene = told()
    scene.opened("c")
    scene.ask("a", step=7)
    scene.before(10)
    assert scene.take_quorums() == []
    scene.until(10)
    assert scene.take_quorums() == [(101, ["a"])]
    scene.ask("b", step=7)
    scene.ask("a", step=8)
    assert scene.take_quorums() == [(102, ["a", "b"])]


def test_who_is_behind_what_was_told_is_held_back_until_the_newer_state_comes() -> None:
    scene = told()
    scene.leave("b")
    scene.ask("a", step=6)  # its step was discarded, and b, which had committed it, is dead
    assert scene.take() == [loss("b")]
    assert scene.why().startswith("the job has committed step 7, the groups that ask have at most")
    scene.ask("c", step=7)
    assert scene.take_quorums() == [(101, ["a", "c"])]


def test_when_nobody_is_left_of_those_who_told_the_loss_is_told() -> None:
    scene = told()
    scene.ask("c", step=3)
    scene.leave("a")
    assert scene.take() == [loss("a")]
    scene.leave("b")
    quorum_order = scene.take()[-1]
    assert (quorum_order.callers, quorum_order.lost_from) == ((1,), 7)


def test_a_group_that_was_in_a_later_quorum_knows_better() -> None:
    """An operator had accepted a loss: a later quorum may be at a lower step, and what was given up
    does not come back."""
    scene = told()
    scene.opened("c", 6, 4)
    scene.ask("a", step=7)
    scene.until(5)
    assert scene.why() == "waiting for c: alive, but has not asked"
    scene.ask("b", step=3)
    scene.ask("c", step=5)
    (order,) = scene.take()
    assert {each.replica_id: each.step for each in order.quorum.participants} == {
        "a": 0,
        "b": 3,
        "c": 5,
    }
    assert scene.house.committed_step(JOB) == 5


def test_what_is_told_to_a_lighthouse_with_a_quorum_of_the_job_is_old() -> None:
    scene = formed("a", step=3)
    scene.opened("b", 9, 8)
    scene.ask("a", step=3)
    assert scene.take_quorums() == [(10, ["a"])]
    assert scene.house.committed_step(JOB) == 3


def test_but_who_was_in_any_quorum_of_the_job_may_have_the_newer_state() -> None:
    """Rule 7 lets a job go back only if no group of it is left."""
    scene = formed("a", "b", step=7)
    scene.leave("a", "its session ended")
    scene.ask("b", step=7)
    scene.opened("a", 1, 7)
    scene.leave("b")
    scene.take()
    scene.ask("c", step=3)
    assert scene.why() == "waiting for a: alive, but has not asked"
    scene.until(120)
    assert scene.take_quorums() == []
    assert "committed step 7" in scene.why()


def test_who_is_back_after_its_session_broke_is_told_that_the_others_went_on() -> None:
    scene = formed("a", "b", step=7)
    house = scene.house
    assert not house.is_past(JOB, "a", LastQuorum(1, 7)), "it lives, whatever its connections do"
    scene.leave("a", "its session ended")
    assert house.is_past(JOB, "a", LastQuorum(1, 7))
    scene.ask("b", step=7)
    assert house.is_past(JOB, "a", LastQuorum(1, 7)), "they have another quorum already"
    assert not house.is_past(JOB, "a", LastQuorum(9, 7)), "that was elsewhere, and later"
    assert not house.is_past(JOB, "c", LastQuorum(0, 0))
    assert not house.is_past("another", "a", LastQuorum(1, 7)), "nobody has gone on"


def test_the_only_group_is_back_at_once_after_its_session_broke() -> None:
    """A newcomer that lives beside it is not waited for, as if the job had never ended."""
    scene = formed("a", step=7)
    scene.opened("b")
    scene.leave("b")
    scene.leave("a", "its session ended")
    scene.opened("b")
    scene.opened("a", 1, 7)
    scene.take()
    scene.ask("a", step=8)
    assert scene.take_quorums() == [(2, ["a"])]


def test_an_acceptance_ends_when_a_later_step_is_told() -> None:
    scene = Scene(config(on_step_regression="hold", min_replicas=2))
    scene.opened("a", 5, 7)
    scene.ask("a", step=6)
    scene.accept_loss()
    scene.opened("b", 6, 9)
    scene.ask("b", step=8)
    assert scene.take_quorums() == []
    assert "committed step 9" in scene.why()


@pytest.mark.parametrize(("quorum_id", "max_step"), [(-1, 0), (1, -1), (MAX_INT64, 0)])
def test_what_cannot_be_is_refused(quorum_id: int, max_step: int) -> None:
    scene = Scene()
    with pytest.raises(RequestRefused):
        scene.house.opened(JOB, "a", LastQuorum(quorum_id, max_step), 0.0)
    assert scene.house.status("", 0.0) == []
