"""Finds out, before a sum, whether all groups are at the same operation of the step.

A sum is paired with the others' by its position alone. Where sizes differ gloo ends all processes,
and where they do not, what belongs elsewhere is added up without a word. So the groups compare a
few numbers first, in a sum of its own that is always of the same size. The end of a step is
compared in the same way, so that a group which has launched less is found before it votes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields

import torch
from torch.distributed import ReduceOp

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
# Less than all numbers that are compared, and than their negatives.
_NOBODY = -(2**62)


class Kind(enum.IntEnum):
    """Who launches."""

    AVERAGE = 0  # the program, with `Manager.allreduce`
    GRADIENTS = 1  # a wrapper of a model
    END = 2  # nobody does any more in this step


@dataclass(frozen=True, slots=True)
class Operation:
    """The ``position``-th operation of a step.

    ``wrapper`` is the index of the model's wrapper whose backward pass begins with it (-1: no pass
    does).
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
        """Reducing ``tensor`` by ``op``."""
        dtype = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else _OTHER
        number = _OPS.index(op) if op in _OPS else _OTHER
        return cls(position, kind, wrapper, tensor.numel(), dtype, number)

    @classmethod
    def end(cls, num_launched: int) -> Operation:
        """What a step ends with in which so many operations were launched."""
        return cls(num_launched + 1, Kind.END, -1, 0, _OTHER, _OTHER)

    def encode(self, device: torch.device, *, is_settled: bool) -> torch.Tensor:
        """What is reduced by ``MAX``: each number and its negative, of all groups, and once more
        of those that are settled (see `StepState`)."""
        numbers = self._numbers()
        both = numbers + [-number for number in numbers]
        settled = both if is_settled else [_NOBODY] * len(both)
        return torch.tensor(both + settled, device=device)

    def compare(self, reduced: torch.Tensor, *, is_settled: bool) -> tuple[Operation | None, bool]:
        """The operation of another group, or of several (None: all are at this one), from what was
        reduced; and whether it is this group that does not fit.

        That is one that is not settled, and unlike those that are, if there are any.
        """
        numbers: list[int] = reduced.tolist()
        half = len(numbers) // 2
        unlike = self._unlike(numbers[:half])
        if unlike is None or is_settled:
            return unlike, False
        if numbers[half] == _NOBODY:
            return unlike, True
        unlike_settled = self._unlike(numbers[half:])
        return unlike_settled or unlike, unlike_settled is not None

    def _numbers(self) -> list[int]:
        return [int(getattr(self, field.name)) for field in fields(self)]

    def _unlike(self, limits: list[int]) -> Operation | None:
        """An operation that is not this one, from the largest numbers and the largest negatives."""
        mine, half = self._numbers(), len(limits) // 2
        pairs = zip(mine, limits[:half], limits[half:], strict=True)
        theirs = [most if most != own else -negative for own, most, negative in pairs]
        if theirs == mine:
            return None
        position, kind, *others = theirs
        known = Kind(kind) if kind in tuple(Kind) else Kind.AVERAGE
        return Operation(position, known, *others)

    def __str__(self) -> str:
        if self.kind is Kind.END:
            num = self.position - 1
            launched = f"{num} operation{'s' * (num != 1)}"
            return f"number {self.position}, the end of the step, after {launched}"
        if self.wrapper >= 0:
            return f"number {self.position}, the backward pass of wrapper {self.wrapper}"
        name = _OP_NAMES[self.op] if 0 <= self.op < len(_OPS) else "operation"
        dtype = str(_DTYPES[self.dtype]) if 0 <= self.dtype < len(_DTYPES) else "another dtype"
        whose = "Manager.allreduce" if self.kind is Kind.AVERAGE else "gradients"
        return (
            f"number {self.position}, {whose}: {name} of {self.numel} elements of "
            f"{dtype.removeprefix('torch.')}"
        )
