"""A process group of one member without network: for tests and for models without peers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.operations import INTO_OUTPUT, CompletedWork, flat
from torchft_svc.errors import ConfigError


class ProcessGroupDummy(DelegatingProcessGroup):
    """Acts as the only member: every collective ends at once and returns its input.

    It can be used at once, for example to keep the collectives of a wrapper inside this process,
    and may be configured as any other: it keeps the rank and the world size that it was made or
    configured with, so a program sees the quorum's numbers, but exchanges no data.

    Args:
        rank: this member's index among ``world_size`` members.

    Raises:
        ConfigError: the rank is not below the world size, or the timeout is not valid.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, timeout: timedelta = timedelta(seconds=60)
    ) -> None:
        if not 0 <= rank < world_size:
            expected = f"it must be 0 or more, and below world_size={world_size}"
            raise ConfigError("rank", rank, expected)
        super().__init__(timeout)
        self._backend = _Alone()
        self._rank, self._world_size = rank, world_size

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
