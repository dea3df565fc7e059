"""A collective that another process carries out."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchft_svc.client.process_groups.isolated.segments import Loan


class IsolatedWork(dist.Work):
    """``results`` get their values from the shared memory once the operation is over.

    Nothing is written to them before, nor by an operation that has failed or was abandoned.
    """

    def __init__(self, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._results = results
        self._over = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def take(self, loan: Loan) -> None:
        """Fetch the results, which are the first tensors of ``loan``."""
        with torch.no_grad():
            for result, shared in zip(self._results, loan.tensors(), strict=False):
                result.copy_(shared)

    def settle(self, error: Exception | None) -> None:
        """The operation is over, and its results, if it has not failed, are taken."""
        with self._lock:
            self._error = error
            self._over.set()
            future = self._future
        if future is not None:
            self._fulfil(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results.

        Raises:
            RuntimeError: it failed, or is not over in time; `is_completed` tells which.
        """
        limit_s = timeout.total_seconds() if timeout else None
        if not self._over.wait(limit_s):
            raise dist.DistBackendError(f"a collective is not over after {limit_s:.3g} s")
        if self._error is not None:
            raise dist.DistBackendError(str(self._error)) from self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether it is over and has not failed."""
        return self._over.is_set() and self._error is None

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that holds the results."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._over.is_set():
                    self._fulfil(self._future)
            return self._future

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)
