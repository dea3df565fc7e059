"""Process groups that change the behavior of another process group."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.operations import (
    CompletedWork,
    WrappedWork,
    ends_within,
    result_of,
)
from torchft_svc.errors import TorchFTError

log = logging.getLogger(__name__)

# Only one member writes its result, or all but one do.
_FROM_OR_TO_ROOT = frozenset({"broadcast", "reduce"})


def _asked_of_wrapped(name: str) -> Callable[..., Any]:
    """The method ``name`` of a wrapper: that of the wrapped group."""

    def ask(self: ProcessGroupWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._pg, name)(*args, **kwargs)

    ask.__name__ = name
    return ask


class ProcessGroupWrapper(ProcessGroup):
    """Forwards everything to ``pg``; subclasses override what they change."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg._timeout)
        self._pg = pg

    @property
    def parent(self) -> ProcessGroup:
        return self._pg

    def _configure(self, members: Members) -> None:
        self._pg.configure(**dataclasses.asdict(members))

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        return getattr(self._pg, name)(*args, **kwargs)  # users may have overridden it

    @property
    def needs_all_members(self) -> bool:
        return self._pg.needs_all_members

    @property
    def sums_exactly(self) -> bool:
        return self._pg.sums_exactly

    # What a group is asked for besides collectives.
    prepare = _asked_of_wrapped("prepare")
    abort = _asked_of_wrapped("abort")
    cut = _asked_of_wrapped("cut")
    errored = _asked_of_wrapped("errored")
    reduces_on = _asked_of_wrapped("reduces_on")
    shutdown = _asked_of_wrapped("shutdown")
    lose_member = _asked_of_wrapped("lose_member")
    interrupt = _asked_of_wrapped("interrupt")
    tidy = _asked_of_wrapped("tidy")
    record_to = _asked_of_wrapped("record_to")
    save_record = _asked_of_wrapped("save_record")
    set_timeout = _asked_of_wrapped("set_timeout")
    rank = _asked_of_wrapped("rank")
    size = _asked_of_wrapped("size")


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """Collectives that fail without raising; for programs that must not raise within a step.

    A failed collective, and all later ones until the group is configured again, end successfully,
    and their result tensors hold zeros, also those that are reduced in place or filled by a
    broadcast. Tensors that are only read stay unchanged: what is sent, the root's tensor of a
    broadcast, and the tensors of a reduction except at the root. `error` returns the first error.
    Under a `Manager` it is an error of the step, which is then discarded.

    A ``wait(timeout)`` that times out is no failure of the operation: it raises RuntimeError, as
    for any group, and the operation continues. (Gloo aborts a receive, a send and a reduce-scatter
    in this case, so these fail.) A ``wait()`` ends with the operation, at the group's own timeout
    at the latest.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._first_error: Exception | None = None

    def _configure(self, members: Members) -> None:
        """See `ProcessGroup.configure`; clears the error."""
        self._first_error = None
        super()._configure(members)

    def error(self) -> Exception | None:
        """The first error since the group was configured, or None."""
        return self._first_error

    def errored(self) -> Exception | None:
        """The first error since the group was configured, or why it cannot be used."""
        return self._first_error or super().errored()

    def report_error(self, error: Exception) -> None:
        """Act from now on as if a collective had failed with ``error``; the first one counts."""
        if self._first_error is None:
            log.warning("collectives are skipped until the next quorum: %s", error)
            self._first_error = error

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        def skip() -> CompletedWork:
            result = result_of(name, args, kwargs)
            if _writes(name, args, kwargs, self.rank()):
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
        return _SwallowingWork(work, result_of(name, args, kwargs), self.report_error, skip)


class _SwallowingWork(WrappedWork):
    """Reports an error instead of raising it."""

    def __init__(
        self,
        work: Any,
        results: list[torch.Tensor],
        report: Callable[[Exception], None],
        skip: Callable[[], CompletedWork],
    ) -> None:
        super().__init__(work)
        self._results = results
        self._report = report
        self._skip = skip

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, successful or not; always True.

        Raises:
            RuntimeError: the operation has not ended within ``timeout``.
        """
        try:
            if not timeout:
                self._work.wait()
                return True
            is_over = ends_within(self._work, timeout)
        except (RuntimeError, TorchFTError) as error:
            self._fail(error)
            return True
        if not is_over:
            limit_s = timeout.total_seconds()
            raise dist.DistBackendError(f"a collective is not over after {limit_s:.3g} s")
        return True

    def result(self) -> Any:
        """The result tensors; zeros after an error."""
        try:
            return self._work.result()
        except (RuntimeError, TorchFTError) as error:
            return self._fail(error).result()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that never fails: after an error it holds the zeroed tensors.

        If the operation has no future, such as gloo's reduce-scatter, this waits for the end.
        """
        done: torch.futures.Future[Any] = torch.futures.Future()

        def complete(source: torch.futures.Future[Any]) -> None:
            try:
                done.set_result(source.value())
            except (RuntimeError, TorchFTError) as error:
                done.set_result(self._fail(error).result())

        try:
            future = self._work.get_future()
        except (RuntimeError, TorchFTError):
            self.wait()
            done.set_result(self._results)
        else:
            future.add_done_callback(complete)
        return done

    def _fail(self, error: Exception) -> CompletedWork:
        """Report ``error``, and return the work of a skipped operation."""
        # The frames of its traceback hold the work, which keeps connections open whose end the
        # other members wait for.
        self._report(error.with_traceback(None))
        return self._skip()


def _writes(name: str, args: Any, kwargs: Any, rank: int) -> bool:
    """Whether collective ``name`` writes to its first argument on the member of this ``rank``."""
    if name not in _FROM_OR_TO_ROOT:
        return name != "send"
    given = args[1] if len(args) > 1 else kwargs.get("opts", kwargs.get("root", 0))
    is_root = getattr(given, "rootRank", given) == rank
    return bool(is_root == (name == "reduce"))
