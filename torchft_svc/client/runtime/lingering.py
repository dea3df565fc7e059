"""Keeps a worker that ends until groups that heal from it have its state (rule H12)."""

from __future__ import annotations

import logging
import time
from typing import Any

from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.worker.linger import lingers_until

log = logging.getLogger(__name__)

# Interval at which it is checked whether the receivers have everything, or are gone.
_LOOK_S = 0.01


def linger(worker: SharedRound, transport: CheckpointTransport[Any]) -> None:
    """Wait for the receivers of what ``transport`` offers, as long as `lingers_until` says.

    Returns at once if no group of the last quorum heals from this one, or none that lives.
    """
    began_at = time.monotonic()
    named = ""
    while receivers := worker.receivers():
        sent_at = transport.last_sent_at()
        if sent_at is None:
            return
        if not named:
            named = ", ".join(map(stable_name, receivers))
            log.info("still sends its state to %s before it leaves", named)
        left_s = lingers_until(began_at, sent_at, worker.draining_until()) - time.monotonic()
        if left_s <= 0:
            log.warning("leaves although %s may not have the whole state", named)
            return
        time.sleep(min(_LOOK_S, left_s))
