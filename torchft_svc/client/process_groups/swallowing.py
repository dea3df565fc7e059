"""Collectives whose errors do not reach the program that calls them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.operations import IN_PLACE, result_of
from torchft_svc.client.process_groups.wrapper import ProcessGroupWrapper
from torchft_svc.client.work import CompletedWork
from torchft_svc.errors import TorchFTError

log = logging.getLogger(__name__)


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """After the first error every collective succeeds at once, until the group is configured again.

    Such a collective leaves a tensor that is reduced or sent as it is, and fills one that is only
    written to with zeros. For programs that call ``torch.distributed`` themselves and must not
    raise in the middle of a step: look at `error` before its result is used.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._first_error: Exception | None = None

    def _configure(self, members: Members) -> None:
        """Forgets the error."""
        self._first_error = None
        super()._configure(members)

    def error(self) -> Exception | None:
        """The first error since the group was configured, or None."""
        return self._first_error

    def errored(self) -> Exception | None:
        """The first error since the group was configured, or why it cannot be used."""
        return self._first_error or super().errored()

    def report_error(self, error: Exception) -> None:
        """Act from here on as if a collective had failed with ``error``; the first one counts."""
        if self._first_error is None:
            log.warning("collectives are left out until the next quorum: %s", error)
            self._first_error = error

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        def skip() -> CompletedWork:
            result = result_of(name, args, kwargs)
            if name not in IN_PLACE:
                for tensor in result:
                    tensor.detach().zero_()
            return CompletedWork(result)

        if self._first_error is not None:
            return skip()
        try:
            work = super()._launch(name, args, kwargs)
        except (RuntimeError, TorchFTError) as error:
            self.report_error(error)
            return skip()
        return _SwallowingWork(work, self.report_error, skip)


class _SwallowingWork(dist.Work):
    """Reports an error instead of raising it."""

    def __init__(
        self,
        work: Any,
        report: Callable[[Exception], None],
        skip: Callable[[], CompletedWork],
    ) -> None:
        super().__init__()
        self._work = work
        self._report = report
        self._skip = skip

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, whatever it is; always True."""
        try:
            self._work.wait(timeout) if timeout else self._work.wait()
        except (RuntimeError, TorchFTError) as error:
            self._report(error)
        return True

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return bool(self._work.is_completed())

    def synchronize(self) -> None:
        """Order the current stream behind the operation."""
        self._work.synchronize()

    def result(self) -> Any:
        """The tensors; after an error those of a skipped collective."""
        try:
            return self._work.result()
        except (RuntimeError, TorchFTError) as error:
            self._report(error)
            return self._skip().result()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that never fails: after an error it holds what a skipped collective does."""
        done: torch.futures.Future[Any] = torch.futures.Future()

        def settle(source: torch.futures.Future[Any]) -> None:
            try:
                done.set_result(source.value())
            except (RuntimeError, TorchFTError) as error:
                self._report(error)
                done.set_result(self._skip().get_future().value())

        self._work.get_future().add_done_callback(settle)
        return done
