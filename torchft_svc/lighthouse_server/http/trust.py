"""Checks who may send which request, before it is read (rule S10)."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchft_svc.lighthouse_server.http.refusals import HttpRefusal, refusal_response
from torchft_svc.rpc.guard import Refusals
from torchft_svc.rpc.security import Security

# Who asks for these learns nothing about jobs: the page itself, and probes, which carry no token.
OPEN_PATHS = frozenset(
    {"/", "/app.js", "/style.css", "/icon.svg", "/healthz", "/readyz", "/api/v1/openapi.json"}
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
# Requests of the page itself, and those that are typed into the address bar.
_SAME_SITE = ("same-origin", "none")
_READING = ("GET", "HEAD")

_HEADERS = {
    # The page has no inline script or style, and loads from and sends to this server alone.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Trust:
    """ASGI middleware that refuses requests for other hosts, from other sites, and without the
    token; ``own_hosts``: the names of this server."""

    def __init__(
        self, app: ASGIApp, security: Security, own_hosts: Iterable[str], refusals: Refusals
    ) -> None:
        self._app = app
        self._security = security
        self._own_hosts = {host.lower().rstrip(".") for host in own_hosts} - {""}
        self._own_hosts |= {"localhost", socket.gethostname().lower()}
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise AssertionError(f"{scope['type']} is switched off")
        # A name may contain a slash, which is %2F in the path until its segments are apart.
        scope["path"] = scope["raw_path"].decode("ascii", "replace")
        try:
            self._check(scope)
        except HttpRefusal as refusal:
            if refusal.status in (401, 403):
                host, port = scope["client"] or ("a caller", 0)
                what = f"{scope['method']} {scope['path']}"
                self._refusals.log_refusal(f"{host}:{port}", what, refusal.message)
            await refusal_response(refusal)(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        self._check_host(host)
        if scope["method"] not in _READING:
            _check_origin(headers, host)
            if self._security.token is None:
                raise HttpRefusal(
                    403,
                    "commands_off",
                    "commands over HTTP need a token, and this lighthouse has none: set "
                    "TORCHFT_TOKEN or --token-file, or use the command `lighthouse`",
                )
        if scope["path"] in OPEN_PATHS and scope["method"] in _READING:
            return
        reason = self._security.refusal(headers.get("authorization"))
        if reason is not None:
            raise HttpRefusal(401, "unauthorized", reason)

    def _check_host(self, header: str) -> None:
        """Refuse other names than this server's: a page of another site could else have its own
        name resolved to this address, and read what is here."""
        found = _HOST.fullmatch(header)
        if found is None:
            raise HttpRefusal(400, "bad_host", f"{header[:100]!r} in the header Host is no host")
        host = found["host"].lower().rstrip(".")
        if not (_is_address(host) or self._is_own(host)):
            raise HttpRefusal(
                400,
                "bad_host",
                f"this lighthouse does not answer as {host!r}: start it with --http-host {host}",
            )

    def _is_own(self, host: str) -> bool:
        if host in self._own_hosts:
            return True
        parents = (own for own in self._own_hosts if own.startswith("*."))
        return any(host.endswith(parent[1:]) for parent in parents)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _check_origin(headers: Headers, host: str) -> None:
    """Refuse a request that a page of another site makes in somebody's browser."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    is_foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
    if is_foreign or (site is not None and site not in _SAME_SITE):
        raise HttpRefusal(403, "cross_site", "commands from pages of other sites are refused")


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return send_with_headers
