"""Times the parts of our step, by wrapping the methods that do them (about 1 us a call)."""

from __future__ import annotations

import functools
import time
from typing import Any

from benchmarks.children.phases import PARTS
from torchft_svc.client import Manager
from torchft_svc.client.gradients.buckets import Bucket
from torchft_svc.client.reduce.reduction import Reduction
from torchft_svc.client.step.stepper import Stepper
from torchft_svc.coordination import ManagerClient

_METHODS: dict[str, tuple[type, str]] = {
    "begin": (Manager, "start_quorum"),
    "await_quorum": (Manager, "reduction_scale"),
    "fill": (Bucket, "fill"),
    "launch": (Manager, "launch_sum"),
    "await_sums": (Reduction, "wait"),
    "hand_out": (Bucket, "hand_out"),
    "vote": (Stepper, "decide"),
    "ask": (ManagerClient, "_quorum"),
}


class Stopwatch:
    """Adds up, from its making on, the time that each part takes in this process."""

    def __init__(self) -> None:
        self._spent_ns = dict.fromkeys(PARTS, 0)
        for part, (owner, name) in _METHODS.items():
            if method := getattr(owner, name, None):  # a package from before may have another name
                setattr(owner, name, self._timed(part, method))

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
