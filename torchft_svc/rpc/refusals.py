"""Logs whose calls were refused and why, so that an operator sees who is set up wrongly."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

# A peer that keeps trying is told each time, and logged this often for each method.
LOG_AGAIN_S = 60.0
# Whose last line is remembered; with more, the one that was logged longest ago is forgotten.
MAX_LOGGED = 1000


class Refusals:
    """To be used on one event loop."""

    def __init__(self) -> None:
        self._logged_at: dict[tuple[str, str], float] = {}

    def tell(self, peer: str, method: str, reason: str) -> None:
        """``peer``, as gRPC calls it, asked for ``method``, and heard ``reason`` instead."""
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
