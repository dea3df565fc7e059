"""Lets only those call a service who know its token; health checks are free, reflection is not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from torchft_svc.rpc.refusals import Refusals
from torchft_svc.rpc.security import TOKEN_KEY, Security

# Probes of load balancers and Kubernetes carry no metadata, and learn nothing but "serving".
OPEN_TO_ALL = "/grpc.health.v1.Health/"

Details = grpc.HandlerCallDetails


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Refuses a call before its request is read. To be used on one event loop."""

    def __init__(self, security: Security, refusals: Refusals) -> None:
        self._security = security
        self._refusals = refusals

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
            self._refusals.tell(context.peer(), method, reason)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

        # A stream's handler begins before any message has come; on the wire all kinds are the same.
        return grpc.stream_stream_rpc_method_handler(refuse)
