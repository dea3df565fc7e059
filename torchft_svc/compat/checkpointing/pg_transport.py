"""`torchft.checkpointing.pg_transport`: the transport over a process group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from torchft_svc.client.checkpointing.pg import PGTransport as NativeTransport
from torchft_svc.client.process_groups.base import ProcessGroup


class PGTransport(NativeTransport):
    """The native transport; ``timeout`` of a call defaults to that of the transport."""

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta,
        device: torch.device,
        state_dict: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(pg, timeout, device, state_dict)

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta | None = None
    ) -> None:
        """Send ``state_dict`` to the groups with these replica ranks."""
        super().send_checkpoint(dst_ranks, step, state_dict, timeout or self._timeout)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta | None = None
    ) -> Any:
        """Receive the state of ``step`` from the group with this replica rank."""
        return super().recv_checkpoint(src_rank, metadata, step, timeout or self._timeout)
