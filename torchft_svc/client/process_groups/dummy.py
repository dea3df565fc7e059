"""A process group of one member without network: for tests and for models without peers."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import Store

from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.operations import INTO_OUTPUT, CompletedWork, flat


class ProcessGroupDummy(DelegatingProcessGroup):
    """Acts as the only member: every collective ends at once and returns its input.

    It keeps the rank and the world size that it was configured with, so a program sees the
    quorum's numbers, but exchanges no data.
    """

    @property
    def needs_all_members(self) -> bool:
        """No: so each step asks, which keeps the groups at the same step."""
        return False

    def _configure(self, members: Members) -> None:
        """Take rank and world size; connects to no one."""
        self._backend, self._error = _Alone(), None
        self._rank, self._world_size = members.rank, members.world_size

    def _make_backend(self, store: Store, rank: int, world_size: int) -> Any:
        return _Alone()


# There is no other member to receive from.
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
    """An all-gather puts this member's input at every place of the result."""
    return [tensors[i * len(tensors) // num] for i in range(num)]
