"""Decides for how long a worker that ends still serves groups that heal from it (rule H12)."""

from __future__ import annotations

import math

# A receiver to which nothing was sent for so long is frozen, or fetches from another group.
STANDSTILL_S = 5.0
# The lighthouse gives a heal up after this time, by default.
MAX_LINGER_S = 600.0
# With a drain that does not say how long it may take: a third of what Kubernetes and Slurm give.
MAX_DRAIN_LINGER_S = 10.0


def lingers_until(began_at: float, sent_at: float, drain_until: float | None) -> float:
    """The time at which a worker that has lingered since ``began_at`` ends, done or not.

    ``sent_at``: when the last bytes were sent. ``drain_until``: when this process will be killed
    (infinite: not known; None: it does not drain); a half of that time is left to the program.
    """
    limit_s = MAX_LINGER_S
    if drain_until is not None:
        known_s = (drain_until - began_at) / 2
        limit_s = min(limit_s, known_s if math.isfinite(known_s) else MAX_DRAIN_LINGER_S)
    return min(sent_at + STANDSTILL_S, began_at + limit_s)
