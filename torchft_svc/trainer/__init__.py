"""A trainer that survives the loss of its workers: the last rung of fault tolerance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchft_svc.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchft_svc.trainer.backend import Backend
    from torchft_svc.trainer.context import TrainContext
    from torchft_svc.trainer.local import LocalBackend
    from torchft_svc.trainer.trainer import Trainer

__all__ = ["Backend", "LocalBackend", "TrainContext", "Trainer"]

# A worker's process needs other parts than a trainer.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Backend": ".backend",
        "LocalBackend": ".local",
        "TrainContext": ".context",
        "Trainer": ".trainer",
    },
)
