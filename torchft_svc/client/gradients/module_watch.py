"""Finds parameters that a wrapped module has got, or begun to train, after it was wrapped.

Nothing averages their gradients. They come from resized embeddings, layers that were replaced,
shared weights that were separated, or ``requires_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

import torch
from torch import nn


class ModuleWatch:
    """Watches the tree of ``module`` without walking it, except after a change.

    ``summed``: the identities of the parameters whose gradients are averaged.
    """

    def __init__(self, module: nn.Module, summed: Callable[[], Collection[int]]) -> None:
        self._module = module
        self._summed = summed
        self._walk()

    def find_unsummed(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that have got a gradient which is not averaged, with their names."""
        if any(map(len, self._empty)) or self._present() != self._ids:
            self._walk()
        return [
            (name, parameter)
            for name, parameter in self._unsummed
            if parameter.grad is not None and parameter.requires_grad
        ]

    def _walk(self) -> None:
        parts = [
            held
            for module in self._module.modules()
            for held in (module._parameters, module._modules)
        ]
        self._filled: list[Collection[Any]] = [held.values() for held in parts if held]
        self._empty: list[Collection[Any]] = [held for held in parts if not held]
        self._ids = self._present()
        summed = self._summed()
        self._unsummed = [
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if id(parameter) not in summed
        ]

    def _present(self) -> list[int]:
        """The identities of all parameters and submodules."""
        return list(map(id, chain.from_iterable(self._filled)))


class KindWatch:
    """Watches that ``parameters`` keep their shapes, dtypes and devices.

    ``module.to()``, ``.bfloat16()`` and assignments to ``.data`` replace the memory of a parameter.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._kinds = [_kind(parameter) for parameter in parameters]
        self._places = self._present()

    def find_changed(self) -> tuple[nn.Parameter, str] | None:
        """A parameter of another kind than at first, and how it has changed, if there is one."""
        places = self._present()
        if places == self._places:
            return None
        for parameter, before in zip(self._parameters, self._kinds, strict=True):
            if _kind(parameter) != before:
                return parameter, f"{_describe(before)} before, {_describe(_kind(parameter))} now"
        self._places = places
        return None

    def _present(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._parameters))


_Kind = tuple[torch.Size, torch.dtype, torch.device]


def _kind(parameter: nn.Parameter) -> _Kind:
    return parameter.shape, parameter.dtype, parameter.device


def _describe(kind: _Kind) -> str:
    shape, dtype, device = kind
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"
