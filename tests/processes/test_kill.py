"""A worker is SIGKILLed: the survivors go on without it at once, and it heals when it is back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.bounds import check
from support.running import lighthouse_process

from tools.chaos.bounds import NEWS_S
from tools.chaos.fleet import Fleet

pytestmark = pytest.mark.processes


def test_survivors_commit_again_at_once(make_fleet: Callable[..., Fleet]) -> None:
    with lighthouse_process("--min-replicas=1") as lighthouse:
        fleet = make_fleet(lighthouse.address)
        workers = [fleet.start(group)[0] for group in range(3)]
        fleet.all_meet({0, 1, 2})
        for with_manager in (False, True):
            killed_at = fleet.kill(workers[2], with_manager=with_manager)
            again_at = fleet.await_commits({0, 1}, 30.0, since=killed_at, num_members=2)
            what = "a worker" + " and its manager" * with_manager
            check(f"{what} is killed", again_at - killed_at, NEWS_S)
            (workers[2],) = fleet.start(2)
            fleet.all_meet({0, 1, 2})
