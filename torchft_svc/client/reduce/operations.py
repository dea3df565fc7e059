"""Checks, before a sum, that all groups are at the same operation of the step (rule T9).

The sums of the groups are matched by position only. If sizes differ, gloo terminates all processes;
if they are equal, wrong tensors are added up silently. So the groups compare a few numbers first,
unless they know already what all of them launch (`LaunchOrder`). The end of a step is compared in
the same way, so that a group that has launched fewer operations is found before it votes.

The numbers are gathered, never summed: gloo also matches the kind of a collective, so they are not
matched with a sum of a group that does not compare, and both sides end at their timeout.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from torchft_svc.core.quorum.worker.step import FIRST_STEPS

_OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN)
_OP_NAMES = ("sum", "average", "product", "maximum", "minimum")
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_OTHER = -1
# Steps that are remembered as patterns, for programs that alternate, or log from time to time.
MAX_PATTERNS = 8
# A group that differs may commit one step more than the others before it waits for them.
STEPS_TO_LOOK_BACK = 3
# Of each of these steps, so many attempts are remembered: an error is sent in one of the next ones.
MAX_ATTEMPTS = 3
# Operations of a step beyond this number are always compared.
MAX_PLACES = 4096
# A header has the six numbers of an operation, whether its group is settled, its pattern, how many
# steps its group has committed, and the step and the operation at which it was stuck.
HEADER_LENGTH = 16


class Kind(enum.IntEnum):
    """The caller that launches the operation."""

    AVERAGE = 0  # the program, with `Manager.allreduce`
    GRADIENTS = 1  # a wrapper of a model
    END = 2  # the step has no more operations
    FIRST_BUCKET = 3  # torch's wrapper, before it changes the order of gradients in its buckets
    BUCKET = 4  # torch's wrapper, after that
    STATES = 5  # the comparison of the groups' states
    NUMBERS = 6  # the program, with `Manager.mean` or `Manager.sum`
    INT8 = 7  # the program, with `Manager.allreduce` in 8-bit numbers
    FLOAT8 = 8  # the same, in floating-point ones
    SHARES = 9  # a loader: what the groups hold of the step's samples


# What wrappers of models launch; what they sum is in the layout that groups compare when they meet.
OF_WRAPPERS = frozenset({Kind.GRADIENTS, Kind.FIRST_BUCKET, Kind.BUCKET})
_LAUNCHED_BY = {
    Kind.AVERAGE: "Manager.allreduce",
    Kind.NUMBERS: "Manager.mean or Manager.sum",
    Kind.INT8: "Manager.allreduce with should_quantize='int8'",
    Kind.FLOAT8: "Manager.allreduce with should_quantize='float8'",
    Kind.GRADIENTS: "gradients",
    Kind.FIRST_BUCKET: "a bucket of torch's DistributedDataParallel in its first backward pass",
    Kind.BUCKET: "a bucket of torch's DistributedDataParallel after its first backward pass",
}


class Operation(NamedTuple):
    """The ``position``-th operation of a step.

    ``wrapper`` is the index of the model's wrapper whose backward pass begins with it, or -1.
    """

    position: int
    kind: Kind
    wrapper: int
    numel: int
    dtype: int
    op: int

    @classmethod
    def of(
        cls,
        position: int,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType,
        kind: Kind = Kind.AVERAGE,
        wrapper: int = -1,
    ) -> Operation:
        """Return the operation that reduces ``tensor`` by ``op``."""
        dtype = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else _OTHER
        number = _OPS.index(op) if op in _OPS else _OTHER
        return cls(position, kind, wrapper, tensor.numel(), dtype, number)

    @classmethod
    def end(cls, num_launched: int) -> Operation:
        """The end of a step with ``num_launched`` operations."""
        return cls(num_launched + 1, Kind.END, -1, 0, _OTHER, _OTHER)

    @classmethod
    def states(cls, num_launched: int) -> Operation:
        """The comparison of states, after the end of a step with ``num_launched`` operations."""
        return cls(num_launched + 2, Kind.STATES, -1, 0, _OTHER, _OTHER)

    @classmethod
    def shares(cls, num_launched: int) -> Operation:
        """The exchange of what the groups hold of the step's samples, after ``num_launched``."""
        return cls(num_launched + 1, Kind.SHARES, -1, 0, _OTHER, _OTHER)

    def __str__(self) -> str:
        if self.kind is Kind.SHARES:
            return f"number {self.position}, a loader with recover_within_step"
        if self.kind is Kind.STATES:
            return f"number {self.position}, the comparison of states after the end of the step"
        if self.kind is Kind.END:
            num = self.position - 1
            launched = f"{num} operation{'s' * (num != 1)}"
            return f"number {self.position}, the end of the step, after {launched}"
        if self.wrapper >= 0:
            return f"number {self.position}, the backward pass of wrapper {self.wrapper}"
        name = _OP_NAMES[self.op] if 0 <= self.op < len(_OPS) else "operation"
        dtype = str(_DTYPES[self.dtype]) if 0 <= self.dtype < len(_DTYPES) else "another dtype"
        return (
            f"number {self.position}, {_LAUNCHED_BY[self.kind]}: {name} of {self.numel} elements "
            f"of {dtype.removeprefix('torch.')}"
        )


