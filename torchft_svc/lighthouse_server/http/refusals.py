"""Refused requests as JSON: what was wrong, and what to do."""

from __future__ import annotations

import http
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from torchft_svc.core.limits import one_line
from torchft_svc.errors import NotLeader


class HttpRefusal(Exception):
    """A request that gets HTTP ``status``; ``code`` is for programs, ``message`` for people."""

    def __init__(self, status: int, code: str, message: str, **more: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.more = status, code, message, more


def not_leading(error: NotLeader) -> HttpRefusal:
    """The refusal of a lighthouse that does not lead; it names the leader, if it knows it."""
    return HttpRefusal(503, "not_leader", str(error), leader=error.leader)


def refusal_response(refusal: HttpRefusal) -> Response:
    """Return the answer that a refusal becomes."""
    headers = {}
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    if refusal.status == 503:
        headers["retry-after"] = "2"
    if refusal.status in (408, 413):  # what has not been read of it is not worth reading
        headers["connection"] = "close"
    error = {"code": refusal.code, "message": one_line(refusal.message), **refusal.more}
    return JSONResponse({"error": error}, refusal.status, headers)


async def answer_refusal(_: Request, error: Exception) -> Response:
    """Answer a request that an endpoint has refused."""
    assert isinstance(error, HttpRefusal)
    return refusal_response(error)


async def answer_not_leading(_: Request, error: Exception) -> Response:
    """Answer a request to a lighthouse that does not lead."""
    assert isinstance(error, NotLeader)
    return refusal_response(not_leading(error))


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer a request for which there is no path or method."""
    assert isinstance(error, HTTPException)
    name = http.HTTPStatus(error.status_code).name.lower()
    message = f"{request.method} {request.url.path} is not served here: see /api/v1/openapi.json"
    response = refusal_response(HttpRefusal(error.status_code, name, message))
    response.headers.update(dict(error.headers or {}))
    return response


async def answer_fault(_: Request, error: Exception) -> Response:
    """Answer a request that has met a fault of ours; the server logs its traceback."""
    message = f"{type(error).__name__} in this lighthouse: its log has more"
    return refusal_response(HttpRefusal(500, "internal_error", message))


async def answer_gone_client(_: Request, error: Exception) -> Response:
    """Answer a client that has gone away while it sent its request."""
    return Response(status_code=400)


HANDLERS: dict[Any, Any] = {
    HttpRefusal: answer_refusal,
    NotLeader: answer_not_leading,
    HTTPException: answer_http_error,
    ClientDisconnect: answer_gone_client,
    Exception: answer_fault,
}
