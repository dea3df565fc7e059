"""All operations of a torch backend, also those that Python reaches only through a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchft_svc.client.process_groups.rendezvous.stores import Store


class WholeBackend:
    """Holds ``backend``, which connects ``world_size`` members; destroyed with it."""

    kind: dist.ProcessGroup.BackendType
    device_type: str

    def __init__(self, backend: Any, store: Store, rank: int, world_size: int) -> None:
        self.backend = backend
        self._place = store, rank, world_size
        self._group: Any = None

    def __getattr__(self, name: str) -> Any:
        """An operation of the backend, or of a group around it."""
        if hasattr(self.backend, name):
            return getattr(self.backend, name)
        if self._group is None:
            self._group = dist.ProcessGroup(*self._place)
            self._group._set_default_backend(self.kind)
            self._group._register_backend(torch.device(self.device_type), self.kind, self.backend)
        return getattr(self._group, name)
