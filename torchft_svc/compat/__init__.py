"""Names of the public torchft release, for programs that were written for it.

Nothing else in `torchft_svc` imports this package. Three ways in, see docs/migration.md::

    import torchft_svc.compat as torchft          # in one module
    torchft_svc.compat.install()                  # before the first `import torchft`
    python -m torchft_svc.compat train.py ...     # for a program, and all that it starts

The modules have the names of the public ones (`torchft.process_group` is
`torchft_svc.compat.process_group`), and adapt the native classes: no algorithm stands here twice.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchft_svc.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchft_svc.compat.data import DistributedSampler
    from torchft_svc.compat.ddp import DistributedDataParallel
    from torchft_svc.compat.finder import install
    from torchft_svc.compat.manager import Manager
    from torchft_svc.compat.optim import Optimizer
    from torchft_svc.compat.process_group import (
        ProcessGroupBabyNCCL,
        ProcessGroupBabyXCCL,
        ProcessGroupGloo,
        ProcessGroupNCCL,
        ProcessGroupXCCL,
    )

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "Manager",
    "Optimizer",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupXCCL",
    "install",
]

# Modules that programs use as attributes after `import torchft`.
_MODULES = frozenset(
    {
        "checkpointing",
        "coordination",
        "data",
        "ddp",
        "futures",
        "local_sgd",
        "manager",
        "optim",
        "otel",
        "parameter_server",
        "process_group",
        "utils",
        "work",
    }
)

_get_name, __dir__ = lazy_names(
    __name__,
    {
        "DistributedDataParallel": ".ddp",
        "DistributedSampler": ".data",
        "Manager": ".manager",
        "Optimizer": ".optim",
        "ProcessGroupBabyNCCL": ".process_group",
        "ProcessGroupBabyXCCL": ".process_group",
        "ProcessGroupGloo": ".process_group",
        "ProcessGroupNCCL": ".process_group",
        "ProcessGroupXCCL": ".process_group",
        "install": ".finder",
    },
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    return _get_name(name)
