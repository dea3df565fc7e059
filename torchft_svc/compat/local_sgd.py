"""`torchft.local_sgd`: groups that train alone between synchronizations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchft_svc.client.algorithms.diloco import DiLoCo as NativeDiLoCo
from torchft_svc.client.algorithms.local_sgd import LocalSGD as NativeLocalSGD
from torchft_svc.compat.errors import public_errors

if TYPE_CHECKING:
    from torchft_svc.compat.manager import Manager


def extract_local_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of this worker's part of ``t``, without its gradient."""
    part = t.to_local() if isinstance(t, DTensor) else t
    return part.detach().clone()


class LocalSGD(NativeLocalSGD):
    """Averages the weights after every ``sync_every`` updates; see the native class."""

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int,
    ) -> None:
        super().__init__(manager, model, optimizer, sync_every)

    def sync(self) -> None:
        """Average the weights now; all groups have to call it at the same point."""
        with public_errors():
            super().sync()


class DiLoCo(NativeDiLoCo):
    """An outer optimizer learns from what the groups have learned alone; see the native class."""

    def __init__(
        self,
        manager: Manager,
        model_fragments: list[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        super().__init__(
            manager,
            model_fragments,
            inner_optimizer,
            outer_optimizer,
            sync_every,
            backup_device,
            pin_memory,
            use_bucketization,
            bucket_cap_mb,
            should_quantize,
            fragment_sync_delay,
            fragment_update_alpha,
        )

    def _end_inner_step(self) -> None:
        with public_errors():
            super()._end_inner_step()
