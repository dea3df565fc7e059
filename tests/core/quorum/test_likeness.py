"""All groups of a job are alike: who has another size, or layout, is refused, with both named."""

from __future__ import annotations

import pytest
from support.core.scenes import Scene, config, formed

from torchft_svc.core.quorum.layout import describe_layout, group_layout
from torchft_svc.core.quorum.types import MAX_LAYOUT_LENGTH
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
    assert scene.pop_quorums() == [(1, ["a:1", "b:1"])]


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
    scene.pop_orders()
    scene.ask("c:1", world_size=2)
    assert scene.pop_quorums() == [(2, ["c:1"])]
    with pytest.raises(RequestRefused, match="'a:2' has a group world size of 1, 'c:1' of 2"):
        scene.ask("a:2")


def test_a_group_may_start_anew_with_another_size() -> None:
    """The group is the only one; who had its name before is about to be dead."""
    scene = formed("a:1")
    scene.ask("a:2", world_size=2)
    scene.leave("a:1")
    assert scene.pop_quorums() == [(2, ["a:2"])]


@pytest.mark.parametrize("sizes", [(0, 2), (2, 0)])
def test_who_does_not_report_a_size_is_not_asked_for_it(sizes: tuple[int, int]) -> None:
    scene = Scene(config(min_replicas=2))
    scene.ask("a:1", world_size=sizes[0])
    scene.ask("b:1", world_size=sizes[1])
    assert [ids for _, ids in scene.pop_quorums()] == [["a:1", "b:1"]]


def test_jobs_have_sizes_of_their_own() -> None:
    scene = formed("a:1")
    scene.ask("a:1", job="another", world_size=2)
    assert scene.pop_quorums() == [(1, ["a:1"])]


SMALL, BIG = "2 parameters, digest 1", "4 parameters, digest 2"


def asks(scene: Scene, layout: str, *replica_ids: str, step: int = 0) -> None:
    for replica_id in replica_ids:
        scene.ask(replica_id, step, layout=layout)


def test_a_newcomer_that_sums_something_else_is_refused_with_both_sides_named() -> None:
    scene = Scene(config(min_replicas=2))
    asks(scene, SMALL, "a:1", "b:1")
    assert scene.pop_quorums() == [(1, ["a:1", "b:1"])]
    with pytest.raises(RequestRefused) as refused:
        asks(scene, BIG, "c:1")
    assert str(refused.value) == (
        "'c:1' differs from 'a:1': all groups of a job need the same model, with the same names in "
        "the same order, in the same memory formats, wrapped in the same way, and the same "
        "settings; start this group like the others, or as another job. "
        f"'c:1': {BIG}. 'a:1': {SMALL}"
    )
    asks(scene, SMALL, "a:1", "b:1", step=1)
    assert scene.pop_quorums() == [(1, ["a:1", "b:1"])]


def test_of_two_newcomers_that_differ_the_second_is_refused() -> None:
    scene = Scene(config(min_replicas=2))
    asks(scene, SMALL, "a:1")
    with pytest.raises(RequestRefused, match="'b:1' differs from 'a:1'"):
        asks(scene, BIG, "b:1")


@pytest.mark.parametrize("layouts", [("", BIG), (BIG, "")])
def test_who_reports_nothing_of_it_is_not_compared(layouts: tuple[str, str]) -> None:
    scene = Scene(config(min_replicas=2))
    asks(scene, layouts[0], "a:1")
    asks(scene, layouts[1], "b:1")
    assert scene.pop_quorums() == [(1, ["a:1", "b:1"])]


def test_a_program_may_change_what_all_groups_sum() -> None:
    """All groups change it in the same step, and ask one after the other."""
    scene = Scene(config(min_replicas=2))
    asks(scene, SMALL, "a:1", "b:1")
    asks(scene, BIG, "a:1", "b:1", step=1)
    assert scene.pop_quorums() == [(1, ["a:1", "b:1"])] * 2
    asks(scene, BIG, "a:1", step=2)
    with pytest.raises(RequestRefused, match="'b:1' differs from 'a:1'"):
        asks(scene, SMALL, "b:1", step=2)


def test_a_newcomer_that_waits_does_not_outlast_such_a_change() -> None:
    """The groups that train must not be refused because of the change."""
    scene = Scene(config(min_replicas=2))
    asks(scene, SMALL, "a:1", "b:1")
    scene.pop_orders()
    caller = scene.ask("c:1", layout=SMALL)
    asks(scene, BIG, "a:1", step=1)
    (refused,) = scene.pop_orders()
    assert (refused.caller, refused.error) == (caller, "GroupDiffers")
    assert "'c:1' differs from 'a:1'" in refused.reason
    asks(scene, BIG, "b:1", step=1)
    assert scene.pop_quorums() == [(1, ["a:1", "b:1"])]


