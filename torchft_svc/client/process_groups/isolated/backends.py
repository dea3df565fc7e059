"""The backends that can be isolated, and their differences."""

from __future__ import annotations

import functools
from datetime import timedelta

import torch

from torchft_svc.client.process_groups.isolated.device_segments import DeviceSegment, new_stream
from torchft_svc.client.process_groups.isolated.group import IsolatedProcessGroup
from torchft_svc.client.process_groups.isolated.messages import Backend
from torchft_svc.client.process_groups.isolated.segments import HostSegment, Pool
from torchft_svc.client.process_groups.nccl import check_support, resolve_device


class ProcessGroupBabyGloo(IsolatedProcessGroup):
    """gloo in a process of its own, with members that change; see `IsolatedProcessGroup`."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout, Backend("gloo"), lambda: Pool(HostSegment.create))


class ProcessGroupBabyNCCL(IsolatedProcessGroup):
    """NCCL in a process of its own, with members that change; see `IsolatedProcessGroup`.

    The process has its own CUDA context, which needs some hundred MB of device memory and is
    created again after each kill. Compared with `ProcessGroupNCCL`, a collective costs one more
    copy on the device in each direction. A work's ``wait()`` blocks the current stream, and the CPU
    only until the operation has been started; ``wait(timeout)`` blocks the caller until it has
    ended. **Not yet run on a GPU.**

    Args:
        timeout: the longest time for a collective, and for connecting.
        device: where the tensors are (default: the current CUDA device).
        high_priority: run the collectives before other work on the device.

    Raises:
        ConfigError: there is no CUDA device, or torch was built without NCCL.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        device: torch.device | int | None = None,
        high_priority: bool = False,
    ) -> None:
        check_support("ProcessGroupBabyNCCL", "ProcessGroupBabyGloo")
        where = resolve_device(device)

        def make_pool() -> Pool:
            # After a kill the old stream may wait forever.
            stream = new_stream(where)
            create = functools.partial(DeviceSegment, device=where, stream=stream)
            return Pool(create, on_device=True)

        super().__init__(timeout, Backend("nccl", str(where), high_priority), make_pool)
