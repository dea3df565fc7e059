"""Shards a dataset over replica groups and their workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, distributed

from torchft_svc.errors import ConfigError


class DistributedSampler(distributed.DistributedSampler[Any]):
    """Gives each worker of each replica group its own part of ``dataset``.

    The parts are fixed: while a group is absent, no other group gets its part.

    Args:
        replica_rank: this group's index among ``num_replica_groups``; it must stay the same when
            the group is restarted.
        group_rank, num_replicas: this worker in its group of ``num_replicas`` workers (default:
            from torch's initialized process group, else one worker).
        kwargs: passed to torch's class: ``shuffle``, ``seed``, ``drop_last``.

    Raises:
        ConfigError: a rank is out of range.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        if group_rank is None:
            group_rank = dist.get_rank() if initialized else 0
        if num_replicas is None:
            num_replicas = dist.get_world_size() if initialized else 1
        _check_rank("replica_rank", replica_rank, "num_replica_groups", num_replica_groups)
        _check_rank("group_rank", group_rank, "num_replicas", num_replicas)
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(
            dataset, rank=self.global_rank, num_replicas=self.global_world_size, **kwargs
        )

    def __iter__(self) -> Iterator[Any]:
        with torch.device("cpu"):  # torch's class shuffles with a generator of the host
            return super().__iter__()


def _check_rank(name: str, value: int, size_name: str, size: int) -> None:
    if size < 1:
        raise ConfigError(size_name, size, "use 1 or more")
    if not 0 <= value < size:
        raise ConfigError(name, value, f"it must be 0 to {size - 1} with {size_name}={size}")
