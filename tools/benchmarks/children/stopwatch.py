"""Times the parts of our step, by wrapping the methods that do them (about 1 us a call)."""

from __future__ import annotations

import functools
import importlib
import time
from typing import Any

from tools.benchmarks.children.phases import PARTS

# Where each part's method is, as ``module:Class.method``; after the first place, those of packages
# from before, which the same benchmarks measure.
_METHODS: dict[str, tuple[str, ...]] = {
    "begin": ("client.manager:Manager.start_quorum",),
    "await_quorum": (
        "client.step.sums:StepSums.scale",
        "client.manager:Manager.reduction_scale",
    ),
    "fill": ("client.gradients.buckets:Bucket.fill", "client.buckets:Bucket.fill"),
    "launch": (
        "client.step.sums:StepSums.launch_sum",
        "client.manager:Manager._launch_gradients",
        "client.manager:Manager.launch_sum",
    ),
    "await_sums": ("client.reduce.reduction:Reduction.wait", "client.reduction:Reduction.wait"),
    "hand_out": ("client.gradients.buckets:Bucket.hand_out", "client.buckets:Bucket.hand_out"),
    "vote": ("client.step.stepper:Stepper.decide", "client.stepper:Stepper.decide"),
    "ask": ("coordination:ManagerClient.ask", "coordination:ManagerClient._quorum"),
}


class Stopwatch:
    """Adds up, from its making on, the time that each part takes in this process."""

    def __init__(self) -> None:
        self._spent_ns = dict.fromkeys(PARTS, 0)
        for part, places in _METHODS.items():
            for owner, name in filter(None, map(_find, places)):
                setattr(owner, name, self._timed(part, getattr(owner, name)))
                break

    def lap(self) -> dict[str, float]:
        """Milliseconds of each part since the last call."""
        spent_ns, self._spent_ns = self._spent_ns, dict.fromkeys(PARTS, 0)
        return {part: ns / 1e6 for part, ns in spent_ns.items()}

    def _timed(self, part: str, method: Any) -> Any:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_ns = time.perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self._spent_ns[part] += time.perf_counter_ns() - began_ns

        return timed


def _find(place: str) -> tuple[type, str] | None:
    """The class and the name of the method; None if the package does not have it there."""
    module, _, path = place.partition(":")
    owner, _, name = path.partition(".")
    try:
        found: type = getattr(importlib.import_module(f"torchft_svc.{module}"), owner)
    except ModuleNotFoundError:
        return None
    return (found, name) if hasattr(found, name) else None
