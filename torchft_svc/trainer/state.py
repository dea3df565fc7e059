"""The state of a training run: what it consists of, and how it is written as bytes.

Workers offer their state to each other as bytes, and `checkpoint` stores it in files; both hold the
same tree in the encoding of heals, which contains no code, so reading a state executes nothing.
Random number generators are not part of it: they are seeded anew for each step, from its number.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import xxhash

from torchft_svc.client.checkpointing.encoding.memory import allocate
from torchft_svc.client.checkpointing.encoding.serialization import describe, parse
from torchft_svc.client.checkpointing.encoding.tree import map_nodes
from torchft_svc.errors import CheckpointError, ConfigError
from torchft_svc.trainer.messages import Position

# Magic and version, xxh3 of all that follows the header, size of the description.
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"TFTstate"
# The part that holds the model's `state_dict`, if there is one model.
MODEL = "model"
# Names of tensors that an error message shows.
_MAX_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """All that a run continues from, after the step of ``position``.

    Args:
        parts: what ``state_dict()`` of each part returned: ``model``, ``optimizer``, ``scheduler``,
            or what the program registered.
        counters: plain values of the trainer.
    """

    position: Position
    parts: Mapping[str, Any]
    counters: Mapping[str, Any] = field(default_factory=dict)


def to_tree(state: TrainingState) -> dict[str, Any]:
    """``state`` as nested dicts, which `from_tree` reads."""
    return {
        "position": asdict(state.position),
        "parts": dict(state.parts),
        "counters": dict(state.counters),
    }


def from_tree(tree: Any, source: str) -> TrainingState:
    """The state that `to_tree` wrote.

    Raises:
        CheckpointError: it did not.
    """
    try:
        position = Position(**tree["position"])
        return TrainingState(
            position=position, parts=tree["parts"], counters=dict(tree["counters"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(source, f"this is not the state of a trainer: {error}") from error


def encode_state(state: TrainingState) -> bytes:
    """``state`` as bytes; tensors on a device are copied to the host.

    Raises:
        ConfigError: a value that cannot be stored; its field is the path in the state.
    """
    described = describe(to_tree(state))
    views = described.memory.views(0, described.memory.size)
    digest = xxhash.xxh3_64(described.description)
    for view in views:
        digest.update(view)
    header = _HEADER.pack(_MAGIC, digest.intdigest(), len(described.description))
    return b"".join([header, described.description, *views])


def decode_state(data: bytes, source: str) -> TrainingState:
    """The state that `encode_state` wrote; its tensors are host tensors of their own.

    Raises:
        CheckpointError: ``data`` (from ``source``) is cut off or damaged.
    """
    if len(data) < _HEADER.size:
        raise CheckpointError(source, f"it has {len(data)} bytes, less than its header")
    magic, digest, length = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    if magic != _MAGIC:
        raise CheckpointError(source, "this is not the state of a trainer")
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise CheckpointError(source, "its checksum does not fit")
    plan = parse(body[:length], source)
    if plan.size != len(body) - length:
        raise CheckpointError(source, "its size does not fit its description")
    memory = allocate(plan.size)
    memory[:] = body[length:]
    return from_tree(plan.rebuild(memory, source), source)


def copy_to_host(state: TrainingState) -> TrainingState:
    """Copy a state, so that it does not change with training."""
    copies: dict[int, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().to("cpu", copy=True)
        return copies[id(value)]

    return TrainingState(
        position=state.position,
        parts=map_nodes(dict(state.parts), copied),
        counters=dict(state.counters),
    )


def check_fits(found: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Check the state of a model before ``model`` loads it: nothing is changed.

    Raises:
        ConfigError: names or shapes differ; the reason names the first of them.
    """
    if not isinstance(found, Mapping):
        raise ConfigError("state_dict", type(found).__name__, "it is not the state of a model")
    expected = model.state_dict()
    differences = [
        *(f"{name} is missing" for name in expected if name not in found),
        *(f"the model has no {name}" for name in found if name not in expected),
        *(
            f"{name} is {list(found[name].shape)}, the model's is {list(tensor.shape)}"
            for name, tensor in expected.items()
            if isinstance(tensor, torch.Tensor)
            and isinstance(found.get(name), torch.Tensor)
            and found[name].shape != tensor.shape
        ),
    ]
    if differences:
        shown = "; ".join(differences[:_MAX_SHOWN])
        more = len(differences) - _MAX_SHOWN
        tail = f"; and {more} more" if more > 0 else ""
        raise ConfigError(
            field="state_dict",
            value=f"{len(found)} entries",
            reason=f"it is not of this model: {shown}{tail}",
        )
