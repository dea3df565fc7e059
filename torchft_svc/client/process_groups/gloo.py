"""Collectives over TCP between CPUs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup
from torchft_svc.client.process_groups.stores import Store


class ProcessGroupGloo(DelegatingProcessGroup):
    """gloo, with members that change.

    A dead member's peers notice at once. A member that hangs is noticed at ``timeout``, and an
    operation that was abandoned may write to its tensors until then.
    """

    def _make_backend(self, store: Store, rank: int, world_size: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, world_size, self._timeout)
