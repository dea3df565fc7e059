"""A step's sums across the groups: launched in order, waited for before the vote."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import ReduceOp

from torchft_svc.client.operations import Kind, Operation
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.reduction import Reduction
from torchft_svc.client.watchdog import Watchdog
from torchft_svc.errors import ConfigError, OperationsDiffer, RequestRefused, TorchFTError

# What a group that does not contribute puts in, so that the result is that of the others.
_NEUTRAL = {ReduceOp.SUM: 0.0, ReduceOp.PRODUCT: 1.0}
# What torch says where no backward pass runs.
NO_GRAPH = -1


def _no() -> bool:
    return False


def _yes() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Meeting:
    """What is known of a step's members once they have met: whether this is their first step, and
    whether this group is settled among them (see `StepState`)."""

    is_first_step: Callable[[], bool] = _no
    is_settled: Callable[[], bool] = _yes


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Of the operation that this group is at with those of the others; under way in ``header``."""

    mine: Operation
    is_settled: bool
    header: torch.Tensor
    reduction: Reduction


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
        self._meeting = Meeting()
        self._num_launched = 0
        self._num_agreed = 0  # up to which operation all groups were found to be at the same
        self._device: torch.device | None = None  # on which the end of the step is compared
        self._end: _Comparison | None = None
        self._watchdog = watchdog
        self._on_wait = on_wait
        self._pg = pg
        self._timeout_s = timeout_s
        self._latch = latch
        self._epoch = 0
        self._outstanding: list[Reduction] = []
        self._passes: set[int] = set()  # in which something was launched, and which go on
        self.launched = False

    def begin(self, epoch: int, meeting: Meeting) -> None:
        """A new step: what is left of the last one is forgotten (the group keeps it alive)."""
        self._epoch = epoch
        self._meeting = meeting
        self.launched = False
        self._num_launched = self._num_agreed = 0
        self._device = None
        self._end = None
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
        if self._device is None or self._device.type != "cpu":
            self._device = tensor.device
        if self._num_agreed < self._num_launched and self._checks(tensor.device):
            operation = Operation.of(self._num_launched, tensor, op, kind)
            if not self._compare(operation, tensor.device):
                return None
        return self._start(tensor, op)

    def launch_end(self) -> None:
        """Nothing more is launched in this step: where each operation was compared, that is, too.
        `finish` waits for it.

        A group that has launched less would else vote for sums that the others discard, and leave
        them waiting for the rest.
        """
        if self._device is None or not self._checks(self._device):
            return
        broken = self._pg.errored()
        if broken is None:
            self._end = self._begin_comparison(Operation.end(self._num_launched), self._device)
        else:  # a member is gone, of which nobody knows any more whether it had launched the same
            self._latch(broken, self._epoch)

    def _checks(self, device: torch.device) -> bool:
        """Whether every operation on ``device`` is compared before it is launched.

        In the first step of these members: one that has just come may be elsewhere in its loop, and
        gloo ends all of them where a sum meets a smaller one.
        """
        return self._checks_all or (device.type == "cpu" and self._meeting.is_first_step())

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
        if self._pg.size() > 1:
            comparison = self._begin_comparison(mine, device)
            if comparison is None or not self._end_comparison(comparison):
                return False
        self._num_agreed = mine.position
        return True

    def _begin_comparison(self, mine: Operation, device: torch.device) -> _Comparison | None:
        """None: there is nobody to compare with, or that failed, and the error is latched."""
        if self._pg.size() == 1:
            return None
        is_settled = self._meeting.is_settled()
        header = mine.encode(device, is_settled=is_settled)
        reduction = self._start(header, ReduceOp.MAX)
        return None if reduction is None else _Comparison(mine, is_settled, header, reduction)

    def _end_comparison(self, comparison: _Comparison) -> bool:
        """Whether all groups are at the same operation; if not, the error is latched."""
        if not comparison.reduction.wait():
            return False
        mine, is_settled = comparison.mine, comparison.is_settled
        theirs, is_misfit = mine.compare(comparison.header, is_settled=is_settled)
        if theirs is None:
            return True
        self._latch(
            OperationsDiffer(
                f"the groups are at different operations of the step. Here: {mine}. In another "
                f"group: {theirs}. Call them in the same order and with the same sizes everywhere",
                is_misfit,
            ),
            self._epoch,
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
        end, self._end = self._end, None
        if end is not None:
            self._end_comparison(end)


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
