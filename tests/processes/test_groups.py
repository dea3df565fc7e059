"""A group of several workers loses one: the others are informed at once, and the group leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.bounds import check
from support.running import eventually, lighthouse_process

from tools.chaos.bounds import NEWS_S
from tools.chaos.fleet import Fleet
from tools.demo.events import Committed, Discarded, Exited

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("victim", [0, 1], ids=["the first", "another"])
def test_a_rank_that_dies_is_an_error_for_its_group_and_no_loss_for_others(
    make_fleet: Callable[..., Fleet], victim: int
) -> None:
    with lighthouse_process("--min-replicas=1") as lighthouse:
        fleet = make_fleet(lighthouse.address, num_workers=2)
        groups = [fleet.start(group) for group in range(2)]
        fleet.all_meet({0, 1})
        left = groups[1][1 - victim]
        killed_at = fleet.kill(groups[1][victim])
        again_at = fleet.await_commits({0}, 30.0, since=killed_at, num_members=1)
        check("a rank is killed: the other group commits", again_at - killed_at, NEWS_S)
        loss = fleet.await_event(
            (Discarded, Exited),
            30.0,
            since=killed_at,
            wanted=lambda event: event.group == 1 and event.worker == left.options.worker,
        )
        check("a rank is killed: its peer is informed", loss.at - killed_at, NEWS_S)
        fleet.kill(left)
        fleet.start(1)
        fleet.all_meet({0, 1})


def test_the_death_of_a_manager_ends_no_worker_of_its_group(
    make_fleet: Callable[..., Fleet],
) -> None:
    """The vote that is under way finds the next manager, and all workers get one decision."""
    with lighthouse_process("--min-replicas=1") as lighthouse:
        fleet = make_fleet(lighthouse.address, num_workers=2)
        groups = [fleet.start(group) for group in range(2)]
        fleet.all_meet({0, 1})
        leader = groups[1][0]
        for _ in range(3):
            killed = leader.manager_pid()
            leader.kill_manager()
            eventually(lambda killed=killed: leader.manager_pid() not in (None, killed))
            fleet.all_meet({0, 1})
        assert not any(fleet.of(group, Exited) for group in range(2))
        first, second = (
            {
                (each.quorum_id, each.step, each.worker): each.digest
                for each in fleet.of(group, Committed)
            }
            for group in range(2)
        )
        shared = first.keys() & second.keys()
        assert {worker for _, _, worker in shared} == {0, 1}
        assert all(first[key] == second[key] for key in shared), fleet.summary()
