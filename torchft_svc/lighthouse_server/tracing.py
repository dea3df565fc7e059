"""Makes the first span of the trace of each quorum change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchft_svc.core.quorum.lighthouse.lighthouse import Publish

if TYPE_CHECKING:
    from torchft_svc.telemetry.otel import Telemetry


def trace_changes(telemetry: Telemetry) -> Callable[[Publish, str, float], None]:
    """Return what `Counts.on_change` has to be for ``telemetry`` to export the changes."""

    def trace_change(order: Publish, reason: str, waited_s: float) -> None:
        ended_ns, quorum = time.time_ns(), order.quorum
        attributes: dict[str, str | int] = {
            "torchft.reason": reason,
            "torchft.step": quorum.max_step,
            "torchft.groups": len(quorum.participants),
        }
        telemetry.add_change(
            order.job,
            quorum.quorum_id,
            ended_ns - int(waited_s * 1e9),
            ended_ns,
            attributes,
        )

    return trace_change
