"""Refuses calls without the service's token, and logs which calls were refused and why.

Health checks need no token, reflection does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from torchft_svc.rpc.security import TOKEN_KEY, Security
from torchft_svc.telemetry.rpc_errors import RpcErrors

# Probes of load balancers and Kubernetes carry no metadata, and learn nothing but "serving".
OPEN_TO_ALL = "/grpc.health.v1.Health/"

# A peer that keeps trying gets the reason each time, and logged this often for each method.
LOG_AGAIN_S = 60.0
# Peers whose last line is remembered; the one that was logged longest ago is forgotten first.
MAX_LOGGED = 1000

log = logging.getLogger(__name__)

Details = grpc.HandlerCallDetails


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Refuses a call before its request is read; for one event loop."""

    def __init__(self, security: Security, refusals: Refusals, errors: RpcErrors) -> None:
        self._security = security
        self._refusals = refusals
        self._errors = errors

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Any]], handler_call_details: Details
    ) -> Any:
        method: Any = handler_call_details.method
        metadata: Any = handler_call_details.invocation_metadata or ()
        name = method if isinstance(method, str) else method.decode("ascii", "replace")
        shown = next((str(value) for key, value in metadata if key == TOKEN_KEY), None)
        reason = self._security.refusal(shown)
        if reason is None or name.startswith(OPEN_TO_ALL):
            return await continuation(handler_call_details)
        return self._refusing(name, reason)

    def _refusing(self, method: str, reason: str) -> Any:
        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._refusals.log_refusal(context.peer(), method, reason)
            self._errors.count(method.rpartition("/")[2], grpc.StatusCode.UNAUTHENTICATED.name)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

        # A stream's handler begins before any message has come; on the wire all kinds are the same.
        return grpc.stream_stream_rpc_method_handler(refuse)


class Refusals:
    """Logs who is refused, so that an operator sees who is set up wrongly; for one event loop."""

    def __init__(self) -> None:
        self._logged_at: dict[tuple[str, str], float] = {}

    def log_refusal(self, peer: str, method: str, reason: str) -> None:
        """Log, unless just done, that ``peer`` was refused ``method`` for ``reason``."""
        who, now = (peer.rpartition(":")[0], method[:100]), time.monotonic()
        if now - self._logged_at.get(who, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return
        self._logged_at.pop(who, None)  # so that the order is that of the lines
        self._logged_at[who] = now
        if len(self._logged_at) > MAX_LOGGED:
            del self._logged_at[next(iter(self._logged_at))]
        log.warning(
            "refused %r from %s: %s (logged at most every %g s)", who[1], peer, reason, LOG_AGAIN_S
        )
