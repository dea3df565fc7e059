"""A step's sums across the groups: launched in order, waited for before the vote."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import ReduceOp

from torchft_svc.client.operations import Kind, Operation
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.reduction import Reduction
from torchft_svc.client.watchdog import Watchdog
from torchft_svc.errors import ConfigError, RequestRefused, TorchFTError

# What a group that does not contribute puts in, so that the result is that of the others.
_NEUTRAL = {ReduceOp.SUM: 0.0, ReduceOp.PRODUCT: 1.0}
# What torch says where no backward pass runs.
NO_GRAPH = -1


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
        *,
        checks_all: bool = False,
    ) -> None:
        self._checks_all = checks_all
        # Whether this is the first step of these members. One that has just come may be elsewhere
        # in its loop, and gloo ends all of them where a sum meets a smaller one.
        self.is_first_step = False
        self._num_launched = 0
        self._watchdog = watchdog
        self._on_wait = on_wait
        self._pg = pg
        self._timeout_s = timeout_s
        self._latch = latch
        self._epoch = 0
        self._outstanding: list[Reduction] = []
        self._passes: set[int] = set()  # in which something was launched, and which go on
        self.launched = False

    def begin(self, epoch: int) -> None:
        """A new step: what is left of the last one is forgotten (the group keeps it alive)."""
        self._epoch = epoch
        self.launched = False
        self.is_first_step = False
        self._num_launched = 0
        self._outstanding = []
        self._passes = set()

    def launch(
        self,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        kind: Kind = Kind.GRADIENTS,
    ) -> Reduction | None:
        """Start reducing ``tensor`` in place; None if that failed, with the error latched.

        The tensor's memory must belong to the operation alone (see `Reduction`).
        """
        self._num_launched += 1
        checks = self._checks_all or (self.is_first_step and tensor.device.type == "cpu")
        if checks and kind is Kind.GRADIENTS:  # an average was compared by `agree`
            operation = Operation.of(self._num_launched, tensor, op, kind)
            if not self._compare(operation, tensor.device):
                return None
        return self._start(tensor, op)

    def agree(
        self, tensor: torch.Tensor, op: ReduceOp.RedOpType, kind: Kind, wrapper: int = -1
    ) -> bool:
        """Whether all groups are about to begin with ``tensor``; if not, the error is latched.

        Not asked on devices, where an operation that does not match ends at its timeout, and
        waiting for the answer would hold up the device.
        """
        if not self._checks_all and tensor.device.type != "cpu":
            return True
        operation = Operation.of(self._num_launched + 1, tensor, op, kind, wrapper)
        return self._compare(operation, tensor.device)

    def _compare(self, mine: Operation, device: torch.device) -> bool:
        if self._pg.size() == 1:
            return True
        epoch = self._epoch
        header = mine.encode(device)
        reduction = self._start(header, ReduceOp.MAX)
        if reduction is None or not reduction.wait():
            return False
        theirs = mine.unlike(header)
        if theirs is None:
            return True
        self._latch(
            RequestRefused(
                f"the groups are at different operations of the step. Here: {mine}. In another "
                f"group: {theirs}. Call them in the same order and with the same sizes everywhere"
            ),
            epoch,
        )
        return False

    def _start(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> Reduction | None:
        epoch = self._epoch
        self.launched = True
        self._note_pass()
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
            pg=self._pg,
            on_error=lambda error: self._latch(error, epoch),
            on_wait=self._on_wait,
            watchdog=self._watchdog,
        )
        self._outstanding.append(reduction)
        return reduction

    def unfinished(self) -> Exception | None:
        """Why the step's sums are not all there: a backward pass that launched some has not ended.

        It was ended by an exception: this group's gradients are in some of its sums only.
        """
        return unfinished_pass() if self._passes else None

    def _note_pass(self) -> None:
        """Whoever launches, be it torch's own wrapper: the pass in which that happens must end."""
        graph = torch._C._current_graph_task_id()
        if graph != NO_GRAPH and graph not in self._passes:
            self._passes.add(graph)
            Variable._execution_engine.queue_callback(  # called if the pass ends well
                functools.partial(self._passes.discard, graph)
            )

    def finish(self) -> None:
        """Wait for everything that was launched in this step."""
        for reduction in self._outstanding:
            reduction.wait()
        self._outstanding = []


def unfinished_pass() -> RequestRefused:
    """The error of a step with a backward pass that an exception has ended."""
    return RequestRefused(
        "a backward pass of this step was not finished: after an exception in it begin another "
        "step with zero_grad"
    )


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
