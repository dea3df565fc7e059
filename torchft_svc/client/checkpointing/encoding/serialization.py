"""Encodes a state as a description (JSON) and one sequence of bytes, and decodes it.

The bytes are the blobs in order, each at the next multiple of the alignment, so their offsets
follow from their sizes. Nothing is pickled, and nothing that was received is executed.

The tensors of a decoded state are host tensors without gradient, views of the received memory,
which is freed with the last of them. They are meant for ``load_state_dict``, which copies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from torchft_svc.client.checkpointing.encoding.device_copies import DeviceCopies
from torchft_svc.client.checkpointing.encoding.memory import Memory, allocate
from torchft_svc.client.checkpointing.encoding.tensors import (
    ALIGNMENT,
    MAX_DIM,
    TensorSpec,
    TensorTable,
    make_tensor,
    parse_spec,
)
from torchft_svc.client.checkpointing.encoding.tree import decode, encode
from torchft_svc.client.checkpointing.encoding.values import BadTree, Json
from torchft_svc.errors import CheckpointError, ConfigError

VERSION = 1
# About 500 000 tensors; a description is parsed as a whole, so it must fit into memory.
MAX_DESCRIPTION_BYTES = 64 << 20
# 16 TiB: beyond any host's memory, below any overflow.
MAX_STATE_BYTES = 1 << 44
# Smaller blobs are copied into one buffer: that is cheaper than serving each from its own place.
SMALL_BLOB_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Described:
    """A state ready to be sent: its description and its bytes.

    ``memory`` still belongs to the state's owner, and must not change while it is read.
    """

    description: bytes
    memory: Memory


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked description; `rebuild` needs ``size`` received bytes."""

    tree: Json
    specs: tuple[TensorSpec, ...]
    blob_sizes: tuple[int, ...]
    size: int

    def rebuild(self, memory: memoryview, source: str) -> Any:
        """The state; its tensors are views of ``memory`` (``size`` bytes).

        Raises:
            CheckpointError: the description contradicts itself.
        """
        blobs = [
            torch.frombuffer(memory[start : start + size], dtype=torch.uint8)
            for start, size in zip(_starts(self.blob_sizes), self.blob_sizes, strict=False)
        ]
        try:
            return decode(self.tree, [make_tensor(spec, blobs) for spec in self.specs])
        except (BadTree, RuntimeError) as error:
            raise CheckpointError(source, f"malformed description: {error}") from error


def describe(state: object) -> Described:
    """Describe ``state``; tensors on a device are copied to the host.

    Raises:
        ConfigError: a value that cannot be sent; its field is the path, such as
            ``state_dict['optim']['fn']``.
    """
    table = TensorTable()
    tree = encode(state, table.number_of)
    specs, blobs = table.layout()
    order = sorted(range(len(blobs)), key=lambda n: blobs[n].nbytes < SMALL_BLOB_BYTES)
    places = {number: place for place, number in enumerate(order)}
    document = {
        "version": VERSION,
        "blobs": [blobs[number].nbytes for number in order],
        "tensors": [[places.get(spec.blob, spec.blob), *spec.to_json()[1:]] for spec in specs],
        "tree": tree,
    }
    description = json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(description) > MAX_DESCRIPTION_BYTES:
        raise ConfigError(
            field="state_dict",
            value=f"{len(specs)} tensors",
            reason=f"its description takes more than {MAX_DESCRIPTION_BYTES >> 20} MiB",
        )
    return Described(description, _memory_of([blobs[number] for number in order]))


def check_state(state: object) -> None:
    """Raise the `ConfigError` that `describe` would raise for a value in ``state``."""
    encode(state, TensorTable().number_of)


def estimate_bytes(state: object) -> int:
    """About how many bytes ``state`` would be sent as; nothing is copied.

    Raises:
        ConfigError: as in `describe`.
    """
    table = TensorTable()
    encode(state, table.number_of)
    return table.estimate_bytes()


def _memory_of(blobs: list[torch.Tensor]) -> Memory:
    sizes = [blob.nbytes for blob in blobs]
    starts = _starts(sizes)
    size = starts[-1]
    pieces: list[tuple[int, memoryview]] = []
    steady = []
    placed = zip(starts, blobs, strict=False)
    for is_copied, group in groupby(placed, lambda entry: _is_copied(entry[1])):
        run = list(group)
        if is_copied:
            (first, _), (last, last_blob) = run[0], run[-1]
            steady.append(first)
            pieces.append((first, _copy_run(run, last + last_blob.nbytes)))
        else:
            pieces += [(start, _view(blob)) for start, blob in run]
    return Memory(pieces, size, steady)


def _is_copied(blob: torch.Tensor) -> bool:
    return blob.nbytes < SMALL_BLOB_BYTES or blob.device.type != "cpu"


def _copy_run(run: list[tuple[int, torch.Tensor]], end: int) -> memoryview:
    """The blobs, which follow one another, in one buffer."""
    begin = run[0][0]
    copied = allocate(end - begin)
    on_devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for start, blob in run:
        if blob.device.type == "cuda":
            on_devices.setdefault(blob.device, []).append((start - begin, blob))
        else:
            copied[start - begin : start - begin + blob.nbytes] = _view(blob.cpu())
    for parts in on_devices.values():
        DeviceCopies(parts, copied).run()
    return copied


def _view(blob: torch.Tensor) -> memoryview:
    buffer: Any = blob.numpy()  # numpy's stubs do not know that an array is a buffer
    return memoryview(buffer)


def _starts(sizes: Sequence[int]) -> list[int]:
    """The start of each blob, and then the total size."""
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return starts


def parse(description: bytes | bytearray | memoryview, source: str) -> Plan:
    """Check a received description.

    Raises:
        CheckpointError: it is malformed, or claims an impossible size.
    """
    try:
        document = json.loads(bytes(description), parse_constant=_no_constant)
        return _plan(document)
    except RecursionError as error:
        raise CheckpointError(source, "malformed description: nested too deep") from error
    except ValueError as error:  # BadTree, JSONDecodeError and UnicodeDecodeError are such
        raise CheckpointError(source, f"malformed description: {error}") from error


def _plan(document: Any) -> Plan:
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise BadTree(f"not a description of version {VERSION}")
    sizes, entries = document.get("blobs"), document.get("tensors")
    if not isinstance(sizes, list) or not isinstance(entries, list):
        raise BadTree("the table of tensors is missing")
    if not all(type(size) is int and 0 < size <= MAX_DIM for size in sizes):
        raise BadTree("a blob's size is not a size")
    total = _starts(sizes)[-1]
    if total > MAX_STATE_BYTES:
        raise BadTree(f"it claims {total} bytes, more than {MAX_STATE_BYTES}")
    specs = tuple(parse_spec(entry, sizes) for entry in entries)
    return Plan(document.get("tree"), specs, tuple(sizes), total)


def _no_constant(name: str) -> None:
    raise BadTree(f"{name} is not JSON")
