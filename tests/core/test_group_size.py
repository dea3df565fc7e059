"""All groups of a job have as many workers: who has another number is refused, with both named."""

from __future__ import annotations

import pytest

from torchft_svc.errors import RequestRefused

from .scenes import Scene, config, formed

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
