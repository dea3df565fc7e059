"""Lets only those call a service who know its token; health checks are free, reflection is not."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from torchft_svc.rpc.security import TOKEN_KEY, Security

log = logging.getLogger(__name__)

# Probes of load balancers and Kubernetes carry no metadata, and learn nothing but "serving".
OPEN_TO_ALL = "/grpc.health.v1.Health/"
# A peer that keeps trying is told each time, and logged this often.
LOG_AGAIN_S = 60.0
# Peers whose last line is remembered; with more, the one that was logged longest ago is forgotten.
MAX_LOGGED_PEERS = 1000

Details = grpc.HandlerCallDetails


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Refuses a call before its request is read. To be used on one event loop."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._logged_at: dict[str, float] = {}

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
            self._log(context.peer(), method, reason)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

        # A stream's handler begins before any message has come; on the wire all kinds are the same.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _log(self, peer: str, method: str, reason: str) -> None:
        host, now = peer.rpartition(":")[0], time.monotonic()
        if now - self._logged_at.get(host, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return
        self._logged_at.pop(host, None)  # so that the order is that of the lines
        self._logged_at[host] = now
        if len(self._logged_at) > MAX_LOGGED_PEERS:
            del self._logged_at[next(iter(self._logged_at))]
        log.warning(
            "refused %r from %s: %s (said at most every %g s)",
            method[:100],
            peer,
            reason,
            LOG_AGAIN_S,
        )
