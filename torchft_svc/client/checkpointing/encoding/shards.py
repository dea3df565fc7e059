"""Splits DTensors into plain values that any transport can send, and restores them (rule H9).

A worker heals from the worker with its own group rank, so only the local part is sent, with a
description of the whole tensor. The device mesh is not sent: the receiver has an equal one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchft_svc.client.checkpointing.encoding.tree import map_nodes
from torchft_svc.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

# The only key of a dict that stands for a DTensor.
_MARK = "torchft.dtensor"

MeshKey = tuple[str, tuple[str, ...], tuple[int, ...], str]


def is_sharded(value: Any) -> bool:
    if not _has_dtensors():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def take_apart(state: Any) -> Any:
    """``state`` with every DTensor replaced by its local part and a description."""
    if not _has_dtensors():
        return state

    def describe(value: Any) -> Any:
        if not is_sharded(value):
            return value
        kind, names, sizes, ranks = mesh_key(value.device_mesh)
        return {
            _MARK: {
                "local": value._local_tensor.detach(),
                "shape": tuple(value.shape),
                "stride": tuple(value.stride()),
                "placements": [_placement_to_plain(place) for place in value.placements],
                "mesh": [kind, list(names), list(sizes), ranks],
            }
        }

    return map_nodes(state, describe)


def put_together(state: Any, own_state: Callable[[], Any], source: str) -> Any:
    """``state`` with the DTensors that `take_apart` had replaced.

    ``own_state`` returns this worker's state, whose DTensors provide the meshes; it is called only
    if there is a DTensor to restore.

    Raises:
        CheckpointError: this worker has no such mesh; the message names ``source``.
    """
    meshes: dict[MeshKey, DeviceMesh] | None = None

    def rebuild(value: Any) -> Any:
        nonlocal meshes
        if type(value) is not dict or value.keys() != {_MARK}:
            return value
        if meshes is None:
            meshes = _meshes_of(own_state())
        return _rebuild(value[_MARK], meshes, source)

    return map_nodes(state, rebuild)


def mesh_key(mesh: DeviceMesh) -> MeshKey:
    """What is equal on all groups: device type, names and sizes of the dimensions, and ranks.

    These are ranks within a group, so workers of the same group rank have meshes of equal ranks.
    """
    names, sizes = tuple(mesh.mesh_dim_names or ()), tuple(mesh.mesh.shape)
    return mesh.device_type, names, sizes, _ranks_text(mesh.mesh.flatten().tolist())


def _ranks_text(ranks: list[int]) -> str:
    """Short, because each sharded tensor contains it, and there may be thousands of ranks."""
    text = ",".join(map(str, ranks))
    return (
        text
        if len(text) <= 40
        else f"{text[:20]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    )


def _has_dtensors() -> bool:
    """Whether the program may have DTensors."""
    # Without this module there are none; importing it here would only cost time.
    return "torch.distributed.tensor" in sys.modules


def _meshes_of(state: Any) -> dict[MeshKey, DeviceMesh]:
    meshes: dict[MeshKey, DeviceMesh] = {}

    def add_mesh(value: Any) -> Any:
        if is_sharded(value):
            meshes[mesh_key(value.device_mesh)] = value.device_mesh
        return value

    map_nodes(state, add_mesh)
    return meshes


def _rebuild(part: Any, meshes: dict[MeshKey, DeviceMesh], source: str) -> DTensor:
    try:
        kind, names, sizes, ranks = part["mesh"]
        key = (kind, tuple(names), tuple(sizes), ranks)
        shape, stride, local = part["shape"], part["stride"], part["local"]
        placements = [_placement_from_plain(place) for place in part["placements"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(source, f"a sharded tensor is malformed: {error}") from error
    if key not in meshes:
        ours = ", ".join(map(str, meshes)) or "none"
        raise CheckpointError(
            source,
            f"it is sharded over a mesh {key}, in what is registered here there is {ours}: use "
            "equal meshes",
        )
    from torch.distributed.tensor import DTensor

    mesh = meshes[key]
    return DTensor.from_local(
        local.to(mesh.device_type), mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _placement_to_plain(place: Placement) -> list[Any]:
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(place, _StridedShard):  # FSDP over tensor parallelism; first: older torch derives
        return ["strided", place.dim, place.split_factor]  # it from Shard
    if place.is_shard():
        return ["shard", place.dim]  # type: ignore[attr-defined]
    if place.is_replicate():
        return ["replicate"]
    return ["partial", place.reduce_op]  # type: ignore[attr-defined]


def _placement_from_plain(plain: list[Any]) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    name, *values = plain
    if name == "strided":
        dim, split_factor = values
        return _StridedShard(dim, split_factor=split_factor)
    kinds: dict[str, type[Placement]] = {
        "shard": Shard,
        "replicate": Replicate,
        "partial": Partial,
    }
    return kinds[name](*values)
