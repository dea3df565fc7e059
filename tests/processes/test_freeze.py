"""A group is frozen or cut off: after the heartbeat timeout the others go on; it may come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from support.bounds import check
from support.running import eventually, lighthouse_process

from tools.chaos.bounds import NEWS_S
from tools.chaos.fleet import Fleet
from torchft_svc.coordination import LighthouseClient
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.manager_server.app import WORKER_KEEPALIVE_MS
from torchft_svc.testing.proxy import Proxy

pytestmark = pytest.mark.processes

HEARTBEAT_S = 0.6
BOUND_S = HEARTBEAT_S + NEWS_S
FLAGS = ("--min-replicas=1", f"--heartbeat-timeout-ms={HEARTBEAT_S * 1000:.0f}")


def test_a_frozen_group_is_left_out_and_heals_when_it_thaws(
    make_fleet: Callable[..., Fleet],
) -> None:
    with lighthouse_process(*FLAGS) as lighthouse:
        fleet = make_fleet(lighthouse.address)
        workers = [fleet.start(group)[0] for group in range(3)]
        fleet.all_meet({0, 1, 2})
        frozen_at = workers[2].signal_all(signal.SIGSTOP)
        again_at = fleet.await_commits({0, 1}, 30.0, since=frozen_at, num_members=2)
        check("a group is frozen", again_at - frozen_at, BOUND_S)
        workers[2].signal_all(signal.SIGCONT)
        fleet.all_meet({0, 1, 2})
        assert workers[2].is_running


def test_a_job_that_was_suspended_as_a_whole_goes_on(make_fleet: Callable[..., Fleet]) -> None:
    """A batch system suspends jobs so. Nobody is dead, late or hung because of that."""
    # Each of the timeouts; less would be tripped by a stall of a machine that was not suspended.
    timeout_s = 2.5
    timeout_ms = f"{timeout_s * 1000:.0f}"
    flags = (f"--hang-timeout-ms={timeout_ms}", f"--heartbeat-timeout-ms={timeout_ms}")
    with lighthouse_process("--min-replicas=1", "--on-hang=evict", *flags) as lighthouse:
        fleet = make_fleet(lighthouse.address, step_s=0.3)
        workers = [fleet.start(group)[0] for group in range(2)]
        fleet.all_meet({0, 1})
        with LighthouseClient(lighthouse.address, timedelta(seconds=10)) as client:
            eventually(
                lambda: {each.phase for each in client.status()[0].groups} == {Phase.TRAINING}
            )
        log_before = lighthouse.errors()
        lighthouse.send(signal.SIGSTOP)
        frozen_at = max(worker.signal_all(signal.SIGSTOP) for worker in workers)
        eventually(lambda: time.monotonic() > frozen_at + timeout_s + 0.5)
        for worker in workers:
            worker.signal_all(signal.SIGCONT)
        lighthouse.send(signal.SIGCONT)
        fleet.all_meet({0, 1})
        assert all(worker.is_running for worker in workers), fleet.summary()
        report = lighthouse.errors().removeprefix(log_before)
        assert "group lost" not in report
        assert "group hangs" not in report


def test_a_group_without_a_way_to_the_lighthouse_is_left_out_and_heals(
    make_fleet: Callable[..., Fleet],
) -> None:
    with lighthouse_process(*FLAGS) as lighthouse, Proxy(lighthouse.address) as proxy:
        fleet = make_fleet(lighthouse.address)
        for group in range(2):
            fleet.start(group)
        (cut_off,) = fleet.start(2, lighthouse=proxy.address)
        fleet.all_meet({0, 1, 2})
        held_at = time.monotonic()
        proxy.hold()
        again_at = fleet.await_commits({0, 1}, 30.0, since=held_at, num_members=2)
        check("a group is cut off", again_at - held_at, BOUND_S)
        proxy.release()
        fleet.all_meet({0, 1, 2})
        assert cut_off.is_running


def test_a_frozen_trainer_whose_manager_lives_is_left_out_and_heals(
    make_fleet: Callable[..., Fleet],
) -> None:
    """The manager's signs of life are its own: it has to find out about its worker."""
    with lighthouse_process("--min-replicas=1") as lighthouse:
        fleet = make_fleet(lighthouse.address)
        workers = [fleet.start(group)[0] for group in range(3)]
        fleet.all_meet({0, 1, 2})
        frozen_at = workers[2].signal(signal.SIGSTOP)
        again_at = fleet.await_commits({0, 1}, 30.0, since=frozen_at, num_members=2)
        check("a trainer is frozen", again_at - frozen_at, 2 * WORKER_KEEPALIVE_MS / 1000 + NEWS_S)
        assert "group rank 0 is gone: its process ended, or does not answer" in lighthouse.errors()
        workers[2].signal(signal.SIGCONT)
        fleet.all_meet({0, 1, 2})
