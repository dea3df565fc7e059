"""The RPCs of `ManagerService`: parse, call the driver, answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchft_svc.core.limits import one_line
from torchft_svc.manager_server.attachment import attach
from torchft_svc.manager_server.driver import ManagerDriver
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.calls import remaining_s
from torchft_svc.rpc.codec import drain_from_wire, vote_from_wire, worker_request_from_wire
from torchft_svc.rpc.serving import Service

Context = grpc.aio.ServicerContext[Any, Any]


def manager_service(driver: ManagerDriver) -> Service:
    """The service, for `torchft_svc.rpc.serving.serve`."""

    async def quorum(request: pb.ManagerQuorumRequest, context: Context) -> bytes:
        return await driver.request_quorum(worker_request_from_wire(request), remaining_s(context))

    async def should_commit(request: pb.ShouldCommitRequest, context: Context) -> bytes:
        return await driver.request_decision(vote_from_wire(request), remaining_s(context))

    async def checkpoint_address(request: pb.CheckpointAddressRequest, context: Context) -> bytes:
        address = driver.checkpoint_address(request.rank)
        return pb.CheckpointAddressResponse(checkpoint_server_address=address).SerializeToString()

    async def job_members(request: pb.JobMembersRequest, context: Context) -> bytes:
        members = await driver.list_members(remaining_s(context))
        return members.SerializeToString()

    async def kill(request: pb.KillRequest, context: Context) -> bytes:
        driver.kill_group(one_line(request.msg))
        return b""

    async def drain(request: pb.DrainRequest, context: Context) -> bytes:
        driver.drain_group(drain_from_wire(request))
        return b""

    async def attachment(requests: AsyncIterator[pb.AttachRequest], context: Context) -> None:
        await attach(driver, requests, context)

    return Service(
        "ManagerService",
        {
            "Quorum": quorum,
            "CheckpointAddress": checkpoint_address,
            "JobMembers": job_members,
            "ShouldCommit": should_commit,
            "Kill": kill,
            "Drain": drain,
        },
        streams={"Attach": attachment},
    )
