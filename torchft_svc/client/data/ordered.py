"""Sums the gradients of a step's microbatches in their order, whoever has computed them (D12)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchft_svc.errors import RequestRefused

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

_Kind = tuple[torch.device, torch.dtype]

_LEFT_OVER = (
    "the parameters have gradients that are no sums of this step, so their order is not known: "
    "call optimizer.zero_grad() after each step, also after a discarded one, and make each pass "
    "inside of loader.accumulate(model)"
)
_PASSED_TWICE = (
    "a second pass of the same model for one batch cannot be put in order: add the losses up, and "
    "make one pass"
)


class OrderedSums:
    """The gradients of one step: a row for each of its microbatches, with zeros in those of others.

    Adding zeros is exact, so all groups get the same rows, and then add them up in their order. The
    models of a pass have a table of their own, because a program may make several passes for a
    batch, each of other models.
    """

    def __init__(self, manager: Manager, num_rows: int) -> None:
        self._manager, self._num_rows = manager, num_rows
        self._tables: dict[tuple[int, ...], _Table] = {}

    def begin_pass(self, models: Iterable[nn.Module], number: int, row: int | None) -> OrderedPass:
        """Begin the pass of the microbatch that is this group's ``number``-th.

        ``row``: its row; None: its gradients do not count.

        Raises:
            RequestRefused: it is the second one of these models, or there are gradients whose place
                in the sum is not known.
        """
        parameters = _trained(models)
        key = tuple(map(id, parameters))
        table = self._tables.get(key)
        if table is not None and number in table.passes:
            raise RequestRefused(_PASSED_TWICE)
        before = self._take_gradients(parameters)
        if table is None:
            table = self._tables[key] = _Table(parameters, self._num_rows)
        table.passes.add(number)
        return OrderedPass(table, before, row)

    def _take_gradients(self, parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
        """The gradients that are there: sums of another loader or of other models, of this step."""
        before = [parameter.grad for parameter in parameters]
        if not self._manager.holds_sums() and self._manager.errored() is None:
            if any(grad is not None and grad.count_nonzero() for grad in before):
                raise RequestRefused(_LEFT_OVER)
            before = [None] * len(parameters)
        for parameter in parameters:
            parameter.grad = None
        return before

    @property
    def num_open(self) -> int:
        """How many tables are not summed."""
        return sum(not table.is_summed for table in self._tables.values())

    def sum_up(self, ended: OrderedPass) -> None:
        """Add the sums over the microbatches of all groups to the gradients, after a last pass."""
        table = ended.table
        self._manager.sum_kept(table.rows.values())
        table.add_up()


@dataclass(slots=True)
class _Table:
    """The gradients of the microbatches, of the parameters of some models."""

    parameters: list[nn.Parameter]
    num_rows: int
    rows: dict[_Kind, torch.Tensor] = field(default_factory=dict)
    passes: set[int] = field(default_factory=set)
    is_summed: bool = False

    def __post_init__(self) -> None:
        for (device, dtype), parameters in self._by_kind().items():
            shape = self.num_rows, sum(each.numel() for each in parameters)
            self.rows[device, dtype] = torch.zeros(shape, device=device, dtype=dtype)

    def keep(self, row: int) -> None:
        """Copy the gradients to ``row``."""
        for kind, parameters in self._by_kind().items():
            for parameter, part in _parts(self.rows[kind][row], parameters):
                if parameter.grad is not None:
                    part.copy_(parameter.grad.flatten())

    def add_up(self) -> None:
        """Add the sums of the rows to the gradients."""
        for kind, parameters in self._by_kind().items():
            total = torch.zeros_like(self.rows[kind][0])
            for row in self.rows[kind]:
                total += row
            for parameter, part in _parts(total, parameters):
                found = part.view_as(parameter)
                before = parameter.grad
                parameter.grad = found.clone() if before is None else before + found
        self.rows.clear()
        self.is_summed = True

    def _by_kind(self) -> dict[_Kind, list[nn.Parameter]]:
        """The parameters by what can be in one tensor."""
        found: dict[_Kind, list[nn.Parameter]] = {}
        for each in self.parameters:
            found.setdefault((each.device, each.dtype), []).append(each)
        return found


@dataclass(frozen=True, slots=True)
class OrderedPass:
    """The pass of one microbatch, whose gradients are apart from those ``before`` it."""

    table: _Table
    before: list[torch.Tensor | None]
    row: int | None

    def end(self) -> None:
        """Keep the gradients of the pass, and put those before it back."""
        if self.row is not None:
            self.table.keep(self.row)
        for parameter, grad in zip(self.table.parameters, self.before, strict=True):
            parameter.grad = grad


def _parts(
    row: torch.Tensor, parameters: Iterable[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The place in ``row`` of each parameter's gradient."""
    begin = 0
    for parameter in parameters:
        yield parameter, row[begin : begin + parameter.numel()]
        begin += parameter.numel()


def _trained(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters to train, each once."""
    found = {
        id(parameter): parameter
        for model in models
        for parameter in model.parameters()
        if parameter.requires_grad
    }
    return list(found.values())