@pytest.mark.parametrize(
    ("layouts", "reported"),
    [
        (["x"], "x"),
        (["x", "x"], "x"),
        (["x", ""], ""),
        (["x", "y"], "x; on all 2 workers 9ab9de25768ac172"),
    ],
)
def test_the_workers_of_a_group_report_one_layout(layouts: list[str], reported: str) -> None:
    assert group_layout(layouts) == reported


def test_a_layout_that_is_cut_still_differs_where_one_worker_s_does() -> None:
    long = ["x" * MAX_LAYOUT_LENGTH]
    assert len(group_layout([*long, "y"])) <= MAX_LAYOUT_LENGTH
    assert group_layout([*long, "y"]) != group_layout([*long, "z"])


NAMES = [f"layers.{i}.{part}.{kind}" for i in range(40) for part in "qkv" for kind in ("w", "b")]


def refusal(theirs: str, mine: str) -> str:
    """The reason for which a group with the layout ``mine`` cannot join."""
    scene = Scene(config(min_replicas=2))
    scene.ask("a:1", layout=theirs)
    with pytest.raises(RequestRefused) as refused:
        scene.ask("c:1", layout=mine)
    return str(refused.value)


def test_the_first_difference_of_two_large_models_is_named() -> None:
    theirs = describe_layout(["digest 1"], "settings", NAMES)
    mine = describe_layout(["digest 2"], "settings", [*NAMES[:200], "extra", *NAMES[200:]])
    assert max(len(theirs), len(mine)) <= MAX_LAYOUT_LENGTH
    assert (
        "The first difference is parameter 200: extra in 'c:1', layers.33.k.w in 'a:1'. "
        "'c:1': digest 2; settings. 'a:1': digest 1; settings"
    ) in refusal(theirs, mine)
    shorter = describe_layout(["digest 3"], "settings", NAMES[:-1])
    assert "parameter 239: missing in 'c:1', layers.39.v.b in 'a:1'" in refusal(theirs, shorter)


def test_groups_whose_names_are_packed_differently_are_alike() -> None:
    """Another zlib may pack the same names into other bytes."""
    one = describe_layout(["digest 1"], "settings", NAMES)
    scene = Scene(config(min_replicas=2))
    scene.ask("a:1", layout=one)
    scene.ask("b:1", layout=one + "0")
    scene.ask("c:1", layout="digest 1; settings")
    assert [ids for _, ids in scene.pop_quorums()] == [["a:1", "b:1"]]
    assert group_layout([one, one + "0"]) == one


@pytest.mark.parametrize("names", ["", "x", "0" * 400, "\u00e9"])
def test_names_that_cannot_be_unpacked_explain_nothing(names: str) -> None:
    theirs = describe_layout(["digest 1"], "settings", NAMES)
    reason = refusal(theirs, f"digest 2; settings; names {names}")
    assert "first difference" not in reason
    assert reason.endswith("'c:1': digest 2; settings. 'a:1': digest 1; settings")


def test_names_that_unpack_to_far_too_much_are_not_unpacked() -> None:
    theirs = describe_layout(["digest 1"], "settings", NAMES)
    mine = describe_layout(["digest 2"], "settings", ["x" * 500_000])
    assert "; names " in mine
    assert "first difference" not in refusal(theirs, mine)


def test_a_layout_of_many_wrappers_differs_by_all_of_them() -> None:
    """The layout is cut where it is too long, also in front of the settings."""
    many = [f"{i} parameters with {i} elements of float32, digest 0123456789" for i in range(40)]
    layouts = {
        describe_layout([*many, last], settings, ["name"])
        for last in "xy"
        for settings in ("this", "that")
    }
    assert len(layouts) == 4
    assert max(map(len, layouts)) <= MAX_LAYOUT_LENGTH


def test_the_layout_of_a_group_keeps_the_names_of_its_first_worker() -> None:
    first, second = (describe_layout([f"digest {i}"], "settings", NAMES[:5]) for i in range(2))
    theirs = describe_layout(["digest 2"], "settings", NAMES[1:5])
    reason = refusal(theirs, group_layout([first, second]))
    assert "parameter 0: layers.0.q.w in 'c:1', layers.0.q.b in 'a:1'" in reason
    assert "digest 0; settings; on all 2 workers " in reason
