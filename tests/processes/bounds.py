"""Decides how late is too late: the bounds of the failure table, and what the machine may add."""

from __future__ import annotations

import os

# Architecture, section 6.
NEWS_S = 0.25
LIGHTHOUSE_BACK_S = 1.0
MANAGER_BACK_S = 2.0

# A bound counts from an event to the next commit, which holds a whole step of several processes.
# On a machine with more runnable processes than cores each of them waits for its turn, several
# times in a step; a quarter of a second is what that takes with as many as there are cores.
_MACHINE_S = 0.25


def check(what: str, took_s: float, bound_s: float) -> None:
    """Fail if ``took_s`` is above the bound and what this machine may add now; print both."""
    allowed_s = bound_s + _MACHINE_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    print(f"{what}: {took_s * 1000:.0f} ms (bound {bound_s * 1000:.0f} ms)")
    assert took_s < allowed_s, f"{what}: {took_s:.3f} s, allowed are {allowed_s:.3f} s"
