"""Launches a step's reductions across the groups in order, and waits for them before the vote."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.distributed import ReduceOp

from torchft_svc.client.process.profiling import profiled
from torchft_svc.client.process.watchdog import Watchdog
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.operations import CompletedWork
from torchft_svc.client.reduce import quantized
from torchft_svc.client.reduce.operations import (
    OF_WRAPPERS,
    Header,
    Kind,
    LaunchOrder,
    Mismatch,
    Operation,
)
from torchft_svc.client.reduce.quantized import (
    Quantization,
    check_quantizable,
    chunk_length,
    decode_chunks,
    encode_chunks,
    resolve_quantization,
    sum_chunks,
)
from torchft_svc.client.reduce.reduction import ManagedWork, Reduction
from torchft_svc.client.reduce.wait_times import WaitTimes
from torchft_svc.core.quorum.worker.step import Participation
from torchft_svc.errors import (
    ConfigError,
    MemberLost,
    OperationsDiffer,
    RequestRefused,
    TorchFTError,
)

log = logging.getLogger(__name__)

# The input of a group that does not contribute: it does not change the result.
_NEUTRAL = {ReduceOp.SUM: 0.0, ReduceOp.PRODUCT: 1.0}
# Comparing with it takes a fifth of the time that asking a device for its type takes.
_CPU = torch.device("cpu")
# Elements that are summed in 8-bit numbers at once: the next ones are encoded, and the ones before
# added up, while these travel. Smaller ones would wait for a link's latency more than they use it.
SEGMENT = 4 << 20
# Torch's id of the backward pass if none runs.
NO_GRAPH = -1
_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Exclude ``function`` from torch.compile.

    For what a program and its backward passes call: in a compiled function (torch.compile of a
    whole step) torch would compile it, too, and fail. Like torch.compiler.disable, but it costs
    next to nothing, and imports no compiler, where nothing is compiled.
    """
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return run  # type: ignore[return-value]


_WISH_LOST = (
    "the process group has lost a small number in a sum with large ones, by which this group asks "
    "the others to let another one join, or this one go; so this costs them a step now. A process "
    "group that compresses what it sums has to say so: see ProcessGroup.sums_exactly"
)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A comparison of this group's operation with those of the others; under way in ``rows``."""

    mine: Header
    rows: torch.Tensor
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class _Admitted:
    """The groups agree on an operation; None: they have agreed on it before."""

    operation: Operation | None


@dataclass(slots=True)
class _Segment:
    """A part of a tensor that is summed in 8-bit numbers, with the two collectives of that.

    ``errors``: see `Collectives.allreduce_quantized`. ``received`` holds this group's chunk of all
    groups after the ``first`` one, ``sent`` the sums of all chunks after the ``second`` one.
    """

    values: torch.Tensor
    errors: torch.Tensor | None
    sent: torch.Tensor
    received: torch.Tensor
    first: Reduction | None = None
    second: Reduction | None = None


