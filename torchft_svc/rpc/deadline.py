"""A caller's deadline, as the server sees it."""

from __future__ import annotations

from typing import Any

import grpc

# A call without a deadline does not wait forever.
MAX_WAIT_S = 24 * 3600.0
# An answer that names the reason has to arrive before the caller's own clock ends the call.
MARGIN = 0.05
MAX_MARGIN_S = 0.1


def remaining_s(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """How long a handler may wait so that its last word still reaches the caller, in seconds."""
    left = context.time_remaining()
    if not left:  # no deadline; or a wall clock has jumped: gRPC cancels what is really over
        return MAX_WAIT_S
    return time_to_wait_s(left)


def time_to_wait_s(left_s: float) -> float:
    """The same, for a caller that waits ``left_s`` itself."""
    return max(0.0, min(left_s - min(left_s * MARGIN, MAX_MARGIN_S), MAX_WAIT_S))
