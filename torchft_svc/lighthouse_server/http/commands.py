"""Commands over HTTP: drain, kill and accept-loss, for callers with the token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from torchft_svc.core.limits import MAX_DURATION_S, MAX_REASON_LENGTH, check_text
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.session_messages import Drain, Kill
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.errors import RequestRefused
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.http.answers import Accepted, LossAccepted, json_answer
from torchft_svc.lighthouse_server.http.refusals import HttpRefusal
from torchft_svc.lighthouse_server.http.resources import Resources, segment
from torchft_svc.lighthouse_server.http.schema import DRAIN, NOTHING, REASON, Schema

# A reason and its name; nobody sends more.
MAX_BODY_BYTES = 8 * 1024
# It follows the head of its request at once.
BODY_S = 10.0

KILLED, DRAINED = "killed over HTTP", "drained over HTTP"


class CommandRoutes:
    """Carries out commands; whether the caller may give them was checked before."""

    def __init__(self, driver: LighthouseDriver, resources: Resources) -> None:
        self._driver = driver
        self._resources = resources

    def routes(self) -> list[Route]:
        """The paths that are served; `/replica/...` is that of the public release."""
        group = "/api/v1/jobs/{job}/groups/{group}"
        return [
            Route(f"{group}/drain", self._drain, methods=["POST"]),
            Route(f"{group}/kill", self._kill, methods=["POST"]),
            Route("/api/v1/jobs/{job}/accept-loss", self._accept_loss, methods=["POST"]),
            Route("/api/v1/runs/{run}/nodes/{node}/drain", self._drain_node, methods=["POST"]),
            Route("/replica/{group}/kill", self._kill_replica, methods=["POST"]),
        ]

    async def _drain(self, request: Request) -> Response:
        job, group = segment(request, "job"), segment(request, "group")
        command = _drain(await _read_body(request, ("reason", "within_s")))
        return self._send(job, group, command, "finish its step and end")

    async def _kill(self, request: Request) -> Response:
        job, group = segment(request, "job"), segment(request, "group")
        command = Kill(_reason(await _read_body(request, ("reason",)), KILLED))
        return self._send(job, group, command, "end at once")

    async def _kill_replica(self, request: Request) -> Response:
        """Kill as the dashboard of the public release does: in the default job, without a body."""
        group = segment(request, "group")
        job = request.query_params.get("job", DEFAULT_JOB)
        return self._send(job, group, Kill(KILLED), "end at once")

    def _send(self, job: str, group: str, command: Drain | Kill, what: str) -> Response:
        groups = self._resources.status(job).groups
        if not any(group in (each.replica_id, stable_name(each.replica_id)) for each in groups):
            message = f"job {job!r} has no living group {group!r}"
            raise HttpRefusal(404, "no_such_group", message)
        _execute(lambda: self._driver.command(job, group, command))
        message = f"{group} was asked to {what}"
        return json_answer(Accepted(target=group, message=message), 202)

    async def _drain_node(self, request: Request) -> Response:
        run, node = segment(request, "run"), segment(request, "node")
        command = _drain(await _read_body(request, ("reason", "within_s")))
        nodes = self._resources.run_status(run).nodes
        if not any(node in (each.node_id, each.host) for each in nodes):
            raise HttpRefusal(404, "no_such_node", f"run {run!r} has no node {node!r}")
        _execute(lambda: self._driver.runs.drain(run, node, command))
        message = f"{node} was asked to end its workers, and itself"
        return json_answer(Accepted(target=node, message=message), 202)

    async def _accept_loss(self, request: Request) -> Response:
        job = segment(request, "job")
        await _read_body(request, ())
        self._resources.status(job)  # there has to be one
        committed_step = _execute(lambda: self._driver.accept_loss(job))
        return json_answer(LossAccepted(job=job, committed_step=committed_step))


def describe_commands(schema: Schema) -> None:
    """Add the commands to the schema."""
    group = "/api/v1/jobs/{job}/groups/{group}"
    for path, summary, body in (
        (f"{group}/drain", "Let a group finish its step, leave, and end.", DRAIN),
        (f"{group}/kill", "End a group's processes at once.", REASON),
        ("/api/v1/runs/{run}/nodes/{node}/drain", "End a node of a launched run.", DRAIN),
    ):
        schema.add_command(path, summary, Accepted, 202, body)
    schema.add_command(
        "/api/v1/jobs/{job}/accept-loss",
        "Let a job go back to what its living groups have, once.",
        LossAccepted,
        200,
        NOTHING,
    )


def _execute(command: Callable[[], Any]) -> Any:
    try:
        return command()
    except RequestRefused as error:
        raise HttpRefusal(409, "refused", str(error)) from None


def _drain(body: dict[str, Any]) -> Drain:
    within_s = body.get("within_s")
    is_number = isinstance(within_s, int | float) and not isinstance(within_s, bool)
    if within_s is not None and not (is_number and 0 < within_s <= MAX_DURATION_S):
        message = f"within_s has to be a number of seconds, above 0 and at most {MAX_DURATION_S:g}"
        raise HttpRefusal(400, "bad_request", message)
    return Drain(_reason(body, DRAINED), within_s)


def _reason(body: dict[str, Any], default: str) -> str:
    reason = body.get("reason", "")
    if not isinstance(reason, str):
        raise HttpRefusal(400, "bad_request", "the reason has to be a text")
    try:
        check_text("reason", reason, MAX_REASON_LENGTH)
    except RequestRefused as error:
        raise HttpRefusal(400, "bad_request", str(error)) from None
    return reason or default


async def _read_body(request: Request, known: tuple[str, ...]) -> dict[str, Any]:
    """The JSON object that a request holds, with no other names than the ``known`` ones.

    Only JSON: a page of another site can send a form, but not this.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"send application/json, such as {{}}, and not {kind[:60] or 'nothing'}"
        raise HttpRefusal(415, "unsupported_media_type", message)
    try:
        content = await asyncio.wait_for(_read_content(request), BODY_S)
    except asyncio.TimeoutError:
        message = f"the body of the request did not arrive within {BODY_S:g} s"
        raise HttpRefusal(408, "request_timeout", message) from None
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise HttpRefusal(400, "bad_request", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise HttpRefusal(400, "bad_request", "the body has to be a JSON object, such as {}")
    unknown = [name for name in body if name not in known]
    if unknown:
        allowed = f"allowed: {', '.join(known)}" if known else "it takes none"
        message = f"{unknown[0][:60]!r} is not a field of this command; {allowed}"
        raise HttpRefusal(400, "bad_request", message)
    return body


async def _read_content(request: Request) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            message = f"a command has at most {MAX_BODY_BYTES} bytes"
            raise HttpRefusal(413, "content_too_large", message)
    return bytes(content)
