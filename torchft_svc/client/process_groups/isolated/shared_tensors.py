"""The trainer's tensors that are in shared memory already, and so need not be copied."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.multiprocessing

from torchft_svc.client.process_groups.isolated.messages import Forget, Place, Share
from torchft_svc.client.process_groups.isolated.process import ChildProcess

# Torch declares no types for what is in there.
_sharing: Any = torch.multiprocessing


class SharedTensors:
    """The storages that were sent to one process, which forgets them when they are freed."""

    def __init__(self) -> None:
        # Negative numbers; segments of the pool have the others.
        self._numbers = itertools.count(-1, -1)
        self._known: dict[int, tuple[Any, int]] = {}

    def forget_freed(self, child: ChildProcess) -> None:
        """Tell ``child`` which storages were freed; cheap.

        Raises:
            QuorumFailed: the process has ended.
        """
        freed = {key: number for key, (ref, number) in self._known.items() if ref.expired()}
        for key, number in freed.items():
            del self._known[key]
            child.send(Forget(number))

    def place(self, tensor: torch.Tensor, child: ChildProcess) -> Place | None:
        """Where ``child`` finds ``tensor``; None if it has to be copied.

        Raises:
            QuorumFailed: the process has ended.
        """
        if not _is_shared(tensor):
            return None
        storage: Any = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        number = self._share(storage, child) if known is None or known[0].expired() else known[1]
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return Place(number, offset, tuple(tensor.shape), tensor.dtype)

    def _share(self, storage: Any, child: ChildProcess) -> int:
        descriptor, num_bytes = storage._share_fd_cpu_()  # torch owns this descriptor
        number = next(self._numbers)
        child.share(Share(number, num_bytes), descriptor)
        self._known[storage._cdata] = _sharing.reductions.StorageWeakRef(storage), number
        return number


def _is_shared(tensor: torch.Tensor) -> bool:
    storage: Any = tensor.untyped_storage()
    if tensor.device.type != "cpu" or tensor.numel() == 0 or not tensor.is_contiguous():
        return False
    # Torch's other strategy has no descriptor that could be sent.
    by_descriptor = _sharing.get_sharing_strategy() == "file_descriptor"
    return bool(by_descriptor and storage.is_shared())
