"""What a trainer imports; a name's module is imported when the name is first used."""

from typing import TYPE_CHECKING

from torchft_svc.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchft_svc.client.checkpointing.http.transport import HTTPTransport
    from torchft_svc.client.checkpointing.pg import PGTransport
    from torchft_svc.client.checkpointing.transport import CheckpointTransport
    from torchft_svc.client.data import (
        DistributedSampler,
        ElasticDataLoader,
        ElasticSampler,
        ElasticStream,
    )
    from torchft_svc.client.ddp import DistributedDataParallel
    from torchft_svc.client.device_mesh import ft_init_device_mesh
    from torchft_svc.client.fault_tolerance_manager import FaultToleranceManager
    from torchft_svc.client.hsdp import replicate_across_groups, sharded_state_dict
    from torchft_svc.client.managed import ManagedProcessGroup
    from torchft_svc.client.manager import Manager
    from torchft_svc.client.optim import Optimizer, OptimizerWrapper
    from torchft_svc.client.parameter_server import ParameterServer
    from torchft_svc.client.process_groups.base import ProcessGroup
    from torchft_svc.client.process_groups.dummy import ProcessGroupDummy
    from torchft_svc.client.process_groups.gloo import ProcessGroupGloo
    from torchft_svc.client.process_groups.isolated.group import (
        ProcessGroupBabyGloo,
        ProcessGroupBabyNCCL,
    )
    from torchft_svc.client.process_groups.nccl import ProcessGroupNCCL
    from torchft_svc.client.process_groups.registry import register_process_group
    from torchft_svc.client.process_groups.wrappers import (
        ErrorSwallowingProcessGroupWrapper,
        ProcessGroupWrapper,
    )
    from torchft_svc.manager_server.early import start_manager_early
    from torchft_svc.settings import WorldSizeMode

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CheckpointTransport": ".checkpointing.transport",
        "DistributedDataParallel": ".ddp",
        "DistributedSampler": ".data",
        "ElasticDataLoader": ".data",
        "ElasticSampler": ".data",
        "ElasticStream": ".data",
        "ErrorSwallowingProcessGroupWrapper": ".process_groups.wrappers",
        "FaultToleranceManager": ".fault_tolerance_manager",
        "HTTPTransport": ".checkpointing.http.transport",
        "ManagedProcessGroup": ".managed",
        "Manager": ".manager",
        "Optimizer": ".optim",
        "OptimizerWrapper": ".optim",
        "PGTransport": ".checkpointing.pg",
        "ParameterServer": ".parameter_server",
        "ProcessGroup": ".process_groups.base",
        "ProcessGroupBabyGloo": ".process_groups.isolated.group",
        "ProcessGroupBabyNCCL": ".process_groups.isolated.group",
        "ProcessGroupDummy": ".process_groups.dummy",
        "ProcessGroupGloo": ".process_groups.gloo",
        "ProcessGroupNCCL": ".process_groups.nccl",
        "ProcessGroupWrapper": ".process_groups.wrappers",
        "WorldSizeMode": "torchft_svc.settings",
        "ft_init_device_mesh": ".device_mesh",
        "register_process_group": ".process_groups.registry",
        "replicate_across_groups": ".hsdp",
        "sharded_state_dict": ".hsdp",
        "start_manager_early": "torchft_svc.manager_server.early",
    },
)
