"""`torchft.ddp`: data parallel wrappers of a model."""

# No postponed annotations: torch looks at those of a communication hook.

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import GradBucket
from torch.nn import parallel

from torchft_svc.client.ddp import DistributedDataParallel as NativeDataParallel
from torchft_svc.compat.process_group import ProcessGroupDummy

if TYPE_CHECKING:
    from torchft_svc.compat.manager import Manager


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Torch's own wrapper, whose buckets of gradients are averaged over the groups.

    For torch, this worker is alone. ``find_unused_parameters`` is True unless the program gives
    it: then torch keeps the order of its buckets, and a group that joins loses no step to that.

    Args:
        manager: averages the gradients.
        module: the model to train.
        kwargs: for torch's class.
    """

    def __init__(self, manager: "Manager", module: nn.Module, **kwargs: Any) -> None:
        given = {"find_unused_parameters": True, **kwargs}
        # The group has no other member: weights become equal by healing, buffers stay as they are.
        alone = {"process_group": ProcessGroupDummy(0, 1), "init_sync": False}
        super().__init__(module, **{**given, **alone})
        if self.find_unused_parameters:
            manager.keep_bucket_order()
        self.register_comm_hook(manager, _average)


def _average(manager: "Manager", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return manager.allreduce_grad(bucket.buffer())


class PureDistributedDataParallel(NativeDataParallel):
    """The native wrapper, which uses nothing of torch's."""

    def __init__(self, manager: "Manager", module: nn.Module) -> None:
        super().__init__(manager, module)

    def forward(self, *args: object) -> object:
        """Run the module's own forward pass."""
        return super().forward(*args)
