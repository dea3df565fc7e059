"""The lighthouse is away for long: training goes on without it, and a loss is noticed meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from support.bounds import check
from support.running import eventually, lighthouse_process, steady_address

from tools.chaos.bounds import LIGHTHOUSE_BACK_S
from tools.chaos.fleet import Fleet, Worker
from tools.demo.events import Committed, Discarded
from torchft_svc.coordination import LighthouseClient

pytestmark = pytest.mark.processes

GROUPS = {0, 1, 2}
AWAY_S = 3.0
LIMIT = timedelta(seconds=10)


def commits_in(fleet: Fleet, since: float) -> list[int]:
    fleet.read()
    return [len(fleet.of(group, Committed, since=since)) for group in sorted(GROUPS)]


def settle_step(fleet: Fleet) -> None:
    """Wait until all groups commit steps that ask nobody."""
    fleet.all_meet(GROUPS)
    since = time.monotonic()
    for _ in range(3):
        since = fleet.await_commits(GROUPS, 30.0, since=since, num_members=len(GROUPS))


def has_next(worker: Worker) -> bool:
    """Whether a process has done its imports, watches its trainer, and waits to be the manager."""
    waiting = [f"/proc/{pid}/fd" for pid in worker.manager_pids()[1:]]
    with suppress(FileNotFoundError):  # it is opening files
        return any("pidfd" in os.readlink(each) for fds in waiting for each in Path(fds).iterdir())
    return False


def test_no_step_is_lost_without_the_lighthouse_and_a_loss_is_noticed(
    make_fleet: Callable[..., Fleet],
) -> None:
    address = steady_address()
    with lighthouse_process("--min-replicas=1", bind=address) as first:
        fleet = make_fleet(address)
        workers = [fleet.start(group)[0] for group in sorted(GROUPS)]
        settle_step(fleet)
        first.kill()
        killed_at = time.monotonic()
        time.sleep(AWAY_S)
        eventually(lambda: min(commits_in(fleet, killed_at)) >= 10)
        discards = [fleet.of(group, Discarded, since=killed_at) for group in GROUPS]
        assert not any(discards), discards
        fleet.kill(workers[2])
        time.sleep(AWAY_S / 2)
        fleet.read()
        (lost,) = {event.members for event in fleet.of(0, Committed)[-1:]}
        lost_at = max(event.at for event in fleet.of(0, Committed))
        assert time.monotonic() - lost_at > AWAY_S / 4, f"{lost} go on without the killed one"
        with lighthouse_process("--min-replicas=1", bind=address):
            back_at = time.monotonic()
            again_at = fleet.await_commits({0, 1}, 30.0, since=back_at, num_members=2)
            check("the lighthouse is back", again_at - back_at, LIGHTHOUSE_BACK_S)


def test_a_lighthouse_that_is_back_continues_the_term(make_fleet: Callable[..., Fleet]) -> None:
    address = steady_address()
    with lighthouse_process("--min-replicas=1", bind=address) as first:
        fleet = make_fleet(address)
        for group in (0, 1):
            fleet.start(group)
        fleet.all_meet({0, 1})
        since = fleet.await_commits({0, 1}, 30.0, since=time.monotonic(), num_members=2)
        first.kill()
    with (
        lighthouse_process("--min-replicas=1", bind=address),
        LighthouseClient(address, LIMIT) as client,
    ):
        eventually(lambda: [len(job.groups) for job in client.status()] == [2])
        fleet.start(2)
        fleet.all_meet(GROUPS)
        fleet.read()
        steps = [event.step for event in fleet.of(0, Committed, since=since)]
        assert steps == list(range(steps[0], steps[0] + len(steps))), "none is lost or repeated"
        assert not fleet.of(0, Discarded, since=since)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_death_of_a_manager_costs_nobody_a_step(
    make_fleet: Callable[..., Fleet], num_workers: int
) -> None:
    """The manager's group goes on in the quorum; the next manager continues as the same member."""
    with lighthouse_process("--min-replicas=1") as lighthouse:
        fleet = make_fleet(lighthouse.address, num_workers=num_workers)
        workers = [fleet.start(group)[0] for group in sorted(GROUPS)]
        settle_step(fleet)
        if num_workers > 1:  # its steps need a manager
            eventually(lambda: has_next(workers[1]))
        first = workers[1].manager_pid()
        died_at = workers[1].kill_manager()
        eventually(lambda: workers[1].manager_pid() not in (None, first))
        resumed_at = time.monotonic()
        eventually(lambda: min(commits_in(fleet, resumed_at)) >= 10)
        assert not any(fleet.of(group, Discarded, since=died_at) for group in GROUPS)
        (quorum_id,) = {each.quorum_id for each in fleet.of(0, Committed, since=died_at)}
        fleet.start(3)  # whose news reaches the group by its new manager
        fleet.all_meet({*GROUPS, 3})
        fleet.read()
        assert not fleet.of(1, Discarded, since=died_at)
        assert fleet.of(1, Committed)[-1].quorum_id > quorum_id
        assert "group lost" not in lighthouse.errors()