class Stuck(NamedTuple):
    """An operation that has failed in ``step``; maybe because other groups were at another one."""

    step: int
    operation: Operation


# Of a group whose last step did not fail.
_NOT_STUCK = (-1,) + (0,) * len(Operation._fields)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """This group was at operation ``mine`` of ``step`` while another one was at ``theirs``.

    ``member``: the other group's index in the quorum. ``is_misfit``: see `Header.unlike`.
    """

    step: int
    mine: Operation
    theirs: Operation
    member: int
    is_misfit: bool


@dataclass(frozen=True, slots=True)
class Header:
    """The message that a group sends when operations are compared.

    ``is_settled``, ``num_commits``: see `StepState`. ``pattern``: a digest of the remembered step
    that began like this one up to ``operation``; 0: there is none. ``stuck``: where its last step
    has failed, if others have not received that yet.
    """

    operation: Operation
    is_settled: bool
    pattern: int
    num_commits: int = 0
    stuck: Stuck | None = None

    def encode(self, device: torch.device) -> torch.Tensor:
        """Return the header as `HEADER_LENGTH` numbers."""
        stuck = self.stuck
        numbers = [
            *map(int, self.operation),
            int(self.is_settled),
            self.pattern,
            self.num_commits,
            *(_NOT_STUCK if stuck is None else (stuck.step, *map(int, stuck.operation))),
        ]
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Header:
        """The header of another group; its numbers are not trusted."""
        operation, rest = numbers[:6], numbers[6:]
        is_settled, pattern, num_commits, stuck_step, *stuck_at = rest
        stuck = Stuck(stuck_step, _decode(stuck_at)) if stuck_step >= 0 else None
        return cls(_decode(operation), bool(is_settled), pattern, num_commits, stuck)

    def unlike(self, headers: Sequence[Header]) -> tuple[Operation | None, bool]:
        """A different operation of another group (None: all are equal), and whether this group is
        the misfit: it is not settled, and differs from those that are, if any are; or it is new
        among those that it differs from."""
        others = [each for each in headers if each.operation != self.operation]
        if not others:
            return None, False
        settled = [each for each in others if each.is_settled]
        first = (settled or others)[0].operation
        if self.is_settled:
            return others[0].operation, self._is_new_among(others, len(headers))
        return first, bool(settled) or not any(each.is_settled for each in headers)

    def find_mismatch(
        self,
        headers: Sequence[Header],
        launched: Callable[[int, int], Sequence[Operation]],
        instead: Operation | None = None,
    ) -> Mismatch | None:
        """Whether this group and another one were at different operations when one of them failed.

        ``launched``: what this group has launched in a step at a position, the newest last: several
        operations if the step was repeated (none: it is not known). ``instead``: what all groups
        were known to launch where this one was stuck at another operation; those that were not
        stuck there, too, have launched it.
        """
        found: list[tuple[int, int, Operation, Operation]] = []
        for member, header in enumerate(headers):
            stuck = header.stuck
            own = () if stuck is None else launched(stuck.step, stuck.operation.position)
            if stuck is not None and own and stuck.operation not in own:
                found.append((member, stuck.step, own[-1], stuck.operation))
            elif self.stuck is not None and instead is not None and stuck != self.stuck:
                found.append((member, self.stuck.step, self.stuck.operation, instead))
        if not found:
            return None
        member, step, mine, theirs = found[0]
        others = [headers[member] for member, *_ in found]
        return Mismatch(step, mine, theirs, member, self._is_new_among(others, len(headers)))

    def _is_new_among(self, others: Sequence[Header], num_groups: int) -> bool:
        """Whether this group is new, and one of ``others`` has been there for longer; not if most
        of the ``num_groups`` are like this one."""
        is_new = self.num_commits < FIRST_STEPS
        is_newer = self.num_commits < max(each.num_commits for each in others)
        return is_new and is_newer and 2 * len(others) >= num_groups


def _decode(numbers: Sequence[int]) -> Operation:
    """An operation of another group; its numbers are not trusted."""
    position, kind, wrapper, numel, dtype, op = numbers
    known = Kind(kind) if kind in tuple(Kind) else Kind.AVERAGE
    return Operation(position, known, wrapper, numel, dtype, op)


