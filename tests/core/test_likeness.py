"""All groups of a job are alike: who has another size, or layout, is refused, with both named."""

from __future__ import annotations

import pytest
from support.core.scenes import Scene, config, formed

from torchft_svc.core.likeness import group_layout
from torchft_svc.core.types import MAX_LAYOUT_LENGTH
from torchft_svc.errors import RequestRefused

REASON = (
    "'c:1' has a group world size of 2, 'a:1' of 1: all groups of a job need the same; start this "
    "one with as many workers, or as another job"
)


def test_another_size_than_that_of_the_quorum_is_refused() -> None:
    scene = formed("a:1", "b:1")
    with pytest.raises(RequestRefused) as refused:
        scene.ask("c:1", world_size=2)
    assert str(refused.value) == REASON
    scene.ask_all("a:1", "b:1")
    assert scene.take_quorums() == [(1, ["a:1", "b:1"])]


def test_another_size_than_that_of_one_who_waits_is_refused() -> None:
    scene = Scene(config(min_replicas=2))
    scene.ask("a:1")
    with pytest.raises(RequestRefused, match="'c:1' has a group world size of 2, 'a:1' of 1"):
        scene.ask("c:1", world_size=2)
    scene.ask("b:1")
    scene.ask("a:1")


def test_the_dead_do_not_count() -> None:
    scene = formed("a:1", "b:1")
    scene.leave("a:1")
    scene.leave("b:1")
    scene.take()
    scene.ask("c:1", world_size=2)
    assert scene.take_quorums() == [(2, ["c:1"])]
    with pytest.raises(RequestRefused, match="'a:2' has a group world size of 1, 'c:1' of 2"):
        scene.ask("a:2")


def test_a_group_may_start_anew_with_another_size() -> None:
    """It is the only one; who had its name before is about to be dead."""
    scene = formed("a:1")
    scene.ask("a:2", world_size=2)
    scene.leave("a:1")
    assert scene.take_quorums() == [(2, ["a:2"])]


@pytest.mark.parametrize("sizes", [(0, 2), (2, 0)])
def test_who_does_not_tell_a_size_is_not_asked_for_it(sizes: tuple[int, int]) -> None:
    scene = Scene(config(min_replicas=2))
    scene.ask("a:1", world_size=sizes[0])
    scene.ask("b:1", world_size=sizes[1])
    assert [ids for _, ids in scene.take_quorums()] == [["a:1", "b:1"]]


def test_jobs_have_sizes_of_their_own() -> None:
    scene = formed("a:1")
    scene.ask("a:1", job="another", world_size=2)
    assert scene.take_quorums() == [(1, ["a:1"])]


SMALL, BIG = "2 parameters, digest 1", "4 parameters, digest 2"


def asks(scene: Scene, layout: str, *replica_ids: str, step: int = 0) -> None:
    for replica_id in replica_ids:
        scene.ask(replica_id, step, layout=layout)


def test_a_newcomer_that_sums_something_else_is_refused_with_both_sides_named() -> None:
    scene = Scene(config(min_replicas=2))
    asks(scene, SMALL, "a:1", "b:1")
    assert scene.take_quorums() == [(1, ["a:1", "b:1"])]
    with pytest.raises(RequestRefused) as refused:
        asks(scene, BIG, "c:1")
    assert str(refused.value) == (
        "'c:1' differs from 'a:1': all groups of a job need the same model, in the "
        "same memory formats, wrapped in the same way, and the same settings; start this group "
        f"like the others, or as another job. 'c:1': {BIG}. 'a:1': {SMALL}"
    )
    asks(scene, SMALL, "a:1", "b:1", step=1)
    assert scene.take_quorums() == [(1, ["a:1", "b:1"])]


def test_of_two_newcomers_that_differ_the_second_is_refused() -> None:
    scene = Scene(config(min_replicas=2))
    asks(scene, SMALL, "a:1")
    with pytest.raises(RequestRefused, match="'b:1' differs from 'a:1'"):
        asks(scene, BIG, "b:1")


@pytest.mark.parametrize("layouts", [("", BIG), (BIG, "")])
def test_who_tells_nothing_of_it_is_not_compared(layouts: tuple[str, str]) -> None:
    scene = Scene(config(min_replicas=2))
    asks(scene, layouts[0], "a:1")
    asks(scene, layouts[1], "b:1")
    assert scene.take_quorums() == [(1, ["a:1", "b:1"])]


def test_a_program_may_change_what_all_groups_sum() -> None:
    """They do so in the same step, and ask one after the other."""
    scene = Scene(config(min_replicas=2))
    asks(scene, SMALL, "a:1", "b:1")
    asks(scene, BIG, "a:1", "b:1", step=1)
    assert scene.take_quorums() == [(1, ["a:1", "b:1"])] * 2
    asks(scene, BIG, "a:1", step=2)
    with pytest.raises(RequestRefused, match="'b:1' differs from 'a:1'"):
        asks(scene, SMALL, "b:1", step=2)


def test_a_newcomer_that_waits_does_not_outlast_such_a_change() -> None:
    """Those that train must not be refused because of it."""
    scene = Scene(config(min_replicas=2))
    asks(scene, SMALL, "a:1", "b:1")
    scene.take()
    caller = scene.ask("c:1", layout=SMALL)
    asks(scene, BIG, "a:1", step=1)
    (refused,) = scene.take()
    assert (refused.caller, refused.error) == (caller, "RequestRefused")
    assert "'c:1' differs from 'a:1'" in refused.reason
    asks(scene, BIG, "b:1", step=1)
    assert scene.take_quorums() == [(1, ["a:1", "b:1"])]


@pytest.mark.parametrize(
    ("layouts", "told"),
    [
        (["x"], "x"),
        (["x", "x"], "x"),
        (["x", ""], ""),
        (["x", "y"], "x; on all 2 workers 9ab9de25768ac172"),
    ],
)
def test_the_workers_of_a_group_tell_one_layout(layouts: list[str], told: str) -> None:
    assert group_layout(layouts) == told


def test_a_layout_that_is_cut_still_differs_where_one_worker_s_does() -> None:
    long = ["x" * MAX_LAYOUT_LENGTH]
    assert len(group_layout([*long, "y"])) == MAX_LAYOUT_LENGTH
    assert group_layout([*long, "y"]) != group_layout([*long, "z"])
