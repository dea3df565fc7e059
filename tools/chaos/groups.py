"""Makes the process group of a worker, whose next sum fails on command.

With NCCL all workers are on one device. It refuses two ranks on one device of one host, so each
worker names a host of its own; its sums go over loopback sockets, as between hosts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch

from tools.chaos.options import uses_device
from tools.demo.events import EventLog, SumFailed
from torchft_svc.client import (
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)

_KINDS: Mapping[str, type[ProcessGroup]] = {
    "gloo": ProcessGroupGloo,
    "nccl": ProcessGroupNCCL,
    "isolated-gloo": ProcessGroupBabyGloo,
    "isolated-nccl": ProcessGroupBabyNCCL,
}


class OnPurpose(RuntimeError):
    """A failure that a command asked for."""


class Commands(Protocol):
    """The commands that a worker has not executed yet."""

    def pop_command(self, what: str) -> str | None:
        """Return the arguments of the next command called ``what``, if there is one."""


def device_of(name: str) -> torch.device:
    """Return where a worker with the process group ``name`` trains."""
    return torch.device("cuda", 0) if uses_device(name) else torch.device("cpu")


def make_group(
    name: str, timeout_s: float, worker: str, commands: Commands, log: EventLog
) -> ProcessGroup:
    """Return the process group ``name``, whose next sum fails after the command ``fail``."""
    kind: Any = _KINDS[name]
    if uses_device(name):
        os.environ |= {"NCCL_HOSTID": worker, "NCCL_SOCKET_IFNAME": "lo"}

    class Failing(kind):  # type: ignore[misc]
        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            if commands.pop_command("fail") is not None:
                log.write(SumFailed)
                raise OnPurpose("this sum fails on purpose")
            return super().allreduce(tensors, opts)

    made: ProcessGroup = Failing(timedelta(seconds=timeout_s))
    return made
