"""Finds out, before a sum, whether all groups are at the same operation of the step.

A sum is paired with the others' by its position alone. Where sizes differ gloo ends all processes,
and where they do not, what belongs elsewhere is added up without a word. So the groups compare a
few numbers first, in a sum of its own that is always of the same size.
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


class Kind(enum.IntEnum):
    """Who launches."""

    AVERAGE = 0  # the program, with `Manager.allreduce`
    GRADIENTS = 1  # a wrapper of a model


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

    def encode(self, device: torch.device) -> torch.Tensor:
        """What is reduced by ``MAX``: each number, and its negative."""
        numbers = [int(getattr(self, field.name)) for field in fields(self)]
        return torch.tensor(numbers + [-number for number in numbers], device=device)

    def unlike(self, reduced: torch.Tensor) -> Operation | None:
        """The operation of another group, or of several, from the largest and least numbers; None:
        all are at this one."""
        numbers: list[int] = reduced.tolist()
        half = len(numbers) // 2
        mine = [int(getattr(self, field.name)) for field in fields(self)]
        pairs = zip(mine, numbers[:half], numbers[half:], strict=True)
        theirs = [most if most != own else -negative for own, most, negative in pairs]
        if theirs == mine:
            return None
        position, kind, *others = theirs
        known = Kind(kind) if kind in tuple(Kind) else Kind.AVERAGE
        return Operation(position, known, *others)

    def __str__(self) -> str:
        if self.wrapper >= 0:
            return f"number {self.position}, the backward pass of wrapper {self.wrapper}"
        name = _OP_NAMES[self.op] if 0 <= self.op < len(_OPS) else "operation"
        dtype = str(_DTYPES[self.dtype]) if 0 <= self.dtype < len(_DTYPES) else "another dtype"
        whose = "Manager.allreduce" if self.kind is Kind.AVERAGE else "gradients"
        return (
            f"number {self.position}, {whose}: {name} of {self.numel} elements of "
            f"{dtype.removeprefix('torch.')}"
        )
