"""Waits for a reduction across groups that is under way."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from traceback import clear_frames
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from torchft_svc.client.process.watchdog import Watchdog
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.operations import ends_within
from torchft_svc.client.reduce.wait_times import WaitTimes
from torchft_svc.errors import DeadlineExceeded, MemberLost, PeerError, QuorumFailed
from torchft_svc.host.abandoned import drop_later
from torchft_svc.host.uninterruptible import SLICE, SLICE_S


class Reducing(Protocol):
    """Sums gradients in the backward pass, and is registered with the manager.

    ``layout``: a printable sentence on what it sums, with a digest. A group with another layout is
    refused. Empty: nothing is compared. ``has_averaged``: whether it has averaged its parameters'
    gradients in the present step; before that, what ``grad`` holds is not of this step.
    """

    layout: str
    has_averaged: bool

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients it sums, in the same order on every group.

        Their ``requires_grad`` is part of the state that groups heal by.
        """

    @property
    def names(self) -> Sequence[str]:
        """The names of the parameters that it sums, in the model's order.

        Only for the error of a group that differs: ``layout`` has a digest of them. Empty: not
        known.
        """

    def replaced(self) -> list[str]:
        """Names of the parameters that it sums, but that the model has replaced by others."""

    def unsummed(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters of its model, with their names, that have a gradient which it does not sum.

        The model has got them, or has begun to train them, since it was wrapped.
        """

    def average_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The average of the parameter's gradient in this step, if the reducer still has it."""

    def begin_step(self) -> None:
        """Begin a step, in which nothing is averaged yet. Called on the training thread."""

    def settle_step(self) -> Exception | None:
        """End the step: abandon an unfinished backward pass, and return an error if there was one.

        Called on the training thread, outside of a backward pass.
        """


class Again(enum.Enum):
    """What follows for the sums of a step that a loss has ended; see `StepSums.sum_again`."""

    NO = "no"  # the step is discarded
    NOW = "now"  # they are launched again
    LATER = "later"  # after further backward passes of this step


class CurrentParameter(NamedTuple):
    """A parameter that a model trains now, by its name in the model.

    ``is_wrapped``: it is the object whose gradient is summed; if not, it has replaced that one.
    """

    name: str
    parameter: torch.Tensor
    is_wrapped: bool


@runtime_checkable
class Walking(Protocol):
    """A `Reducing` that knows its model, whose state is compared with the other groups'."""

    def walk_parameters(self) -> list[CurrentParameter]:
        """The parameters that the model trains now, in its order."""


class Launching(Reducing, Protocol):
    """Launches the sums of a backward pass one by one during the pass; see `StepSums.take_turn`.

    ``first`` is the first tensor that it sums, ``graph`` torch's id of the pass.
    """

    graph: int

    @property
    def first(self) -> torch.Tensor: ...

    def is_launching(self) -> bool:
        """Whether some of the pass's sums are launched, but not all."""

    def flush_buckets(self, graph: int) -> None:
        """Launch the remaining sums now, if its pass is ``graph``, which has ended."""


class Reduction:
    """A reduction of ``pg`` that is under way in ``tensor``.

    ``on_error`` is called once if it fails, ``on_wait`` when a wait becomes long (True) and at its
    end (False); ``times`` counts all waits. An error of ``pg`` ends the wait early; an error that
    ``pg`` has swallowed is a failure of the reduction. The tensor must not be read before `wait`
    has returned True; after False its memory must never be used again, because the abandoned
    operation may still write to it.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        work: Any,
        timeout_s: float,
        *,
        pg: ProcessGroup,
        on_error: Callable[[Exception], None],
        on_wait: Callable[[bool], None],
        watchdog: Watchdog,
        times: WaitTimes,
    ) -> None:
        self._watchdog = watchdog
        self._times = times
        self._on_wait = on_wait
        self.tensor = tensor
        self._work = work
        self._pg = pg
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._on_error: Callable[[Exception], None] | None = on_error
        self._ok = work is None

    def wait(self) -> bool:
        """Whether the tensor holds the result; idempotent."""
        if self._work is None:
            return self._ok
        try:
            left_s = max(0.0, self._deadline - time.monotonic())
            began = self._times.begin_wait(self.tensor)
            with self._watchdog.watching("a collective to end", left_s):
                self._wait_in_slices()
            self._times.end_wait(self.tensor, began)
            swallowed = self._pg.failure()
            if swallowed is None:
                self._ok = True
            else:
                self._fail(swallowed)
        except (RuntimeError, PeerError) as error:
            clear_frames(error.__traceback__)  # they hold the work, and the error is kept
            self.abandon()
            self._fail(error)
        except BaseException as error:
            self.abandon()
            self._fail(QuorumFailed(f"the wait for a collective was interrupted ({error!r})"))
            raise
        finally:
            # The work keeps connections open whose end the other groups wait for.
            self._work = None
        return self._ok

    def abandon(self) -> None:
        """Wait no longer: the members were left.

        While the work exists, it keeps connections open whose end the other groups wait for. `wait`
        returns False unless it has returned before.
        """
        if self._work is not None:
            held, self._work = [self._work], None
            drop_later(held)

    def is_over(self) -> bool:
        """Whether the tensor is known to hold the result; does not wait."""
        work = self._work
        if work is None:
            return self._ok
        return bool(work.is_completed()) and work.exception() is None

    def _wait_in_slices(self) -> None:
        """Wait in short slices, so that signals are handled.

        Raises:
            DeadlineExceeded: it has not ended in time.
            QuorumFailed: the process group has failed.
            RuntimeError: it failed.
        """
        is_long = False
        try:
            while not self._is_over_after_a_slice():
                if not is_long:
                    is_long = True
                    self._on_wait(True)
        finally:
            if is_long:
                self._on_wait(False)

    def _is_over_after_a_slice(self) -> bool:
        left_s = self._deadline - time.monotonic()
        # A timeout of 0 would mean no limit.
        limit = SLICE if left_s > SLICE_S else timedelta(seconds=max(0.001, left_s))
        if ends_within(self._work, limit):
            return True
        broken = self._pg.errored()
        if isinstance(broken, MemberLost):
            raise QuorumFailed(broken.reason)
        if broken is not None:
            raise QuorumFailed("the step was given up")
        if left_s <= 0:
            raise DeadlineExceeded(
                "a collective", self._timeout_s, "another group does not take part"
            )
        return False

    def _fail(self, error: Exception) -> None:
        report, self._on_error = self._on_error, None
        if report is not None:
            report(error)


class ManagedWork(dist.Work):
    """The work of `Manager.allreduce`: its error is latched by the manager, never raised."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        super().__init__()
        self._finish: Callable[[], Any] | None = finish
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
        """Wait for the tensor, and return a future that holds it.

        The wait comes first, because an error of the step does not reach the waiters of a future.
        """
        self.wait()
        return self._future
