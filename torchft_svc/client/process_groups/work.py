"""What a collective hands back: something to wait for that never raises into the model's code."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class CompletedWork(dist.Work):
    """A collective that is over already; ``value`` is its result."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self._value = value
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(value)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True, at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def result(self) -> Any:
        """``value``."""
        return self._value

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that holds the result."""
        return self._future


class ManagedWork(dist.Work):
    """What `Manager.allreduce` returns: its error is latched by the manager, never raised."""

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor holds the result, or the step's error is latched; always True."""
        if self._finish is not None:
            value = self._finish()
            self._finish = None  # not before: a wait that is interrupted may be repeated
            self._future.set_result(value)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has been called."""
        return self._finish is None

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that holds the tensor. Waits for it first: who waits for a future cannot be told
        of an error of the step."""
        self.wait()
        return self._future
