"""A trainer lives but does not do its part: it hangs between steps, or its collective fails."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from support.bounds import check
from support.running import lighthouse_process

from tools.chaos.bounds import LEFT_OUT_S, NEWS_S
from tools.chaos.fleet import Fleet
from tools.demo.events import Committed, Discarded, Healed, SumFailed
from torchft_svc.client.process_groups.members import LOSS_GRACE_S

pytestmark = pytest.mark.processes

JOIN_S = 0.8
HANG_S = 1.0
# For what comes much sooner, unless the machine stands still; a hang is ended when it has come.
LONG_S = 30.0
SUMMED_AGAIN = "is summed in another quorum"


def test_a_main_thread_that_hangs_delays_the_others_once(make_fleet: Callable[..., Fleet]) -> None:
    with lighthouse_process(
        "--min-replicas=1", f"--join-timeout-ms={JOIN_S * 1000:.0f}"
    ) as lighthouse:
        fleet = make_fleet(lighthouse.address)
        workers = [fleet.start(group)[0] for group in range(3)]
        fleet.all_meet({0, 1, 2})
        hung_at = time.monotonic()
        workers[2].command(f"hang {LONG_S}")
        again_at = fleet.await_commits({0, 1}, LONG_S, since=hung_at, num_members=2)
        check("a main thread hangs", again_at - hung_at, JOIN_S + LEFT_OUT_S)
        workers[2].command("wake")
        fleet.await_event(Healed, LONG_S, since=hung_at, wanted=lambda event: event.group == 2)
        fleet.all_meet({0, 1, 2})
        assert workers[2].is_running


def test_a_worker_that_hangs_inside_a_step_has_its_group_left_out(
    make_fleet: Callable[..., Fleet],
) -> None:
    """The join timeout is a minute: nobody waits for it. The group discards its step, and heals."""
    with lighthouse_process(
        "--min-replicas=1", f"--hang-timeout-ms={HANG_S * 1000:.0f}", "--on-hang=evict"
    ) as lighthouse:
        fleet = make_fleet(lighthouse.address, num_workers=2)
        fleet.start(0)
        hung = fleet.start(1)
        fleet.all_meet({0, 1})
        hung_at = time.monotonic()
        hung[1].command(f"hang_inside {LONG_S}")
        again_at = fleet.await_commits({0}, LONG_S, since=hung_at, num_members=1)
        check("a worker hangs inside a step", again_at - hung_at, HANG_S + NEWS_S)
        time.sleep(2 * LOSS_GRACE_S)  # until then it may complete a sum that the others had sent
        hung[1].command("wake")
        healed = fleet.await_event(
            Healed, LONG_S, since=hung_at, wanted=lambda event: event.group == 1
        )
        reasons = [event.reason for event in fleet.of(1, Discarded, since=hung_at)]
        assert any(" is out: it hangs: " in reason for reason in reasons), reasons
        assert not [each for each in fleet.of(1, Committed, since=again_at) if each.at < healed.at]
        fleet.all_meet({0, 1})
        assert all(worker.is_running for worker in hung)
        lines = lighthouse.errors().splitlines()
        left_out = [line for line in lines if "group left out job=" in line]
        # Another may be slow in its first step, for that is what a stall of the machine looks like.
        assert any("replica=group-1:" in line for line in left_out), lines


def test_an_exception_in_a_collective_costs_one_step(make_fleet: Callable[..., Fleet]) -> None:
    """Group 1 discards its step, or sums it again (E9) if group 0 asks for a quorum first."""
    with lighthouse_process("--min-replicas=1") as lighthouse:
        fleet = make_fleet(lighthouse.address)
        workers = [fleet.start(group)[0] for group in range(2)]
        fleet.all_meet({0, 1})
        before = workers[1].output().count(SUMMED_AGAIN)
        workers[1].command("fail")
        failed = fleet.await_event(SumFailed, LONG_S)
        again_at = fleet.await_commits({0, 1}, LONG_S, since=failed.at, num_members=2)
        check("a collective fails", again_at - failed.at, NEWS_S)
        discarded = fleet.of(1, Discarded, since=failed.at)
        summed_again = workers[1].output().count(SUMMED_AGAIN) - before
        assert len(discarded) + summed_again == 1
        assert all("this sum fails on purpose" in each.reason for each in discarded)
        assert len(fleet.of(0, Discarded, since=failed.at)) <= 1
        assert all(worker.is_running for worker in workers)
