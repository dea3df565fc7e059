"""Process groups that survive the loss of their members."""

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.dummy import ProcessGroupDummy
from torchft_svc.client.process_groups.gloo import ProcessGroupGloo
from torchft_svc.client.process_groups.nccl import ProcessGroupNCCL

__all__ = ["ProcessGroup", "ProcessGroupDummy", "ProcessGroupGloo", "ProcessGroupNCCL"]
