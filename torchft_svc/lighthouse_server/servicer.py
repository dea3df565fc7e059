"""The RPCs of `LighthouseService`: parse, call the driver, answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchft_svc.core.launch.launched_run import RunStatus
from torchft_svc.core.limits import MAX_REASON_LENGTH, check_name, check_text
from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.core.quorum.session_messages import Kill, Leave
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.errors import RequestRefused
from torchft_svc.host.tasks import in_turns
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.about import about_lighthouse, about_to_wire
from torchft_svc.rpc.calls import remaining_s
from torchft_svc.rpc.codec import JOB_KEY, drain_from_wire, member_from_wire
from torchft_svc.rpc.codec_status import copy_from_wire, incidents_to_wire, status_to_wire
from torchft_svc.rpc.health import ALWAYS_READY, Readiness
from torchft_svc.rpc.serving import Service
from torchft_svc.rpc.status import Handler

Context = grpc.aio.ServicerContext[Any, Any]


def lighthouse_service(driver: LighthouseDriver, readiness: Readiness = ALWAYS_READY) -> Service:
    """The service, to be handed to `torchft_svc.rpc.serving.serve`."""

    async def quorum(request: pb.LighthouseQuorumRequest, context: Context) -> bytes:
        member = member_from_wire(request.requester)
        job = _job(context)
        answer = await driver.quorum(job, member, remaining_s(context))
        return await driver.heavy_writes.answer(job, answer, context)

    async def heartbeat(request: pb.LighthouseHeartbeatRequest, context: Context) -> bytes:
        interval_s = driver.heartbeat(_job(context), request.replica_id)
        answer = pb.LighthouseHeartbeatResponse(min_interval_ms=int(interval_s * 1000))
        return answer.SerializeToString()

    async def leave(request: pb.LighthouseLeaveRequest, context: Context) -> bytes:
        leave = Leave(request.reason, request.between_steps, request.ends)
        driver.leave(_job(context), request.replica_id, leave)
        return b""

    async def has_room(_: pb.LighthouseRoomRequest, context: Context) -> bytes:
        driver.check_room(_job(context))
        return b""

    async def job_members(_: pb.JobMembersRequest, context: Context) -> bytes:
        return driver.members(_job(context)).SerializeToString()

    async def report_copies(request: pb.ReportCopiesRequest, context: Context) -> bytes:
        job, copies = _job(context), tuple(map(copy_from_wire, request.copies))
        driver.record_copies(job, request.holder, copies)
        return driver.members(job).SerializeToString()

    async def about(_: pb.LighthouseAboutRequest, context: Context) -> bytes:
        is_elected = readiness is not ALWAYS_READY
        answer = about_lighthouse(driver.config, time.time(), is_elected=is_elected)
        return about_to_wire(answer).SerializeToString()

    async def session(requests: AsyncIterator[pb.SessionRequest], context: Context) -> None:
        await driver.session(_job(context), requests, context)

    async def rendezvous(requests: AsyncIterator[pb.AgentRequest], context: Context) -> None:
        await driver.runs.attend(requests, context)

    return Service(
        "LighthouseService",
        {
            "Quorum": quorum,
            "Heartbeat": heartbeat,
            "Leave": leave,
            "HasRoom": has_room,
            "JobMembers": job_members,
            "ReportCopies": report_copies,
            "About": about,
            **_operator_calls(driver),
        },
        streams={"Session": session, "Rendezvous": rendezvous},
        readiness=readiness,
    )


def _operator_calls(driver: LighthouseDriver) -> dict[str, Handler]:
    async def kill(request: pb.LighthouseKillRequest, context: Context) -> bytes:
        reason = _reason(request.reason, "killed by an operator")
        driver.command(_job(context), request.replica_id, Kill(reason))
        return b""

    async def drain(request: pb.LighthouseDrainRequest, context: Context) -> bytes:
        command = drain_from_wire(request)
        if request.node:
            driver.runs.drain(_job(context), request.node, command)
        else:
            driver.command(_job(context), request.replica_id, command)
        return b""

    async def status(request: pb.LighthouseStatusRequest, context: Context) -> bytes:
        jobs, runs = await _status(driver, request.job)
        message = await in_turns(status_to_wire(jobs, runs))
        return message.SerializeToString()

    async def accept_loss(request: pb.AcceptLossRequest, context: Context) -> bytes:
        committed_step = driver.accept_loss(_job(context))
        return pb.AcceptLossResponse(committed_step=committed_step).SerializeToString()

    async def incidents(request: pb.LighthouseIncidentsRequest, context: Context) -> bytes:
        job = _job(context)
        found = driver.incidents(job, max(0, request.after))
        try:
            goodput = driver.goodput(job)
        except RequestRefused:  # it is a launched run, or was forgotten
            goodput = None
        return incidents_to_wire(found, goodput).SerializeToString()

    return {
        "Kill": kill,
        "Drain": drain,
        "AcceptLoss": accept_loss,
        "Status": status,
        "Incidents": incidents,
    }


async def _status(driver: LighthouseDriver, name: str) -> tuple[list[JobStatus], list[RunStatus]]:
    """The status of the job and the run with this name; empty: of all.

    Raises:
        RequestRefused: there is neither.
    """
    try:
        jobs = await driver.gather_status(name)
    except RequestRefused as error:
        try:
            return [], driver.runs.status(name)
        except RequestRefused:
            raise error from None
    try:
        return jobs, driver.runs.status(name)
    except RequestRefused:
        return jobs, []


def _reason(requested: str, default: str) -> str:
    check_text("reason", requested, MAX_REASON_LENGTH)
    return requested or default


def _job(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == JOB_KEY:
            job = value if isinstance(value, str) else value.decode("utf-8", "replace")
            check_name("job", job)
            return job
    return DEFAULT_JOB