class LaunchOrder:
    """What all groups of a quorum are known to launch in a step, place by place.

    Members that completed a step together have launched the same operations in it. A group that
    differed was found by a comparison, or timed out together with the others; either way it has
    left the members, and there is a new quorum. So an operation that equals the one at its place in
    the last step needs no comparison: that step is *in force*. In the first step of a quorum none
    is. When an operation is compared, the groups also send which remembered step they expect from
    there on; if all send the same one, it is in force.
    """

    def __init__(
        self, is_settled: Callable[[], bool], num_commits: Callable[[], int] = int
    ) -> None:
        """Create an order in which nothing is known; for the arguments see `StepState`."""
        self._is_settled = is_settled
        self._num_commits = num_commits
        self._step = 0
        self._stuck: Stuck | None = None
        self._instead_of_it: Operation | None = None
        # The last steps that have begun, each with its attempts.
        self._by_step: dict[int, list[tuple[Operation, ...]]] = {}
        self._patterns: list[
            tuple[Operation, ...]
        ] = []  # the steps that are remembered, newest first
        self._last: tuple[Operation, ...] = ()  # of the last step, if these members were in it
        self._in_force: tuple[Operation, ...] = ()
        self._launched: list[Operation] = []
        self._is_first_step: Callable[[], bool] = bool

    def begin_step(self, is_first_step: Callable[[], bool], step: int = 0) -> None:
        """Begin ``step``; ``is_first_step``, valid once its members are known: whether it is their
        first one."""
        self._keep_last_step()
        self._step = step
        if self._launched:
            self._last = tuple(self._launched)
            others = [pattern for pattern in self._patterns if pattern != self._last]
            self._patterns = [self._last, *others][:MAX_PATTERNS]
        elif self._is_first_step():
            self._last = ()
        self._is_first_step = is_first_step
        self._launched = []
        self._in_force = ()

    def _keep_last_step(self) -> None:
        """Keep the last step, for a group that differed in it and reports that in a later one."""
        launched, stuck = self._launched, self._stuck
        is_here = stuck is not None and stuck.step == self._step
        if stuck is not None and is_here and stuck.operation.position == len(launched) + 1:
            launched = [*launched, stuck.operation]  # compared, and never launched
        if launched:
            attempts = [*self._by_step.pop(self._step, []), tuple(launched)]
            self._by_step[self._step] = attempts[-MAX_ATTEMPTS:]
        while len(self._by_step) > STEPS_TO_LOOK_BACK:
            del self._by_step[next(iter(self._by_step))]

    def record_failure(self, operation: Operation) -> None:
        """Record a failed ``operation``; the first one of a step counts, until it was sent."""
        if self._stuck is None or self._stuck.step != self._step:
            self._stuck = Stuck(self._step, operation)
            self._instead_of_it = self.instead(operation)

    def read_headers(self, mine: Header, headers: Sequence[Header]) -> Mismatch | None:
        """Find in the ``headers`` of all groups whether this one and another one were at different
        operations of one of the last steps. ``mine``: what this group has sent."""
        instead = self._instead_of_it
        if self._stuck is mine.stuck:
            self._stuck = self._instead_of_it = None
        return mine.find_mismatch(headers, self._launched_in, instead)

    def _launched_in(self, step: int, position: int) -> list[Operation]:
        attempts = self._by_step.get(step, []) if position > 0 else []
        return [each[position - 1] for each in attempts if position <= len(each)]

    def expects(self, operation: Operation) -> bool:
        """Whether all groups are known to launch ``operation`` next."""
        place = len(self._launched)
        if place == 0:
            self._in_force = () if self._is_first_step() else self._last
        return self._in_force[place : place + 1] == (operation,)

    def instead(self, operation: Operation) -> Operation | None:
        """The operation that all groups are known to launch instead of ``operation``, if any."""
        place = operation.position - 1  # operations after it may have been launched
        known = self._in_force[place : place + 1]
        return known[0] if known and known[0] != operation else None

    def header(self, operation: Operation) -> Header:
        """The header of ``operation``; without a pattern if all groups know what follows."""
        pattern = 0 if self.expects(operation) else self._pattern(operation)
        return Header(operation, self._is_settled(), pattern, self._num_commits(), self._stuck)

    def _pattern(self, operation: Operation) -> int:
        pattern = self._find(operation)
        if not pattern:
            return 0
        numbers = [tuple(map(int, each)) for each in pattern]
        digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1 or 1

    def record_agreement(self, operation: Operation, patterns: Sequence[int]) -> None:
        """Record that all groups are at ``operation``, and have sent ``patterns``."""
        is_shared = bool(patterns[0]) and len(set(patterns)) == 1
        self._in_force = self._find(operation) if is_shared else ()

    def record_launch(self, operation: Operation) -> None:
        """Record that all groups launch ``operation``."""
        if len(self._launched) < MAX_PLACES:
            self._launched.append(operation)

    def _find(self, operation: Operation) -> tuple[Operation, ...]:
        begun = (*self._launched, operation)
        return next((p for p in self._patterns if p[: len(begun)] == begun), ())
