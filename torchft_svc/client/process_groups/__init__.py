"""Process groups that survive the loss of their members."""

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.dummy import ProcessGroupDummy
from torchft_svc.client.process_groups.gloo import ProcessGroupGloo
from torchft_svc.client.process_groups.isolated import (
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
)
from torchft_svc.client.process_groups.nccl import ProcessGroupNCCL
from torchft_svc.client.process_groups.wrappers import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroupWrapper,
)

__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "ProcessGroup",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
]
