"""A trainer that survives the loss of its workers: the last rung of fault tolerance."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchft_svc.trainer.backend import Backend
    from torchft_svc.trainer.context import TrainContext
    from torchft_svc.trainer.local import LocalBackend
    from torchft_svc.trainer.trainer import Trainer

__all__ = ["Backend", "LocalBackend", "TrainContext", "Trainer"]

_MODULES = {
    "Backend": "backend",
    "LocalBackend": "local",
    "TrainContext": "context",
    "Trainer": "trainer",
}


def __getattr__(name: str) -> Any:
    """Imported when first used: a worker's process needs other parts than a trainer."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
