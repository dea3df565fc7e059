"""Torch's own world in a test: that of one worker, which is alone in its replica group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def alone_in_torch() -> Iterator[None]:
    """Make the default process group, of this process alone; destroy it at the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