class Collectives:
    """Launches the operations of one step after another on ``pg``.

    ``latch(error, epoch)`` is called at most once for every operation; ``on_wait`` is called when a
    wait becomes long (True), and at its end (False); ``times`` counts all waits. ``order`` holds
    the operations that all groups are known to launch; ``checks_all``: compare every operation
    nevertheless. ``between_steps``: the operations follow the end of a step; another group may have
    begun the next one, so what it launches is not known. ``on_mismatch`` is called when a
    comparison shows that this group differed from another one in an earlier step. ``wish`` returns
    whether this group wants a question before the next step, and is summed with the first operation
    of each step whose groups may keep their quorum (rule E2).
    """

    def __init__(
        self,
        pg: ProcessGroup,
        timeout_s: float,
        latch: Callable[[Exception, int], None],
        on_wait: Callable[[bool], None],
        watchdog: Watchdog,
        *,
        order: LaunchOrder,
        times: WaitTimes,
        checks_all: bool = False,
        between_steps: bool = False,
        wish: Callable[[], bool] | None = None,
        on_mismatch: Callable[[Mismatch], None] = lambda _: None,
    ) -> None:
        self._order = order
        self._on_mismatch = on_mismatch
        self._between_steps = between_steps
        self._wish = wish
        self._carriers: list[torch.Tensor] = []  # of the wishes in this step
        self._own_wishes = 0.0  # this group's part in their sum
        self._checks_all = checks_all
        self._num_launched = 0
        self._num_agreed = 0  # position up to which all groups have the same operations
        self._device: torch.device | None = None  # device for the comparison at the end of the step
        self._end: _Comparison | None = None
        self._unread: list[_Comparison] = []  # not waited for so far
        self._watchdog = watchdog
        self._times = times
        self._on_wait = on_wait
        self._pg = pg
        self._timeout_s = timeout_s
        self._latch = latch
        self._epoch = 0
        self._outstanding: list[Reduction] = []
        self._works: list[ManagedWork] = []  # of `allreduce`
        self.has_averages = False  # whether the program has called `allreduce` in this step
        # Backward passes that launched operations and have not ended.
        self._passes: set[int] = set()
        self.launched = False

    def begin_step(self, epoch: int) -> None:
        """Begin a new step; operations left of the last one are dropped (the group keeps them)."""
        self._epoch = epoch
        self.launched = False
        self._num_launched = self._num_agreed = 0
        self._carriers, self._own_wishes = [], 0.0
        self._device = None
        self._end = None
        self._unread = []
        self._outstanding = []
        self._works = []
        self.has_averages = False
        self._passes = set()

    @property
    def num_launched(self) -> int:
        """How many operations this step has launched, failed ones included."""
        return self._num_launched

    @property
    def has_device(self) -> bool:
        """Whether an operation was launched, so that its device is known."""
        return self._device is not None

    def allreduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType,
        participation: Participation,
        kind: Kind = Kind.AVERAGE,
        *,
        part: float | None = None,
    ) -> dist.Work:
        """Start reducing a copy of ``tensor``; the work's ``wait`` copies the result back, whether
        the tensor is part of a graph of autograd or not.

        So an abandoned operation cannot corrupt the tensor. ``part``: the weight of this group in
        an average (None: all groups have the same).
        """
        values = tensor.detach()
        copy = torch.empty_like(values, memory_format=torch.contiguous_format)
        _write_contribution(values, copy, op, participation, part)
        reduction = self.launch(copy, _sent_op(op), kind, op)
        if reduction is None:
            return CompletedWork(tensor)

        def finish() -> torch.Tensor:
            if reduction.wait():
                values.copy_(copy)
            return tensor

        self.has_averages |= kind is Kind.AVERAGE
        self._works.append(ManagedWork(finish))
        return self._works[-1]

    def allreduce_quantized(
        self,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType,
        participation: Participation,
        quantization: Quantization,
        *,
        part: float | None = None,
        errors: torch.Tensor | None = None,
    ) -> dist.Work:
        """Start reducing a copy of ``tensor`` in 8-bit numbers, as `allreduce`.

        The first of its two collectives begins at once. The second one begins in the work's
        ``wait``, so all groups have to wait for such works in the same order.

        ``errors``: float32 of shape (numel,), what earlier results lack because of this group's
        rounding. It is added to what this group contributes, and holds what is lacking then once
        the work is over. A group that does not contribute keeps it as it is.
        """
        values = tensor.detach()
        kind = Kind.INT8 if quantization is Quantization.INT8 else Kind.FLOAT8
        kept = errors if _contributes(op, participation, part) else None
        if self._pg.size() == 1 or not tensor.numel():  # nothing travels that could be encoded
            if kept is not None:
                values.add_(kept.view(values.shape))
                kept.zero_()
            return self.allreduce(tensor, op, participation, kind, part=part)
        admitted = self._begin_operation(values, op, kind)
        if admitted is None:
            return CompletedWork(tensor)
        flat = values.contiguous().view(-1)  # the same memory, if that is possible
        segments: list[_Segment] = []
        write = functools.partial(
            _write_contribution, op=op, participation=participation, part=part
        )
        for segment in _encode_segments(flat, kept, write, quantization, self._pg.size()):
            segments.append(segment)
            if not self._launch_segment(segment, admitted.operation):
                return CompletedWork(tensor)

        def finish() -> torch.Tensor:
            if self._sum_segments(segments, quantization) and not values.is_contiguous():
                values.copy_(flat.view(values.shape))
            return tensor

        self.has_averages = True
        self._works.append(ManagedWork(finish))
        return self._works[-1]

    def _launch_segment(self, segment: _Segment, operation: Operation | None) -> bool:
        """Send each group its chunk of a segment; False: that failed, and the error was latched."""
        sent, received = segment.sent, segment.received
        arguments: tuple[Any, ...] = (received.view(-1), sent.view(-1), [], [])
        segment.first = self._launch(
            received, self._pg.alltoall_base, *arguments, operation=operation
        )
        return segment.first is not None

    def _sum_segments(self, segments: list[_Segment], quantization: Quantization) -> bool:
        """Wait for the sums of all segments, and decode them if none has failed."""
        is_launched = all(self._launch_sum_of_chunk(each, quantization) for each in segments)
        if not is_launched or not all(each.second and each.second.wait() for each in segments):
            return False
        for segment in segments:
            decode_chunks(segment.sent, segment.values, quantization)
        return True

    def _launch_sum_of_chunk(self, segment: _Segment, quantization: Quantization) -> bool:
        """Add up this group's chunk of a segment, and launch what sends the sum to all.

        Once: a wait that is interrupted may be repeated. Returns False if that failed, and the
        error was latched. It does not matter which group makes up for what the sum leaves out: the
        contributions are added up.
        """
        if segment.second is not None:
            return True
        if segment.first is None or not segment.first.wait():
            return False
        chunk = chunk_length(segment.values.numel(), self._pg.size())
        own_errors = left_out = None
        if segment.errors is not None:
            own_errors = segment.errors[chunk * self._pg.rank() :][:chunk]
            left_out = torch.empty_like(own_errors)
        mine = sum_chunks(segment.received, chunk, quantization, left_out)
        if own_errors is not None and left_out is not None:
            own_errors.add_(left_out)
        sent = segment.sent
        segment.second = self._launch(sent, self._pg.allgather, [list(sent.unbind())], [mine])
        return segment.second is not None

    @profiled("torchft::allreduce")
    def launch(
        self,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        kind: Kind = Kind.GRADIENTS,
        called: ReduceOp.RedOpType | None = None,
        carrier: torch.Tensor | None = None,
    ) -> Reduction | None:
        """Start reducing ``tensor`` in place; None if that failed, and the error was latched.

        The tensor's memory must belong to the operation only (see `Reduction`). ``called``: the
        operation that the program requested, if it is not ``op``. ``carrier``: the part of the
        tensor that carries the wish, shape (1,), if it has one.
        """
        admitted = self._begin_operation(tensor, called or op, kind, carrier)
        if admitted is None:
            return None
        options = _SUM if op is ReduceOp.SUM else _options(op)
        return self._launch(
            tensor, self._pg.allreduce, [tensor], options, operation=admitted.operation
        )

    def _begin_operation(
        self,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType,
        kind: Kind,
        carrier: torch.Tensor | None = None,
    ) -> _Admitted | None:
        """Begin the next operation of the step: compare it where that is due, and sum the wish.

        Returns None if that failed, and the error was latched.
        """
        self.launched = True  # first: an interrupt from here on counts as after the launch
        self._num_launched += 1
        if self._device is None or self._device != _CPU:
            self._device = tensor.device
        operation = None
        if self._num_agreed < self._num_launched:
            operation = Operation.of(self._num_launched, tensor, op, kind)
            if not self._admit(operation, tensor.device):
                return None
        if self._wish is not None and not self._add_wish(tensor.device, carrier):
            return None
        return _Admitted(operation)

    def agree_on_states(self) -> bool:
        """Whether all groups have ended the step's operations, and compare their states next; if
        not, the error is latched. After `launch_end`.

        Always compared: the steps before show nothing of it.
        """
        end, self._end = self._end, None
        if end is not None and not self._end_comparison(end):
            return False
        assert self._device is not None
        return self._agree_apart(Operation.states(self._num_launched), self._device)

    def _agree_apart(self, mine: Operation, device: torch.device) -> bool:
        """Whether all groups are at ``mine``, which is no operation of the program."""
        comparison = self._begin_comparison(mine, device)
        if comparison is None or not comparison.reduction.wait():
            return False
        return self._read(comparison) is not None

    def exchange_rows(self, rows: list[list[int]], device: torch.device) -> list[list[int]] | None:
        """The sum over all groups of ``rows``, for a loader that divides a step, waited for.

        None: it failed, and the error was latched. It is no operation of the program.
        """
        if self._pg.size() == 1:
            return rows
        if not self._agree_apart(Operation.shares(self._num_launched), device):
            return None
        return self._sum_rows(rows, device)

    def sum_rows(self, rows: list[list[int]]) -> list[list[int]] | None:
        """The sum over all groups of ``rows``, whole numbers, waited for; None: it failed, and the
        error was latched. After `agree_on_states`."""
        assert self._device is not None
        return self._sum_rows(rows, self._device)

    def _sum_rows(self, rows: list[list[int]], device: torch.device) -> list[list[int]] | None:
        table = torch.tensor(rows, dtype=torch.int64, device=device)
        reduction = self._launch(table, self._pg.allreduce, [table], _SUM)
        if reduction is None or not reduction.wait():
            return None
        summed: list[list[int]] = table.tolist()
        return summed

    def _add_wish(self, device: torch.device, carrier: torch.Tensor | None) -> bool:
        """Sum the wish with the next operation, if that is the first one or has a place for it.

        Returns False if that failed, and the error was latched.
        """
        assert self._wish is not None
        own = float(self._wish())
        if carrier is not None and self._pg.sums_exactly:
            carrier.fill_(own)
            self._carriers.append(carrier)
            self._own_wishes += own
            return True
        if carrier is not None:
            carrier.zero_()
        if self._num_launched > 1 or self._pg.size() == 1:
            return True
        wish = torch.full((1,), own, dtype=torch.float32, device=device)
        self._carriers.append(wish)
        self._own_wishes += own
        return self._launch(wish, self._pg.allreduce, [wish], _SUM) is not None

    def wishes(self) -> tuple[float, bool] | None:
        """The sum of the groups' wishes in this step, after `finish`, and whether the others have
        seen the same (None: nothing was summed)."""
        if not self._carriers:
            return None
        if self._pg.errored() is not None:  # maybe only here, and after the sums had ended
            return 0.0, False
        total = 0.0
        for carrier in self._carriers:
            total += abs(carrier.item())
        if self._own_wishes and total == 0.0:
            log.warning(_WISH_LOST)
            return total, False
        return total, True

    def agree(self, tensor: torch.Tensor, wrapper: int) -> None:
        """Check that all groups begin a pass of ``wrapper`` with the sum of ``tensor``; if not, the
        error is latched."""
        self.launched = True
        position = self._num_launched + 1
        self._admit(
            Operation.of(position, tensor, ReduceOp.SUM, Kind.GRADIENTS, wrapper), tensor.device
        )

    def launch_end(self) -> None:
        """End the operations of this step; if the end is compared, `finish` waits for that.

        Otherwise a group that has launched fewer would vote for sums that the others discard, and
        the others would wait for the rest.
        """
        if self._device is None:
            return
        end = Operation.end(self._num_launched)
        if not self._is_compared(end, self._device):
            self._record_launch(end)
            return
        broken = self._pg.errored()
        if broken is None:
            self._end = self._begin_comparison(end, self._device)
        else:  # whether the lost member had launched the same is not known
            self._latch(broken, self._epoch)

    def _admit(self, mine: Operation, device: torch.device) -> bool:
        """Whether all groups are at this operation; if not, the error is latched.

        Even if that is known, the start of a pass of one of several wrappers is sent, without a
        wait: a group at another operation compares, and so sees at once where the others are. To
        send every operation would cost as much as a small sum for each.
        """
        if self._is_compared(mine, device):
            comparison = self._begin_comparison(mine, device)
            return comparison is not None and self._end_comparison(comparison)
        if mine.wrapper >= 0 and device == _CPU and self._pg.size() > 1:
            comparison = self._begin_comparison(mine, device)
            if comparison is None:
                return False
            self._unread.append(comparison)
        self._record_launch(mine)
        return True

    def _is_compared(self, mine: Operation, device: torch.device) -> bool:
        """Whether ``mine`` is compared: if it is not known that all groups launch it.

        On a device the wait for the answer holds up what the device could do meanwhile. So there it
        is left out where the lighthouse has compared what is summed, and between two steps.
        """
        if self._pg.size() == 1:
            return False
        if self._checks_all:
            return True
        if self._between_steps:
            return device == _CPU
        is_known = self._order.expects(mine)  # asked for each operation: it follows the step
        return not is_known and (device == _CPU or mine.kind not in OF_WRAPPERS)

    def _record_launch(self, mine: Operation) -> None:
        self._num_agreed = mine.position
        self._order.record_launch(mine)

    def _begin_comparison(self, mine: Operation, device: torch.device) -> _Comparison | None:
        """Start to compare; None if that failed, and the error was latched."""
        header = self._order.header(mine)
        row = header.encode(device)
        rows = row.new_empty(self._pg.size(), len(row))
        reduction = self._launch(
            rows, self._pg.allgather, [list(rows.unbind())], [row], operation=mine
        )
        return None if reduction is None else _Comparison(header, rows, reduction)

    def _end_comparison(self, comparison: _Comparison) -> bool:
        """Whether all groups are at the same operation; if not, the error is latched."""
        mine = comparison.mine.operation
        if not comparison.reduction.wait():
            # A reduction between two steps has no place in a step that could be compared.
            others = None if self._between_steps else self._order.instead(mine)
            if others is not None and not isinstance(self._pg.errored(), MemberLost):
                self._latch_difference(mine, f"{others}, as in the step before")
            return False
        headers = self._read(comparison)
        if headers is None:
            return False
        self._order.record_agreement(mine, [header.pattern for header in headers])
        self._record_launch(mine)
        return True

    def _read(self, comparison: _Comparison) -> list[Header] | None:
        """All groups' headers; None if their operations differ, and the error was latched."""
        mine = comparison.mine
        headers = [Header.decode(numbers) for numbers in comparison.rows.tolist()]
        mismatch = self._order.read_headers(mine, headers)
        if mismatch is not None:
            self._on_mismatch(mismatch)
        theirs, is_misfit = mine.unlike(headers)
        if theirs is None:
            return headers
        self._latch_difference(mine.operation, str(theirs), is_misfit=is_misfit)
        return None

    def _latch_difference(self, mine: Operation, theirs: str, *, is_misfit: bool = False) -> None:
        self._latch(
            OperationsDiffer(
                f"the groups are at different operations of the step. Here: {mine}. In another "
                f"group: {theirs}. Call them in the same order and with the same sizes everywhere",
                is_misfit,
            ),
            self._epoch,
        )

    def _fail(self, error: Exception, epoch: int, operation: Operation | None) -> None:
        """Latch ``error``, with which ``operation`` has failed, and a known difference, if any."""
        if operation is not None and epoch == self._epoch and not self._between_steps:
            self._order.record_failure(operation)
        unread, self._unread = self._unread, []
        if epoch == self._epoch:
            for comparison in unread:
                if comparison.reduction.is_over():
                    self._read(comparison)
        self._latch(error, epoch)

    def _launch(
        self,
        tensor: torch.Tensor,
        begin: Callable[..., Any],
        *arguments: Any,
        operation: Operation | None = None,
    ) -> Reduction | None:
        epoch = self._epoch
        self._record_pass()
        try:
            work = begin(*arguments)
        except (RuntimeError, TorchFTError) as error:
            self._latch(error, epoch)
            return None
        reduction = Reduction(
            tensor,
            work,
            self._timeout_s,
            pg=self._pg,
            on_error=lambda error: self._fail(error, epoch, operation),
            on_wait=self._on_wait,
            watchdog=self._watchdog,
            times=self._times,
        )
        self._outstanding.append(reduction)
        return reduction

    def unfinished(self) -> Exception | None:
        """The error if a backward pass that launched sums was ended by an exception.

        Then this group's gradients are in some of the sums only.
        """
        return unfinished_pass() if self._passes else None

    def _record_pass(self) -> None:
        """Record the present backward pass, which has to end well, also for torch's own wrapper."""
        graph = torch._C._current_graph_task_id()
        if graph != NO_GRAPH and graph not in self._passes:
            self._passes.add(graph)
            Variable._execution_engine.queue_callback(  # called unless the pass raises
                functools.partial(self._passes.discard, graph)
            )

    def give_up(self) -> None:
        """Wait for no operation of this step, whose members were left."""
        for reduction in self._outstanding:
            reduction.abandon()
        self._outstanding, self._unread, self._end = [], [], None

    def finish(self) -> None:
        """Wait for all operations of this step."""
        for work in self._works:
            work.wait()
        for reduction in self._outstanding:
            reduction.wait()
        self._outstanding = []
        unread, self._unread = self._unread, []
        for comparison in unread:
            if comparison.reduction.wait():
                self._read(comparison)
        end, self._end = self._end, None
        if end is not None:
            self._end_comparison(end)
        self._works = []
        self._pg.tidy()


