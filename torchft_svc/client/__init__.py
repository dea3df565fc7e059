"""What a trainer imports."""

from torchft_svc.client.checkpointing import CheckpointTransport, HTTPTransport, PGTransport
from torchft_svc.client.config import WorldSizeMode
from torchft_svc.client.data import DistributedSampler
from torchft_svc.client.ddp import DistributedDataParallel
from torchft_svc.client.device_mesh import ft_init_device_mesh
from torchft_svc.client.hsdp import replicate_across_groups, sharded_state_dict
from torchft_svc.client.managed import ManagedProcessGroup
from torchft_svc.client.manager import FaultToleranceManager, Manager
from torchft_svc.client.optim import Optimizer, OptimizerWrapper
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.dummy import ProcessGroupDummy
from torchft_svc.client.process_groups.gloo import ProcessGroupGloo
from torchft_svc.client.process_groups.isolated.group import (
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
)
from torchft_svc.client.process_groups.nccl import ProcessGroupNCCL
from torchft_svc.client.process_groups.wrappers import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroupWrapper,
)

__all__ = [
    "CheckpointTransport",
    "DistributedDataParallel",
    "DistributedSampler",
    "ErrorSwallowingProcessGroupWrapper",
    "FaultToleranceManager",
    "HTTPTransport",
    "ManagedProcessGroup",
    "Manager",
    "Optimizer",
    "OptimizerWrapper",
    "PGTransport",
    "ProcessGroup",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "WorldSizeMode",
    "ft_init_device_mesh",
    "replicate_across_groups",
    "sharded_state_dict",
]
