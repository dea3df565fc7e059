"""The files of one checkpoint, in a local folder: tensors, all else, and a manifest of both.

torch.distributed.checkpoint writes the tensors, under the names that it would use itself, so plain
torch can read a model from a checkpoint. All else is JSON. The manifest has the size and the
checksum of each file, and its own.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from torchft_svc.client.checkpointing.encoding.tensors import TensorTable
from torchft_svc.client.checkpointing.encoding.tree import decode, encode, tensor_places
from torchft_svc.errors import CheckpointError
from torchft_svc.trainer.messages import Position
from torchft_svc.trainer.state import TrainingState, from_tree, to_tree

FORMAT = 1
MANIFEST = "manifest.json"
_TREE = "state.json"
_PIECE_BYTES = 16 << 20


def write_files(folder: Path, state: TrainingState) -> None:
    """Write ``state`` into a new ``folder``, and everything of it to the disk."""
    table = TensorTable()
    tree = encode(to_tree(state), table.number_of, "state")
    names = _tensor_names(tree, len(table.tensors))
    tensors = {
        name: tensor.detach().resolve_conj().resolve_neg().cpu()
        for name, tensor in zip(names, table.tensors, strict=True)
    }
    folder.mkdir()
    checkpoint_tensors().write_tensors(folder, tensors)
    document = {"tree": tree, "tensors": names}
    _write_synced(folder / _TREE, json.dumps(document, allow_nan=False).encode())
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3_64": _digest(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"format": FORMAT, "position": asdict(state.position), "files": files}
    manifest["checksum"] = _checksum(manifest)
    _write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_folder(folder)


def read_files(folder: Path, source: str) -> TrainingState:
    """Read what `write_files` wrote; its files have been verified."""
    try:
        document = json.loads((folder / _TREE).read_bytes())
        tensors = checkpoint_tensors().read_tensors(folder)
        tree = decode(document["tree"], [tensors[name] for name in document["tensors"]])
    except Exception as error:  # what it may be is up to torch's loader
        reason = f"it cannot be read: {type(error).__name__}: {error}"
        raise CheckpointError(source, reason) from error
    return from_tree(tree, source)


def checkpoint_tensors() -> Any:
    """The module that knows torch.distributed.checkpoint, which is slow to import."""
    return importlib.import_module("torchft_svc.trainer.checkpoint_tensors")


def _tensor_names(tree: Any, count: int) -> list[str]:
    """A name for each tensor: its path, so ``model.0.weight`` is what torch would call it."""
    names = [""] * count
    taken: set[str] = set()
    for path, number in tensor_places(tree):
        if names[number]:  # one tensor at several places
            continue
        name = ".".join(_words_of(path)).removeprefix("parts.")
        names[number] = name if name not in taken else f"{name}#{number}"
        taken.add(names[number])
    return names


def _words_of(path: tuple[str, ...]) -> Iterator[str]:
    """Keys and indices; steps of the encoding itself are left out."""
    for step in path:
        if step.startswith('"'):
            yield json.loads(step)
        elif step[0].isdigit():
            yield step
        elif not step.startswith("metadata"):  # a dict of modules, around its entries
            yield step.lstrip("abcdefghijklmnopqrstuvwxyz_")


def verify_files(folder: Path, source: str) -> dict[str, Any]:
    """Verify all files by the manifest, and return it. Raises `CheckpointError`."""
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(source, f"its manifest cannot be read: {error}") from error
    manifest = parse_manifest(data, source)
    for name, entry in manifest["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise CheckpointError(source, f"{name} has {size} bytes of {entry['bytes']}")
            if _digest(path) != entry["xxh3_64"]:
                raise CheckpointError(source, f"the checksum of {name} does not fit")
        except OSError as error:
            raise CheckpointError(source, f"{name} cannot be read: {error}") from error
    return manifest


def parse_manifest(data: bytes, source: str) -> dict[str, Any]:
    try:
        manifest = json.loads(data)
        checksum = manifest.pop("checksum")
        is_whole = checksum == _checksum(manifest)
        Position(**manifest["position"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(source, "its manifest is damaged") from error
    if not is_whole:
        raise CheckpointError(source, "the checksum of its manifest does not fit")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(source, f"it has format {manifest.get('format')}, not {FORMAT}")
    assert isinstance(manifest, dict)
    return manifest


def position_in(manifest: dict[str, Any]) -> Position:
    return Position(**manifest["position"])


def _checksum(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return str(digest.hexdigest())


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