def _encode_segments(
    values: torch.Tensor,
    errors: torch.Tensor | None,
    write_contribution: Callable[[torch.Tensor, torch.Tensor], None],
    quantization: Quantization,
    num_members: int,
) -> Iterator[_Segment]:
    """Encode this group's part of a sum, segment by segment; ``errors`` are corrected in it."""
    for start in range(0, values.numel(), SEGMENT):
        piece = values[start : start + SEGMENT]
        own = torch.empty(piece.shape, dtype=torch.float32, device=piece.device)
        write_contribution(piece.to(torch.float32), own)
        left_out = None
        if errors is not None:
            left_out = errors[start : start + SEGMENT]
            own.add_(left_out)
        sent = encode_chunks(own, num_members, quantization, left_out)
        yield _Segment(piece, left_out, sent, torch.empty_like(sent))


def describe_encoding() -> str:
    """What of 8-bit sums is in no argument, and has to be equal in all groups."""
    return f"8-bit blocks of {quantized.BLOCK} in segments of {SEGMENT}"


def _sent_op(op: ReduceOp.RedOpType) -> ReduceOp.RedOpType:
    return ReduceOp.SUM if op == ReduceOp.AVG else op


def _write_contribution(
    values: torch.Tensor,
    out: torch.Tensor,
    op: ReduceOp.RedOpType,
    participation: Participation,
    part: float | None,
) -> None:
    """Write to ``out``, which may be ``values``, what this group adds to a reduction by ``op``.

    ``part``: see `Collectives.allreduce`.
    """
    average = op == ReduceOp.AVG
    if not _contributes(op, participation, part):
        out.fill_(neutral_element(_sent_op(op), out.dtype))
    elif average and part is not None:
        torch.mul(values, part, out=out)
    elif average:
        # Dividing before the sum saves a pass after it.
        torch.div(values, participation.num_participants, out=out)
    elif out is not values:
        out.copy_(values)


