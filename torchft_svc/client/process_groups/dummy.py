"""A group of one that needs no network: for tests and for models without peers."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import Store

from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.operations import INTO_OUTPUT, CompletedWork, flat


class ProcessGroupDummy(DelegatingProcessGroup):
    """Acts as if it were alone: every collective is over at once and gives back what it got.

    It keeps the rank and the world size that it was configured with, so a program sees the quorum's
    numbers, but nothing is exchanged.
    """

    def _configure(self, members: Members) -> None:
        """Take the numbers, meet nobody."""
        self._backend, self._error = _Alone(), None
        self._rank, self._world_size = members.rank, members.world_size

    def _make_backend(self, store: Store, rank: int, world_size: int) -> Any:
        return _Alone()


# A member that is alone receives from nobody.
_COPIED = INTO_OUTPUT - {"recv", "recv_anysource"}


class _Alone:
    """Every collective of a group with one member."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _copy if name in _COPIED else _same


def _same(tensors: Any = None, *_: Any, **__: Any) -> CompletedWork:
    return CompletedWork(tensors)


def _copy(output: Any, source: Any, *_: Any, **__: Any) -> CompletedWork:
    for target, value in zip(flat(output), _repeat(flat(source), len(flat(output))), strict=True):
        target.copy_(value)
    return CompletedWork(output)


def _repeat(tensors: list[torch.Tensor], num: int) -> list[torch.Tensor]:
    """An all-gather among many gives every place what this member sent."""
    return [tensors[i * len(tensors) // num] for i in range(num)]
