"""A sum across groups that is under way, and how it is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import nn

from torchft_svc.client.process.uninterruptible import SLICE_S
from torchft_svc.client.process.watchdog import Watchdog
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.operations import ends_within
from torchft_svc.errors import DeadlineExceeded, PeerError, QuorumFailed


class Reducing(Protocol):
    """Sums gradients in a step's backward pass; a manager knows all that sum with it.

    ``layout``: what it sums and how, for people, and a digest of all of it, printable and as short
    as a sentence. A group in which it is another one is refused. Empty: nothing is compared.
    """

    layout: str

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Whose gradients it sums, in the same order on every group.

        Which of them are trained (``requires_grad``) heals with the state.
        """

    def settle(self) -> Exception | None:
        """The step ends: give up a backward pass that was not finished, and tell if there was one.

        To be called on the training thread, outside of a backward pass.
        """


class Launching(Reducing, Protocol):
    """Launches the sums of a pass one by one, while it goes on; see `Stepper.take_turn`.

    ``first`` is what it sums first, ``graph`` torch's number of the backward pass.
    """

    graph: int

    @property
    def first(self) -> torch.Tensor: ...

    def is_launching(self) -> bool:
        """Whether some of the pass's sums are launched, but not all."""

    def launch_rest(self, graph: int) -> None:
        """Launch the others now, if its pass is ``graph``, which is over."""


class Reduction:
    """A sum of ``pg`` that is under way in ``tensor``.

    ``on_error`` hears why it failed, once, ``on_wait`` that a wait gets long (True) and is over
    (False). An error of ``pg`` ends the wait early, and one that it has swallowed is a failure of
    the sum, though its work ended well. Until `wait` has returned True nobody may read the
    tensor; after False nobody may ever use its memory again, because the abandoned operation may
    still write to it.
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
    ) -> None:
        self._watchdog = watchdog
        self._on_wait = on_wait
        self.tensor = tensor
        self._work = work
        self._pg = pg
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._on_error: Callable[[Exception], None] | None = on_error
        self._ok = work is None

    def wait(self) -> bool:
        """Whether the tensor holds the sum; may be called twice."""
        if self._work is None:
            return self._ok
        try:
            left_s = max(0.0, self._deadline - time.monotonic())
            with self._watchdog.watching("a collective to end", left_s):
                self._wait_in_slices()
            swallowed = self._pg.failure()
            if swallowed is None:
                self._ok = True
            else:
                self._fail(swallowed)
        except (RuntimeError, PeerError) as error:
            self._fail(error)
        except BaseException as error:
            self._fail(QuorumFailed(f"the wait for a collective was interrupted ({error!r})"))
            raise
        finally:
            # The work keeps the connections open that others need to see closed.
            self._work = None
        return self._ok

    def is_over(self) -> bool:
        """Whether the tensor holds the sum, as far as can be told without waiting."""
        return self._ok or (self._work is not None and _has_succeeded(self._work))

    def _wait_in_slices(self) -> None:
        """Such that signals are heard meanwhile.

        Raises:
            DeadlineExceeded: it is not over in time.
            QuorumFailed: the step was given up.
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
        # A wait of no time would be taken for "no limit".
        if ends_within(self._work, timedelta(seconds=max(0.001, min(SLICE_S, left_s)))):
            return True
        if self._pg.errored() is not None:
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


def _has_succeeded(work: Any) -> bool:
    return bool(work.is_completed()) and work.exception() is None
