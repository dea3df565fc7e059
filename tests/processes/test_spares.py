"""A participant dies while a spare lives: the spare takes its place in the next quorum."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from support.bounds import check
from support.running import lighthouse_process

from tools.chaos.bounds import NEWS_S
from tools.chaos.fleet import Fleet
from tools.demo.events import Committed, Discarded

pytestmark = pytest.mark.processes
START_S = 60.0


def test_the_number_of_participants_never_drops(make_fleet: Callable[..., Fleet]) -> None:
    with lighthouse_process("--min-replicas=2") as lighthouse:
        fleet = make_fleet(
            lighthouse.address,
            manager={"world_size_mode": "FIXED_WITH_SPARES", "min_replica_size": 2},
        )
        workers = [fleet.start(group)[0] for group in range(3)]
        fleet.await_commits({0, 1, 2}, START_S, since=time.monotonic(), num_members=3)
        # Whoever came first took part; from now on the order of the names decides.
        fleet.await_event(
            Committed, START_S, wanted=lambda event: event.group == 2 and not event.participating
        )
        killed_at = fleet.kill(workers[0])
        again_at = fleet.await_commits({1, 2}, 30.0, since=killed_at, num_members=2)
        check("a participant is killed, a spare takes over", again_at - killed_at, NEWS_S)
        fleet.start(0)
        fleet.await_commits({0, 1, 2}, START_S, since=again_at, num_members=3)
    for group in (1, 2):
        # The step that was under way, and one more if only one of them had its sums: the other
        # heals then. No quorum without a spare in the place of the dead group comes between.
        lost = [
            event for event in fleet.of(group, Discarded, since=killed_at) if event.at < again_at
        ]
        assert len(lost) <= 2, lost
    after = [event for group in (1, 2) for event in fleet.of(group, Committed, since=killed_at)]
    assert {event.num_participants for event in after} == {2}
    (first, *_) = [event for event in fleet.of(2, Committed) if event.at >= again_at]
    assert first.participating
    # Equal at every step that both have committed, the spare's time as a spare included.
    digests = [{e.step: e.digest for e in fleet.of(group, Committed)} for group in (1, 2)]
    common = digests[0].keys() & digests[1].keys()
    for participating in (False, True):
        of_the_spare = [e for e in fleet.of(2, Committed) if e.participating is participating]
        assert common & {event.step for event in of_the_spare}
    assert all(digests[0][step] == digests[1][step] for step in common)
