"""A step's sums across the groups: launched in order, waited for before the vote."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.reduction import Reduction
from torchft_svc.client.watchdog import Watchdog
from torchft_svc.errors import ConfigError, TorchFTError

# What a group that does not contribute puts in, so that the result is that of the others.
_NEUTRAL = {ReduceOp.SUM: 0.0, ReduceOp.PRODUCT: 1.0}


class Collectives:
    """Launches on ``pg`` on behalf of one step after another; ``latch`` hears of errors.

    ``latch(error, epoch)`` is called at most once for every operation; ``on_wait`` hears that a
    wait for one gets long (True), and that it is over (False).
    """

    def __init__(
        self,
        pg: ProcessGroup,
        timeout_s: float,
        latch: Callable[[Exception, int], None],
        on_wait: Callable[[bool], None],
        watchdog: Watchdog,
    ) -> None:
        self._watchdog = watchdog
        self._on_wait = on_wait
        self._pg = pg
        self._timeout_s = timeout_s
        self._latch = latch
        self._epoch = 0
        self._outstanding: list[Reduction] = []
        self.launched = False

    def begin(self, epoch: int) -> None:
        """A new step: what is left of the last one is forgotten (the group keeps it alive)."""
        self._epoch = epoch
        self.launched = False
        self._outstanding = []

    def launch(
        self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM
    ) -> Reduction | None:
        """Start reducing ``tensor`` in place; None if that failed, with the error latched.

        The tensor's memory must belong to the operation alone (see `Reduction`).
        """
        epoch = self._epoch
        self.launched = True
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        try:
            work = self._pg.allreduce([tensor], options)
        except (RuntimeError, TorchFTError) as error:
            self._latch(error, epoch)
            return None
        reduction = Reduction(
            tensor,
            work,
            self._timeout_s,
            on_error=lambda error: self._latch(error, epoch),
            is_given_up=lambda: self._pg.errored() is not None,
            on_wait=self._on_wait,
            watchdog=self._watchdog,
        )
        self._outstanding.append(reduction)
        return reduction

    def finish(self) -> None:
        """Wait for everything that was launched in this step."""
        for reduction in self._outstanding:
            reduction.wait()
        self._outstanding = []


def neutral_element(op: ReduceOp.RedOpType, dtype: torch.dtype) -> float | int:
    """What a group that does not contribute puts into a reduction by ``op``.

    Raises:
        ConfigError: there is no such value.
    """
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        sign = -1 if op == ReduceOp.MAX else 1
        if dtype.is_floating_point:
            return sign * float("inf")
        limits = torch.iinfo(dtype)
        return limits.min if op == ReduceOp.MAX else limits.max
    if op not in _NEUTRAL:
        raise ConfigError("reduce_op", str(op), "use AVG, SUM, MAX, MIN or PRODUCT")
    return _NEUTRAL[op]
