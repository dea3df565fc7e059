"""Tests that a worker's phase which its request has overtaken does not count as a later one."""

from __future__ import annotations

import asyncio

import pytest

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.core.quorum.types import WorkerRequest
from torchft_svc.host.tasks import Tasks
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.driver import ManagerDriver
from torchft_svc.manager_server.link import LighthouseLink
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import phase_from_wire
from torchft_svc.rpc.outbox import Outbox

CONFIG = ManagerConfig(
    lighthouse_address="a:1", replica_name="g", group_world_size=2, store_address="b:1"
)
# The latter of a step that was given up, such as one whose backward pass has raised.
BEFORE = [pb.AttachPhase(phase=phase, step=5) for phase in (pb.PHASE_IDLE, pb.PHASE_TRAINING)]


@pytest.mark.parametrize("before", BEFORE, ids=["idle", "training"])
def test_who_waits_for_a_quorum_does_not_do_what_it_did_before(before: pb.AttachPhase) -> None:
    """Phases are reported a moment later, on a stream of their own."""

    async def story() -> None:
        async with Tasks() as tasks:
            driver = ManagerDriver(Group(2), LighthouseLink(CONFIG, tasks), tasks)
            driver.attach_worker(0, "w", Outbox())
            request = WorkerRequest(group_rank=0, step=5, worker_id="w")
            asking = asyncio.create_task(driver.request_quorum(request, 60.0))
            await asyncio.sleep(0)  # it waits for the other worker now
            driver.receive_phase(0, before)
            assert driver.make_beat().phase is Phase.QUORUM
            asking.cancel()
            await asyncio.wait([asking])
            driver.receive_phase(0, before)
            assert driver.make_beat().phase is phase_from_wire(before.phase)

    asyncio.run(story())
