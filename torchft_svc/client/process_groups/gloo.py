"""Collectives over TCP between CPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchft_svc.client.process_groups.backend import WholeBackend
from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup
from torchft_svc.client.process_groups.meeting import CONNECT_TIMEOUT_S
from torchft_svc.client.process_groups.operations import HIDDEN_BY_GLOO
from torchft_svc.client.process_groups.stores import Store


class ProcessGroupGloo(DelegatingProcessGroup):
    """gloo, with members that change.

    A dead member's peers notice at once. A member that hangs is noticed at ``timeout``, and an
    operation that was abandoned may write to its tensors until then. Members that disagree on the
    size of an operation are a mistake that gloo answers by ending their processes.
    """

    _hidden = HIDDEN_BY_GLOO

    def _make_backend(self, store: Store, rank: int, world_size: int) -> Any:
        # All members are there. One that dies now must not keep the others for a whole timeout.
        connect_timeout = min(timedelta(seconds=CONNECT_TIMEOUT_S), self._timeout)
        backend = dist.ProcessGroupGloo(store, rank, world_size, connect_timeout)
        backend._set_default_timeout(self._timeout)
        return _Link(backend, store, rank, world_size)

    def _has_failed(self, work: Any) -> bool:
        try:
            future = work.get_future()
        except RuntimeError:  # it tells that to nobody but who waits for it
            return False
        try:
            future.value()
        except RuntimeError:
            return True
        return False


class _Link(WholeBackend):
    kind = dist.ProcessGroup.BackendType.GLOO
    device_type = "cpu"
