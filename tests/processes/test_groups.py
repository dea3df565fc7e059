"""A group of several workers loses one of them: the others hear of it at once, the group leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.bounds import check
from support.running import lighthouse_process

from chaos.bounds import NEWS_S
from chaos.crew import Crew
from demo.events import Discarded, Exited

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("victim", [0, 1], ids=["the first", "another"])
def test_a_rank_that_dies_is_an_error_for_its_group_and_no_loss_for_others(
    make_crew: Callable[..., Crew], victim: int
) -> None:
    with lighthouse_process("--min-replicas=1") as lighthouse:
        crew = make_crew(lighthouse.address, num_workers=2)
        groups = [crew.start(group) for group in range(2)]
        crew.all_meet({0, 1})
        left = groups[1][1 - victim]
        killed_at = crew.kill(groups[1][victim])
        again_at = crew.await_commits({0}, 30.0, since=killed_at, num_members=1)
        check("a rank is killed: the other group commits", again_at - killed_at, NEWS_S)
        told = crew.await_event(
            (Discarded, Exited),
            30.0,
            since=killed_at,
            wanted=lambda event: event.group == 1 and event.worker == left.options.worker,
        )
        check("a rank is killed: its fellow hears of it", told.at - killed_at, NEWS_S)
        crew.kill(left)
        crew.start(1)
        crew.all_meet({0, 1})