def _contributes(op: ReduceOp.RedOpType, participation: Participation, part: float | None) -> bool:
    """Whether this group adds anything to a reduction by ``op``."""
    return participation.participating_rank is not None and not (op == ReduceOp.AVG and part == 0.0)


def _options(op: ReduceOp.RedOpType) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    return options


# Made once: for the first time in a step it takes 8 us.
_SUM = _options(ReduceOp.SUM)


def unfinished_pass() -> RequestRefused:
    """The error of a step in which a backward pass was ended by an exception."""
    return RequestRefused(
        "a backward pass of this step was not finished: after an exception in it begin another "
        "step with zero_grad"
    )


def check_arguments(
    tensor: torch.Tensor, should_quantize: bool | str, op: ReduceOp.RedOpType
) -> Quantization | None:
    """Refuse invalid arguments of `Manager.allreduce`, on every group alike.

    Returns in which numbers the tensor is sent (None: in its own).

    Raises:
        ConfigError: the message says what to change.
    """
    kind = resolve_quantization(should_quantize)
    if kind is not None:
        if op not in (ReduceOp.AVG, ReduceOp.SUM):
            reason = "quantized reductions are sums and averages: use should_quantize=False"
            raise ConfigError("reduce_op", op, reason)
        check_quantizable(tensor)
    if op != ReduceOp.AVG:
        neutral_element(op, tensor.dtype)
    elif not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise ConfigError("tensor", tensor.dtype, "whole numbers cannot be averaged")
    return kind


def neutral_element(op: ReduceOp.RedOpType, dtype: torch.dtype) -> float | int:
    """The input of a group that does not contribute to a reduction by ``op``.

    Raises:
        ConfigError: ``op`` has no neutral element.
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
