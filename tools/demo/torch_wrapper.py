"""Torch's own DistributedDataParallel across replica groups, with what it needs for that."""

from __future__ import annotations

from torch import nn

from torchft_svc.client import ManagedProcessGroup, Manager


def torch_data_parallel(manager: Manager, model: nn.Module) -> nn.Module:
    """``model``, whose gradients torch's wrapper averages over the groups that contribute."""
    return nn.parallel.DistributedDataParallel(
        model,
        process_group=ManagedProcessGroup(manager, averages_sums=True),
        init_sync=False,
        broadcast_buffers=False,
        find_unused_parameters=True,
    )
