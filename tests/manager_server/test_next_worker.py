"""A worker that starts while its manager has left, because the one before is gone."""

from __future__ import annotations

from datetime import timedelta

import pytest
from support.running import attach, eventually, lighthouse_process, manager_process, start_manager

from torchft_svc.coordination import LighthouseClient, ManagerClient

pytestmark = pytest.mark.processes
LONG = timedelta(seconds=20)


def test_it_learns_who_trains_before_it_asks_for_a_quorum() -> None:
    with (
        lighthouse_process() as lighthouse,
        manager_process(lighthouse.address) as manager,
        LighthouseClient(lighthouse.address, LONG) as operator,
    ):
        with ManagerClient(manager.address, LONG) as first:
            attach(first, 0)
            first._quorum(0, 0, "here", False, LONG)

        def groups() -> list[str]:
            (job,) = operator.status(timeout=LONG)
            return [] if job.ended_s is not None else [each.replica_id for each in job.groups]

        eventually(lambda: not groups(), what="the manager has not left")
        other = start_manager(lighthouse.address, replica_id="other")
        try:
            with ManagerClient(other.address(), LONG) as trains:
                attach(trains, 0)
                trains._quorum(0, 5, "there", False, LONG)
                with ManagerClient(manager.address, LONG) as second:
                    addresses, step = second.job_members(LONG)
                    assert (addresses, step) == ([other.address().removeprefix("http://")], 5)
                    attach(second, 0)
                    eventually(lambda: len(groups()) == 2)
        finally:
            other.shutdown()
