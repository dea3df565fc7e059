"""Sums the gradients of a step's microbatches in their order, whoever has computed them (D12)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

_Kind = tuple[torch.device, torch.dtype]


class OrderedSums:
    """The gradients of one step: a row for each of its microbatches, with zeros in those of others.

    Adding zeros is exact, so all groups get the same rows, and then add them up in their order.
    """

    def __init__(self, manager: Manager, num_rows: int) -> None:
        self._manager, self._num_rows = manager, num_rows
        self._tables: dict[_Kind, torch.Tensor] = {}

    def add_pass(self, models: Sequence[nn.Module], row: int | None) -> None:
        """Move the gradients of one microbatch to its row; None: they do not count."""
        for kind, parameters in _by_kind(models).items():
            num_elements = sum(each.numel() for each in parameters)
            if kind not in self._tables:
                shape = self._num_rows, num_elements
                self._tables[kind] = torch.zeros(shape, device=kind[0], dtype=kind[1])
            for parameter, part in _parts(self._tables[kind][row or 0], parameters):
                if parameter.grad is not None and row is not None:
                    part.copy_(parameter.grad.flatten())
                parameter.grad = None

    def sum_up(self, models: Sequence[nn.Module]) -> None:
        """Set the gradients to the sums over the microbatches of all groups."""
        works: list[Any] = [
            self._manager.allreduce(table, reduce_op=ReduceOp.SUM)
            for table in self._tables.values()
        ]
        for work in works:
            work.wait()
        for kind, parameters in _by_kind(models).items():
            total = torch.zeros_like(self._tables[kind][0])
            for row in self._tables[kind]:
                total += row
            for parameter, part in _parts(total, parameters):
                parameter.grad = part.view_as(parameter).clone()


def _parts(
    row: torch.Tensor, parameters: Iterable[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The place in ``row`` of each parameter's gradient."""
    begin = 0
    for parameter in parameters:
        yield parameter, row[begin : begin + parameter.numel()]
        begin += parameter.numel()


def _by_kind(models: Iterable[nn.Module]) -> dict[_Kind, list[nn.Parameter]]:
    """The trained parameters by what can be in one tensor."""
    found: dict[_Kind, list[nn.Parameter]] = {}
    for model in models:
        for parameter in model.parameters():
            if parameter.requires_grad:
                found.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return found
