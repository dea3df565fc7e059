"""Training pauses with too few groups or none up to date, says why, and goes on by itself."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from support.running import Process, eventually, lighthouse_process

from tools.chaos.fleet import Fleet
from tools.demo.events import Committed
from torchft_svc.coordination import LighthouseClient

pytestmark = pytest.mark.processes

# For what comes much sooner, unless the machine stands still.
LONG_S = 30.0


def status(lighthouse: Process) -> str:
    """Why there is no quorum, as `lighthouse status` shows it."""
    with LighthouseClient(lighthouse.address, timedelta(seconds=10)) as client:
        (job,) = client.status()
    return job.waiting_for


def test_too_few_groups_pause_and_go_on_when_they_are_back(
    make_fleet: Callable[..., Fleet],
) -> None:
    with lighthouse_process("--min-replicas=2") as lighthouse:
        fleet = make_fleet(lighthouse.address)
        workers = [fleet.start(group)[0] for group in range(2)]
        fleet.all_meet({0, 1})
        fleet.kill(workers[1])
        eventually(lambda: "1 of at least 2 groups ask" in lighthouse.errors(), LONG_S)
        eventually(lambda: "1 of at least 2 groups ask" in status(lighthouse))
        fleet.start(1)
        fleet.all_meet({0, 1})
        assert workers[0].is_running
        assert all(len(event.members.split()) == 2 for event in fleet.of(0, Committed))


def test_without_a_group_that_is_up_to_date_the_job_waits(make_fleet: Callable[..., Fleet]) -> None:
    """What is left of it is behind: it does not start a second history."""
    with lighthouse_process("--min-replicas=1", "--join-timeout-ms=300") as lighthouse:
        fleet = make_fleet(lighthouse.address)
        workers = [fleet.start(group)[0] for group in range(2)]
        fleet.all_meet({0, 1})
        hung_at = time.monotonic()
        workers[1].command(f"hang {LONG_S}")
        alone_at = fleet.await_commits({0}, LONG_S, since=hung_at, num_members=1)
        # What it committed alone is known to the lighthouse with the quorum after that.
        fleet.await_commits({0}, LONG_S, since=alone_at, num_members=1)
        killed_at = fleet.kill(workers[0])
        workers[1].command("wake")
        eventually(lambda: "waiting for a group with the newer" in lighthouse.errors(), LONG_S)
        eventually(lambda: "waiting for a group with the newer" in status(lighthouse))
        fleet.read()
        assert workers[1].is_running
        assert not fleet.of(1, Committed, since=killed_at)


def test_a_group_that_was_frozen_and_is_the_last_one_left_does_not_take_the_job_back(
    make_fleet: Callable[..., Fleet],
) -> None:
    """The group wakes when its peer, which went on without it, is dead: the job waits.

    It does so whatever becomes of the frozen group's lines meanwhile.
    """
    with lighthouse_process("--min-replicas=1", "--heartbeat-timeout-ms=600") as lighthouse:
        fleet = make_fleet(lighthouse.address)
        workers = [fleet.start(group)[0] for group in range(2)]
        fleet.all_meet({0, 1})
        since = workers[1].signal_all(signal.SIGSTOP)
        for _ in range(3):
            since = fleet.await_commits({0}, LONG_S, since=since, num_members=1)
        killed_at = fleet.kill(workers[0])
        # Long enough for its connections to be given up: by it, by its manager, by the lighthouse.
        eventually(lambda: time.monotonic() > killed_at + 8.0)
        workers[1].signal_all(signal.SIGCONT)
        eventually(lambda: "waiting for a group with the newer" in status(lighthouse), LONG_S)
        assert "job went back" not in lighthouse.errors()
        fleet.read()
        assert workers[1].is_running
        assert not fleet.of(1, Committed, since=killed_at)
