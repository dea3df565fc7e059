"""The group that hosts the store of a quorum does not answer: the others do not stand still."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from support.bounds import check
from support.running import Process, eventually, lighthouse_process, line_to, silent

from tools.chaos.bounds import JOIN_S
from tools.chaos.fleet import Fleet
from torchft_svc.client.process_groups.rendezvous import CALL_TIMEOUT_S
from torchft_svc.coordination import LighthouseClient

pytestmark = pytest.mark.processes

# Until it is over the frozen group counts as alive; a newcomer asks meanwhile.
HEARTBEAT_S = 4.0
# Below that: who waits for a store that does not answer has not hung itself.
HANG_S = 3.0
FLAGS = (
    "--min-replicas=1",
    f"--heartbeat-timeout-ms={HEARTBEAT_S * 1000:.0f}",
    "--on-hang=kill",
    f"--hang-timeout-ms={HANG_S * 1000:.0f}",
)
LONG_S = 60.0
# Of a worker, forked from one that has imported torch, and of its manager.
START_S = 3.0


def await_askers(lighthouse: Process, *groups: str) -> None:
    """Return when these groups wait for a quorum, and no others."""

    def askers() -> set[str]:
        groups = client.status()[0].groups if client.status() else ()
        return {group.replica_id.partition(":")[0] for group in groups if group.asking}

    with LighthouseClient(lighthouse.address, timedelta(seconds=10)) as client:
        eventually(lambda: askers() == set(groups), LONG_S, f"{groups} ask")


def test_the_host_of_the_store_is_frozen_while_it_asks(make_fleet: Callable[..., Fleet]) -> None:
    with lighthouse_process(*FLAGS) as lighthouse:
        fleet = make_fleet(lighthouse.address)
        (host,) = fleet.start(0)
        (late,) = fleet.start(1)
        fleet.all_meet({0, 1})
        late.command(f"hang {LONG_S}")
        await_askers(lighthouse, "group-0")
        (newcomer,) = fleet.start(2)
        await_askers(lighthouse, "group-0", "group-2")
        frozen_at = host.signal_all(signal.SIGSTOP)
        late.command("wake")
        again_at = fleet.await_commits({1, 2}, LONG_S, since=frozen_at, num_members=2)
        check("the store's host is frozen", again_at - frozen_at, HEARTBEAT_S + JOIN_S)
        host.signal_all(signal.SIGCONT)
        fleet.all_meet({0, 1, 2})
        assert all(worker.is_running for worker in (host, late, newcomer)), fleet.summary()


def test_a_question_names_a_store_that_accepts_and_never_answers(
    make_fleet: Callable[..., Fleet],
) -> None:
    """The host of the store counts as alive all the time, so no news ends the wait."""
    flags = ("--min-replicas=2", "--join-timeout-ms=300", "--heartbeat-timeout-ms=60000")
    with (
        lighthouse_process(*flags) as lighthouse,
        silent() as nowhere,
        line_to(lighthouse.address) as line,
    ):
        fleet = make_fleet(lighthouse.address)
        stranger = line.quorum("a:1", timeout_s=LONG_S, store_address=nowhere)
        line.await_askers("a:1")
        fleet.start(1)
        stranger.result()
        since = time.monotonic()
        fleet.start(2)
        again_at = fleet.await_commits({1, 2}, LONG_S, since=since, num_members=2)
        check("a store that never answers", again_at - since, CALL_TIMEOUT_S + START_S)
