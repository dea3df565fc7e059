"""The messages between a trainer and the process that runs its collectives.

Both are one program on one machine: messages are pickled, over a private socket pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from torchft_svc.client.process_groups.members import Members

# Options of collectives cannot be pickled; these are the fields that torch reads.
_OPTION_FIELDS = (
    "reduceOp",
    "rootRank",
    "rootTensor",
    "timeout",
    "asyncOp",
    "device_ids",
    "device",
)


@dataclass(frozen=True, slots=True)
class Backend:
    """The backend of the collectives: ``kind`` is ``gloo`` or ``nccl``, ``device`` torch's name."""

    kind: str
    device: str = "cpu"
    high_priority: bool = False


@dataclass(frozen=True, slots=True)
class Configure:
    """Meet the members over ``backend``; answered by a `Reply`."""

    number: int
    members: Members
    timeout: timedelta
    backend: Backend


@dataclass(frozen=True, slots=True)
class Share:
    """Segment ``segment`` of ``num_bytes``; its descriptor follows."""

    segment: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Segment ``segment`` was freed."""

    segment: int


@dataclass(frozen=True, slots=True)
class ShareDevice:
    """Segment ``segment`` on a CUDA device, and the event behind the copies of its inputs.

    ``memory`` is the result of ``UntypedStorage._share_cuda_``, for ``_new_shared_cuda``; the event
    is a handle for another process.
    """

    segment: int
    device_index: int
    memory: tuple[Any, ...]
    ready: bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a collective on tensors in ``segment``; tensors in ``args`` are `Place`s."""

    number: int
    segment: int
    name: str
    args: Any
    kwargs: Any


@dataclass(frozen=True, slots=True)
class Abort:
    """Leave the members."""


@dataclass(frozen=True, slots=True)
class Lose:
    """A member of the quorum is gone."""

    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Command ``number`` has ended, or, with an ``error``, has failed."""

    number: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ChildFailed:
    """The process ends because of an error; ``line`` is the last one of its traceback."""

    line: str


Command = Configure | Launch | Forget | Abort | Lose


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a contiguous tensor in a shared segment."""

    segment: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Options:
    """An options object of torch: its class and its fields."""

    kind: str
    fields: tuple[tuple[str, Any], ...]


def replace_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to everything that is not a list, tuple or dict."""
    if isinstance(value, list | tuple):
        return [replace_leaves(item, change) for item in value]
    if isinstance(value, dict):
        return {key: replace_leaves(item, change) for key, item in value.items()}
    return change(value)


def options_to_plain(value: Any) -> Any:
    """An options object of torch as `Options`; anything else as it is."""
    kind = type(value).__name__
    # Not `torch.distributed`, which does not export all of them.
    if not (kind.endswith("Options") and hasattr(c10d, kind)):
        return value
    fields = ((name, getattr(value, name)) for name in _OPTION_FIELDS if hasattr(value, name))
    return Options(kind, tuple(fields))


def options_from_plain(plain: Options) -> Any:
    options = getattr(c10d, plain.kind)()
    for name, value in plain.fields:
        setattr(options, name, value)
    return options
