"""How an operation on a device is waited for, with and without the CPU."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchft_svc.errors import QuorumFailed

# A collective that is over so soon is noticed at once; later, sleeping costs less than it saves.
_SPIN_S = 0.0003
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 0.00005, 0.0002
# For one that is over; without a time, only the stream would wait.
_OVER = timedelta(seconds=1)


class DeviceWork(dist.Work):
    """An operation on the device's own stream for collectives, among the members of ``link``."""

    def __init__(self, work: Any, link: Any) -> None:
        super().__init__()
        self._work = work
        self._link = link

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Without a time: order the current stream behind the operation. Else: wait here.

        Raises:
            RuntimeError: it failed, or is not over in time; `is_completed` tells which.
            QuorumFailed: the group was left meanwhile.
        """
        if timeout:
            self._wait_on_cpu(timeout.total_seconds())
        # Looked at after the end: an aborted operation ends, too.
        self._check()
        if not timeout:
            self._work.synchronize()  # torch's wait would hold up the CPU here
            return True
        return bool(self._work.wait())

    def is_completed(self) -> bool:
        """Whether it is over on the device, or has failed.

        While its communicator is taken down, torch would answer at the end of that only, and hold
        the interpreter's lock until then: it is not asked any more.
        """
        if self._link.left:
            return bool(self._link.is_down())
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it is over and has not failed; torch's own refuses to tell."""
        if not self.is_completed():
            return False
        try:
            return self.wait(_OVER)
        except (RuntimeError, QuorumFailed):
            return False

    def synchronize(self) -> None:
        """Order the current stream behind the operation."""
        self._work.synchronize()

    def result(self) -> Any:
        """The tensors."""
        return self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """Torch's own; its callbacks run on a stream behind the operation."""
        future: torch.futures.Future[Any] = self._work.get_future()
        return future

    def _check(self) -> None:
        if self._link.left:
            raise QuorumFailed("the process group was left while a collective was under way")

    def _wait_on_cpu(self, timeout_s: float) -> None:
        """Torch's own timed wait would abort the communicator when the time is over."""
        began_at = time.monotonic()
        sleep_s = _FIRST_SLEEP_S
        while not self.is_completed():
            self._check()
            waited_s = time.monotonic() - began_at
            if waited_s >= timeout_s:
                raise dist.DistBackendError(f"a collective is not over after {timeout_s:.3g} s")
            if waited_s > _SPIN_S:
                time.sleep(min(sleep_s, timeout_s - waited_s))
                sleep_s = min(sleep_s * 1.2, _LONGEST_SLEEP_S)
