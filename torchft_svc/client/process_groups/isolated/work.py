"""A collective that runs in another process."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchft_svc.client.process_groups.isolated.segments import Loan, StreamWait


class IsolatedWork(dist.Work):
    """``results`` are copied from the segment of ``loan``, or are in shared memory themselves.

    On the host the copy happens when the operation has ended; a failed or abandoned operation
    writes nothing to them. On a device the copy is queued behind the operation once that has
    started: then ``wait()`` orders the current stream, as torch's own does, and ``wait(timeout)``
    also blocks the caller until the operation has ended.

    Args:
        copied: those of ``results`` that are the first tensors of ``loan``.
        limit_s: the longest ``wait()``.
    """

    def __init__(
        self,
        results: list[torch.Tensor],
        copied: list[torch.Tensor],
        loan: Loan,
        limit_s: float,
    ) -> None:
        super().__init__()
        self._results = results
        self._copied = copied
        self._loan: Loan | None = loan
        self._limit_s = limit_s
        self._order: StreamWait | None = None
        self._taken = threading.Event()
        self._over = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def take(self) -> None:
        """Copy the results from the segment."""
        loan = self._loan
        assert loan is not None, "taken before it is settled"
        with torch.no_grad():
            pairs = list(zip(self._copied, loan.tensors(), strict=False))
            self._order = loan.segment.take(pairs)
        self._taken.set()

    @property
    def error(self) -> Exception | None:
        return self._error

    @property
    def is_taken(self) -> bool:
        """Whether the results have been copied, or the copy is queued on the device."""
        return self._taken.is_set()

    def settle(self, error: Exception | None) -> None:
        """The operation has ended; its results were copied unless it failed."""
        with self._lock:
            self._error = error
            self._loan = None  # a work that is kept must not keep the memory
            self._over.set()
            self._taken.set()
            future = self._future
        if future is not None:
            self._fulfil(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results.

        Raises:
            RuntimeError: it failed, or timed out; then `is_completed` is False.
        """
        limit_s = timeout.total_seconds() if timeout else self._limit_s
        if not (self._over if timeout else self._taken).wait(limit_s):
            raise dist.DistBackendError(f"a collective is not over after {limit_s:.3g} s")
        if self._error is not None:
            raise dist.DistBackendError(str(self._error)) from self._error
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Order the current stream behind the results."""
        if self._order is not None:
            self._order()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                devices = {tensor.device for tensor in self._results if tensor.is_cuda}
                self._future = torch.futures.Future(devices=list(devices))
                if self._over.is_set():
                    self._fulfil(self._future)
            return self._future

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            self.synchronize()  # the future passes this thread's stream on to its waiters
            future.set_result(self._results)
        else:
            future.set_exception(self._error)
