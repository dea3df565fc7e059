"""A process group that fails on demand."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.operations import WrappedWork
from torchft_svc.client.process_groups.wrappers import ProcessGroupWrapper


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """Forwards everything to ``pg``; each failure that a test requests occurs once."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._configure_error: Exception | None = None
        self._launch_error: Exception | None = None
        self._future_error: Exception | None = None

    def report_configure_error(self, error: Exception) -> None:
        """The next `configure` raises ``error``."""
        self._configure_error = error

    def report_launch_error(self, error: Exception) -> None:
        """The next collective raises ``error`` instead of beginning."""
        self._launch_error = error

    def report_future_error(self, error: Exception) -> None:
        """The next collective is carried out, but waiting for it raises ``error``."""
        self._future_error = error

    def _configure(self, members: Members) -> None:
        error, self._configure_error = self._configure_error, None
        if error is not None:
            raise error
        super()._configure(members)

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        error, self._launch_error = self._launch_error, None
        if error is not None:
            raise error
        work = super()._launch(name, args, kwargs)
        error, self._future_error = self._future_error, None
        return work if error is None else _FailingWork(work, error)


class _FailingWork(WrappedWork):
    """Ends with the operation, and then fails."""

    def __init__(self, work: Any, error: Exception) -> None:
        super().__init__(work)
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation, then raise the requested error."""
        self._work.wait(timeout) if timeout else self._work.wait()
        raise self._error

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that fails once the operation is over."""
        failed: torch.futures.Future[Any] = torch.futures.Future()
        self._work.get_future().add_done_callback(lambda _: failed.set_exception(self._error))
        return failed
