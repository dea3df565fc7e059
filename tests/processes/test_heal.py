"""A group dies while it heals, or while others heal from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.bounds import Late, check
from support.running import lighthouse_process

from tools.chaos.fleet import Fleet
from tools.demo.events import Discarded, Healed, PhaseBegan

pytestmark = pytest.mark.processes

# A state that takes a good part of a second to be fetched: the kill comes before its end.
BALLAST_BYTES = 192 << 20
# One step, in which such a state is fetched on the same two cores by another group.
STEP_S = 1.0
# For what comes much sooner, unless the machine stands still.
LONG_S = 30.0


def is_fetch(event: PhaseBegan) -> bool:
    return event.phase == "fetch" and event.step > 0


def test_a_joiner_that_dies_while_it_heals(make_fleet: Callable[..., Fleet]) -> None:
    with lighthouse_process("--min-replicas=1") as lighthouse:
        fleet = make_fleet(lighthouse.address, ballast=BALLAST_BYTES)
        fleet.start(0)
        fleet.all_meet({0})
        (joiner,) = fleet.start(1)
        fleet.await_event(PhaseBegan, LONG_S, wanted=is_fetch)
        killed_at = fleet.kill(joiner)
        again_at = fleet.await_commits({0}, LONG_S, since=killed_at, num_members=1)
        check("a joiner is killed while it heals", again_at - killed_at, STEP_S)
        assert len(fleet.of(0, Discarded, since=killed_at)) <= 1
        if fleet.of(1, Healed):
            raise Late("the joiner had healed when it was killed")
        fleet.start(1)
        fleet.all_meet({0, 1})


def test_a_source_that_dies_while_it_serves(make_fleet: Callable[..., Fleet]) -> None:
    with lighthouse_process("--min-replicas=1") as lighthouse:
        fleet = make_fleet(lighthouse.address, ballast=BALLAST_BYTES)
        workers = [fleet.start(group)[0] for group in range(2)]
        fleet.all_meet({0, 1})
        fleet.start(2)
        fetch = fleet.await_event(PhaseBegan, LONG_S, wanted=lambda e: is_fetch(e) and e.group == 2)
        source = fleet.await_event(
            PhaseBegan, LONG_S, wanted=lambda e: e.phase == "serve" and e.step == fetch.step
        ).group
        killed_at = fleet.kill(workers[source])
        fleet.read()
        if any(healed.at < killed_at for healed in fleet.of(2, Healed)):
            raise Late("the joiner had healed when its source was killed")
        survivor = 1 - source
        again_at = fleet.await_commits({survivor}, LONG_S, since=killed_at)
        check("a source is killed while it serves", again_at - killed_at, STEP_S)
        assert len(fleet.of(survivor, Discarded, since=killed_at)) <= 1
        healed = fleet.await_event(Healed, LONG_S, since=killed_at, wanted=lambda e: e.group == 2)
        print(f"the joiner heals from another {healed.at - killed_at:.2f} s after the kill")
        fleet.all_meet({survivor, 2})
