"""Prints when each part of a program's start is over."""

from __future__ import annotations

import time


def print_stage(name: str) -> None:
    """Write ``stage NAME AT_NS CPU_NS``: the instant, and the CPU time of this process so far."""
    print(f"stage {name} {time.monotonic_ns()} {time.process_time_ns()}", flush=True)
