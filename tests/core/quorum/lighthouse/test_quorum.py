"""`decide` as a table: a view of one job in, a quorum or a reason out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from support.core.scenes import Scene, config, member
from support.core.views import job_view

from torchft_svc.core.quorum.lighthouse.membership import (
    ALL_BACK_S,
    EACH_BACK_S,
    GATHER_S,
    JobView,
    Waiter,
)
from torchft_svc.core.quorum.lighthouse.overview import name_some
from torchft_svc.core.quorum.lighthouse.quorum import Formed, Waiting, Why, absent_deadlines, decide
from torchft_svc.core.quorum.types import Member


def view(
    *asking: tuple[Member, float],
    silent: Iterable[str] = (),
    veterans: Iterable[str] = (),
    straggling: Iterable[str] = (),
    previous: Iterable[str] = (),
    committed_step: int = 0,
    loss_accepted: bool = False,
) -> JobView:
    """A job where ``asking`` wait, and ``silent`` live but have not asked."""
    waiting = {each.replica_id: Waiter(each, at) for each, at in asking}
    return job_view(
        waiting=waiting,
        living={*waiting, *silent},
        veterans=set(veterans),
        straggling=set(straggling),
        previous=set(previous),
        committed_step=committed_step,
        requested_min_replicas=max((each.min_replicas for each, _ in asking), default=0),
        loss_accepted=loss_accepted,
    )


A, B, C = member("a"), member("b"), member("c")
SHRINKING = member("a", shrink_only=True)
AHEAD = member("b", step=7)


def awaits(awaited: str, until: float | None = None) -> Waiting:
    """A wait for the groups with these letters."""
    return Waiting(Why.AWAITED, until, awaited=frozenset(awaited))


def too_few(num_asking: int, num_needed: int, num_kept_out: int = 0) -> Waiting:
    return Waiting(
        Why.TOO_FEW, num_asking=num_asking, num_needed=num_needed, num_kept_out=num_kept_out
    )


TABLE: dict[str, tuple[JobView, dict[str, Any], float, Formed | Waiting]] = {
    "nobody asks": (view(silent="ab"), {}, 0, Waiting(Why.NOBODY_ASKS)),
    "Q3: all who live ask": (view((B, 0), (A, 0)), {}, 0, Formed((A, B))),
    "Q2: fast path, with a newcomer who asks too": (
        view((A, 0), (B, 0), (C, 0), veterans="ab", previous="ab"),
        {},
        0,
        Formed((A, B, C)),
    ),
    "Q2: fast path, a silent newcomer is not waited for": (
        view((A, 0), (B, 0), silent="c", veterans="ab", previous="ab"),
        {},
        0,
        Formed((A, B)),
    ),
    "Q2: fast path does not lower min_replicas": (
        view((A, 0), veterans="a", previous="a"),
        {"min_replicas": 2},
        0,
        too_few(1, 2),
    ),
    "Q3: a living member of the previous quorum is waited for": (
        view((A, 3), silent="b", veterans="ab", previous="ab"),
        {},
        12,
        awaits("b", 13),
    ),
    "Q3: until join_timeout after the first request": (
        view((A, 3), silent="b", veterans="ab", previous="ab"),
        {},
        13,
        Formed((A,)),
    ),
    "Q3: the first request of a member counts, not a later one": (
        view((A, 3), (B, 6), silent="c", veterans="abc", previous="abc"),
        {},
        12,
        awaits("c", 13),
    ),
    "Q3: a newcomer's request does not count while a member lives": (
        view((C, 0), (A, 9), silent="b", veterans="ab", previous="ab"),
        {},
        12,
        awaits("b", 19),
    ),
    "Q3: a dead member of the previous quorum is not waited for": (
        view((A, 0), veterans="a", previous="ab"),
        {},
        0,
        Formed((A,)),
    ),
    "Q3: a newcomer may join when a dead member is replaced": (
        view((A, 0), (C, 0), veterans="a", previous="ab"),
        {},
        0,
        Formed((A, C)),
    ),
    "Q3: a cold start waits for startup_timeout": (
        view((A, 3), silent="b"),
        {},
        22,
        awaits("b", 23),
    ),
    "Q3: and not longer": (view((A, 3), silent="b"), {}, 23, Formed((A,))),
    "Q3: counted from the first request of anyone": (
        view((B, 5), (A, 3), silent="c"),
        {},
        22,
        awaits("c", 23),
    ),
    "Q3: known groups get join_timeout in a cold start": (
        view((A, 3), silent="b", veterans="b"),
        {},
        12,
        awaits("b", 13),
    ),
    "Q3: the earliest deadline comes first": (
        view((A, 3), silent="bc", veterans="b"),
        {},
        4,
        awaits("bc", 13),
    ),
    "Q3: the later deadline is still ahead": (
        view((A, 3), silent="bc", veterans="b"),
        {},
        13,
        awaits("c", 23),
    ),
    "Q3: no previous member lives, its newcomers are waited for": (
        view((A, 3), silent="b", previous="c"),
        {},
        13,
        awaits("b", 23),
    ),
    "Q3: not enough after the deadline": (
        view((A, 3), silent="b"),
        {"min_replicas": 2},
        23,
        too_few(1, 2),
    ),
    "Q3: min_replicas are enough": (view((A, 0), (B, 0)), {"min_replicas": 2}, 0, Formed((A, B))),
    "Q3: the largest min_replicas that the job reports counts": (
        view((member("a", min_replicas=2), 0), (member("b", min_replicas=3), 0)),
        {"min_replicas": 1},
        0,
        too_few(2, 3),
    ),
    "Q3: and it counts instead of the lighthouse's": (
        view((member("a", min_replicas=1), 0), (B, 0)),
        {"min_replicas": 3},
        0,
        Formed((member("a", min_replicas=1), B)),
    ),
    "Q4: a straggler is not waited for": (
        view((A, 3), silent="b", veterans="ab", straggling="b", previous="ab"),
        {},
        3,
        Formed((A,)),
    ),
    "Q4: a straggler that asks is in": (
        view((A, 3), (B, 3), veterans="ab", previous="a"),
        {},
        3,
        Formed((A, B)),
    ),
    "Q5: shrink_only keeps newcomers out": (
        view((SHRINKING, 0), (B, 0), (C, 0), veterans="ab", previous="ab"),
        {},
        0,
        Formed((SHRINKING, B)),
    ),
    "Q5: min_replicas holds": (
        view((SHRINKING, 0), (B, 0), veterans="a", previous="a"),
        {"min_replicas": 2},
        0,
        too_few(1, 2, 1),
    ),
    "Q5: a newcomer can not keep others out": (
        view((SHRINKING, 0), (B, 0), (C, 0), veterans="b", previous="b"),
        {},
        0,
        Formed((SHRINKING, B, C)),
    ),
    "Q5: nobody to shrink to at a cold start": (
        view((SHRINKING, 0), (B, 0)),
        {},
        0,
        Formed((SHRINKING, B)),
    ),
    "Q7: the committed step is kept": (
        view((A, 0), (AHEAD, 0), committed_step=7),
        {},
        0,
        Formed((A, AHEAD)),
    ),
    "Q7: hold": (
        view((AHEAD, 0), committed_step=8),
        {"on_step_regression": "hold"},
        0,
        Waiting(Why.WOULD_GO_BACK, committed_step=8, max_step=7),
    ),
    "Q7: an operator accepted the loss": (
        view((AHEAD, 0), committed_step=8, loss_accepted=True),
        {"on_step_regression": "hold"},
        0,
        Formed((AHEAD,), lost_from=8),
    ),
    "Q7: warn": (
        view((AHEAD, 0), veterans="b", committed_step=8),
        {"on_step_regression": "warn"},
        0,
        Formed((AHEAD,), lost_from=8),
    ),
    "Q7: auto warns when none is left": (
        view((AHEAD, 0), committed_step=8),
        {},
        0,
        Formed((AHEAD,), lost_from=8),
    ),
    "Q9: newcomers do not hold up a running job": (
        view((A, 0), silent="bcde", veterans="a", previous="ax"),
        {},
        0,
        Formed((A,)),
    ),
    "Q10: newcomers do not start a second history": (
        view((C, 0), silent="ab", veterans="ab", previous="ab"),
        {},
        1e9,
        awaits("ab"),
    ),
    "Q10: not even beside straggling members": (
        view((C, 0), silent="ab", veterans="ab", straggling="a", previous="ab"),
        {},
        1e9,
        awaits("b"),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_decisions(case: str) -> None:
    seen, settings, now, decision = TABLE[case]
    assert decide(seen, config(**settings), now) == decision


def test_auto_holds_while_a_group_of_the_job_lives() -> None:
    """Rule Q7."""
    seen = view((AHEAD, 0), veterans="b", committed_step=8)
    held = Waiting(Why.WOULD_GO_BACK, committed_step=8, max_step=7)
    assert decide(seen, config(), 0) == held


def test_without_startup_timeout_newcomers_get_the_join_timeout() -> None:
    """Rule Q3."""
    seen = view((A, 3), silent="b")
    settings = config(startup_timeout_s=None)
    assert decide(seen, settings, 12) == awaits("b", 13)
    assert decide(seen, settings, 13) == Formed((A,))


def test_everyone_who_is_waited_for_has_a_deadline() -> None:
    """Rules Q3, Q4 and Q10, as a whole map."""
    cold = view((A, 1), (B, 2), silent="cde", veterans="d", straggling="e")
    assert absent_deadlines(cold, config()) == {"c": 21.0, "d": 11.0}
    running = view((A, 1), silent="bcde", veterans="abd", straggling="d", previous="abd")
    assert absent_deadlines(running, config()) == {"b": 11.0}
    not_asked = view((C, 1), silent="ab", veterans="ab", previous="ab")
    assert absent_deadlines(not_asked, config()) == {"a": math.inf, "b": math.inf}


def test_members_are_sorted_by_replica_id_as_text() -> None:
    names = ["b:1", "a:2", "a10", "a:10", "B", "a9"]
    decision = decide(view(*[(member(name), 0) for name in names]), config(), 0)
    assert isinstance(decision, Formed)
    ids = [each.replica_id for each in decision.members]
    assert ids == ["B", "a10", "a9", "a:10", "a:2", "b:1"]


def test_a_reason_names_four_groups_and_counts_the_others() -> None:
    assert name_some("dcba") == "a, b, c, d"
    assert name_some("fedcba") == "a, b, c, d and 2 more"


def test_the_first_group_that_comes_does_not_go_on_alone() -> None:
    scene = Scene(config(min_replicas=1))
    scene.ask("a", step=7, last_num_groups=3)
    scene.ask("b", step=7, last_num_groups=3)
    assert scene.pop_quorums() == []
    assert "waiting for 1 more groups" in scene.jobs.why("job", scene.now)
    scene.ask("c", step=7, last_num_groups=3)
    assert [names for _, names in scene.pop_quorums()] == [["a", "b", "c"]]


def test_who_does_not_come_is_waited_for_once() -> None:
    scene = Scene(config(min_replicas=1))
    scene.ask("a", step=7, last_num_groups=2)
    scene.until(GATHER_S - 0.001)
    assert scene.pop_quorums() == []
    scene.until(GATHER_S)
    assert [names for _, names in scene.pop_quorums()] == [["a"]]
    scene.ask("a", step=8, last_num_groups=1)
    assert [names for _, names in scene.pop_quorums()] == [["a"]]


def test_who_has_come_back_and_is_gone_again_is_not_waited_for() -> None:
    scene = Scene(config(min_replicas=1))
    for each in "ab":
        scene.opened(each, 5, 7)
    scene.until(GATHER_S)
    scene.leave("b")
    scene.ask("a", step=7, last_num_groups=2)
    assert [names for _, names in scene.pop_quorums()] == [["a"]]


def test_where_there_is_no_other_lighthouse_all_are_back_soon_after_its_start() -> None:
    all_back_at = ALL_BACK_S + 2 * EACH_BACK_S
    scene = Scene(config(min_replicas=1))
    scene.until(0.5)
    scene.ask("a", step=7, last_num_groups=2, sole_lighthouse=True)
    scene.until(all_back_at - 0.001)
    assert scene.pop_quorums() == []
    scene.until(all_back_at)
    assert [names for _, names in scene.pop_quorums()] == [["a"]]


@pytest.mark.parametrize(("asked_at", "last"), [(0.5, False), (1.0, True)])
def test_who_may_be_elsewhere_or_comes_late_is_waited_for_from_the_first_request(
    asked_at: float, last: bool
) -> None:
    scene = Scene(config(min_replicas=1))
    scene.until(asked_at)
    scene.ask("a", step=7, last_num_groups=3, sole_lighthouse=True)
    scene.ask("b", step=7, last_num_groups=3, sole_lighthouse=last)
    scene.until(asked_at + GATHER_S - 0.001)
    assert scene.pop_quorums() == []
    scene.until(asked_at + GATHER_S)
    assert [names for _, names in scene.pop_quorums()] == [["a", "b"]]


def test_it_takes_no_longer_than_the_join_timeout() -> None:
    scene = Scene(config(min_replicas=1, join_timeout_s=1))
    scene.ask("a", last_num_groups=2)
    scene.until(1)
    assert [names for _, names in scene.pop_quorums()] == [["a"]]


@pytest.mark.parametrize("last_num_groups", [0, 1])
def test_newcomers_and_who_was_alone_wait_for_nobody(last_num_groups: int) -> None:
    scene = Scene(config(min_replicas=1))
    scene.ask("a", last_num_groups=last_num_groups)
    assert [names for _, names in scene.pop_quorums()] == [["a"]]


def test_a_lighthouse_that_knows_the_job_waits_for_nobody_else() -> None:
    scene = Scene(config(min_replicas=1))
    scene.ask("a")
    scene.pop_quorums()
    scene.ask("a", step=1, last_num_groups=9)
    assert [names for _, names in scene.pop_quorums()] == [["a"]]
