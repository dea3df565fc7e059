"""Per-step fault tolerance for PyTorch training: lighthouse, manager and a thin client.

The names of `torchft_svc.client` can be imported from here, too. They are looked up when they are
first used, because importing torch takes seconds that the services do not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchft_svc.env import keep_grpc_out_of_forks, keep_grpc_quiet
from torchft_svc.lazy_names import lazy_names
from torchft_svc.version import VERSION

if TYPE_CHECKING:
    from torchft_svc.client import (
        CheckpointTransport,
        DistributedDataParallel,
        DistributedSampler,
        ElasticDataLoader,
        ElasticSampler,
        ElasticStream,
        ErrorSwallowingProcessGroupWrapper,
        FaultToleranceManager,
        HTTPTransport,
        ManagedProcessGroup,
        Manager,
        Optimizer,
        OptimizerWrapper,
        ParameterServer,
        PGTransport,
        ProcessGroup,
        ProcessGroupBabyGloo,
        ProcessGroupBabyNCCL,
        ProcessGroupDummy,
        ProcessGroupGloo,
        ProcessGroupNCCL,
        ProcessGroupWrapper,
        WorldSizeMode,
        ft_init_device_mesh,
        register_process_group,
        replicate_across_groups,
        sharded_state_dict,
        start_manager_early,
    )

__all__ = [
    "CheckpointTransport",
    "DistributedDataParallel",
    "DistributedSampler",
    "ElasticDataLoader",
    "ElasticSampler",
    "ElasticStream",
    "ErrorSwallowingProcessGroupWrapper",
    "FaultToleranceManager",
    "HTTPTransport",
    "ManagedProcessGroup",
    "Manager",
    "Optimizer",
    "OptimizerWrapper",
    "PGTransport",
    "ParameterServer",
    "ProcessGroup",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "WorldSizeMode",
    "ft_init_device_mesh",
    "register_process_group",
    "replicate_across_groups",
    "sharded_state_dict",
    "start_manager_early",
]
__version__ = VERSION


keep_grpc_out_of_forks()  # here, because both count only before the first import of gRPC
keep_grpc_quiet()


_get, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "torchft_svc.client"))


def __getattr__(name: str) -> Any:
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        reason = f"torchft_svc.{name} needs PyTorch, which is not installed here: pip install torch"
        raise ModuleNotFoundError(reason, name="torch") from None
