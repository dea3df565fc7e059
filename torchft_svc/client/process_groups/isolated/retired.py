"""Ends processes, and keeps the memory that was shared with them until they are gone."""

from __future__ import annotations

import contextlib
import threading
import time

from torchft_svc.client.process_groups.isolated.messages import Abort
from torchft_svc.client.process_groups.isolated.process import ChildProcess
from torchft_svc.client.process_groups.isolated.segments import Pool
from torchft_svc.errors import QuorumFailed

# An operation on a device that is aborted ends in about ten milliseconds. One that is killed may
# leave the streams behind it waiting, so it is aborted first.
ABORT_S = 0.3


class Retired:
    """Processes that were killed, each with its pool.

    Until a process is gone, its device may still write to the memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[ChildProcess, Pool]] = []

    def end(self, child: ChildProcess, pool: Pool) -> None:
        """Kill ``child``, and free ``pool`` as soon as nobody uses it."""
        if not pool.on_device:
            child.kill()
            pool.close()  # the system keeps it as long as the process does
            return
        with contextlib.suppress(QuorumFailed):  # it has ended
            child.send(Abort())
        child.wait_until_idle(ABORT_S)
        child.kill(wait_s=0)
        pool.release()
        with self._lock:
            self._kept.append((child, pool))
        self.clear()

    def clear(self) -> None:
        """Free what nobody uses any more; cheap."""
        with self._lock:
            over = [(c, p) for c, p in self._kept if c.is_gone and p.is_idle()]
            self._kept = [entry for entry in self._kept if entry not in over]
        for _, pool in over:
            pool.close()

    def close(self, timeout_s: float) -> None:
        """Free what can be freed within ``timeout_s``; the rest goes with the trainer."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            kept = list(self._kept)
        for child, _ in kept:
            child.kill(wait_s=max(0.0, deadline - time.monotonic()))
        self.clear()
