"""The tensors of one checkpoint, in files of torch.distributed.checkpoint.

To import that takes more than a second, so this module is imported when a checkpoint is written or
read, not when a worker starts.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write host tensors by their names, and everything of it to the disk."""
    writer = FileSystemWriter(folder, thread_count=1)
    with _of_torch(), torch.device("cpu"):  # whatever the program's default device is
        state_dict_saver.save(dict(tensors), storage_writer=writer, no_dist=True)


def read_tensors(folder: Path) -> dict[str, Any]:
    """Read what `write_tensors` wrote; raises whatever torch raises."""
    reader = FileSystemReader(folder)
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with _of_torch(), torch.device("cpu"):
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@contextlib.contextmanager
def _of_torch() -> Iterator[None]:
    """torch's own error is no `Exception`, and its words are a traceback: raise what it is about.

    It warns that one process acts alone, which is meant; a filter is the only switch.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        yield
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        while cause.__context__ is not None:  # the first of those that followed from one another
            cause = cause.__context__
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from error
