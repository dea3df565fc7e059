"""A lighthouse that is new to a running job: it lets the job's groups gather before they go on."""

from __future__ import annotations

import pytest
from support.core.scenes import Scene, config

from torchft_svc.core.gathering import GATHER_S


def test_the_first_group_that_comes_does_not_go_on_alone() -> None:
    scene = Scene(config(min_replicas=1))
    scene.ask("a", step=7, last_num_groups=3)
    scene.ask("b", step=7, last_num_groups=3)
    assert scene.take_quorums() == []
    assert "waiting for 1 more groups" in scene.house.why("job", scene.now)
    scene.ask("c", step=7, last_num_groups=3)
    assert [names for _, names in scene.take_quorums()] == [["a", "b", "c"]]


def test_who_does_not_come_is_waited_for_once() -> None:
    scene = Scene(config(min_replicas=1))
    scene.ask("a", step=7, last_num_groups=2)
    scene.until(GATHER_S - 0.001)
    assert scene.take_quorums() == []
    scene.until(GATHER_S)
    assert [names for _, names in scene.take_quorums()] == [["a"]]
    scene.ask("a", step=8, last_num_groups=1)
    assert [names for _, names in scene.take_quorums()] == [["a"]]


def test_it_takes_no_longer_than_the_join_timeout() -> None:
    scene = Scene(config(min_replicas=1, join_timeout_s=1))
    scene.ask("a", last_num_groups=2)
    scene.until(1)
    assert [names for _, names in scene.take_quorums()] == [["a"]]


@pytest.mark.parametrize("last_num_groups", [0, 1])
def test_newcomers_and_who_was_alone_wait_for_nobody(last_num_groups: int) -> None:
    scene = Scene(config(min_replicas=1))
    scene.ask("a", last_num_groups=last_num_groups)
    assert [names for _, names in scene.take_quorums()] == [["a"]]


def test_a_lighthouse_that_knows_the_job_waits_for_nobody_else() -> None:
    scene = Scene(config(min_replicas=1))
    scene.ask("a")
    scene.take_quorums()
    scene.ask("a", step=1, last_num_groups=9)
    assert [names for _, names in scene.take_quorums()] == [["a"]]
