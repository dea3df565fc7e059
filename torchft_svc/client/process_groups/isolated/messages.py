"""What a trainer and the process that carries its collectives tell each other.

They are one program on one machine: messages are pickled, over a socket that nobody else has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchft_svc.client.process_groups.base import Members

# Options of collectives cannot be pickled; these are the fields that torch reads.
_OPTION_FIELDS = ("reduceOp", "rootRank", "rootTensor", "timeout", "asyncOp", "device_ids")

# The template tells ``ready``, ``born PID`` and ``ended PID STATUS``.
MAX_TEMPLATE_MESSAGE = 64


@dataclass(frozen=True, slots=True)
class Configure:
    """Meet the members; answered by `Configured` or `Failed` with this ``number``."""

    number: int
    members: Members
    timeout: timedelta


@dataclass(frozen=True, slots=True)
class Share:
    """Segment ``segment`` of ``num_bytes``; its descriptor follows."""

    segment: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a collective; answered by `Done` or `Failed`. Tensors in ``args`` are `Place`s."""

    number: int
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
class Done:
    """What had this number is over."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """What had this number has failed."""

    number: int
    error: str


Request = Configure | Share | Launch | Abort | Lose
Answer = Done | Failed


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a shared segment; it is contiguous there."""

    segment: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Options:
    """An options object of torch: its class, and what it says."""

    kind: str
    fields: tuple[tuple[str, Any], ...]


def replace_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` made to everything that is not a list, a tuple or a dict."""
    if isinstance(value, list | tuple):
        return [replace_leaves(item, change) for item in value]
    if isinstance(value, dict):
        return {key: replace_leaves(item, change) for key, item in value.items()}
    return change(value)


def options_to_plain(value: Any) -> Any:
    """An options object of torch as `Options`; anything else as it is."""
    kind = type(value).__name__
    if not (kind.endswith("Options") and hasattr(dist, kind)):
        return value
    told = ((name, getattr(value, name)) for name in _OPTION_FIELDS if hasattr(value, name))
    return Options(kind, tuple(told))


def options_from_plain(plain: Options) -> Any:
    """The options object."""
    options = getattr(dist, plain.kind)()
    for name, value in plain.fields:
        setattr(options, name, value)
    return options
