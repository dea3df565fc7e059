"""A device mesh with a dimension whose size follows the quorum."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchft_svc.client.managed import ManagedProcessGroup
from torchft_svc.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchft_svc.client.manager import Manager

_numbers = itertools.count()


def ft_init_device_mesh(
    *,
    device_type: str,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str],
    replicate_dim: int,
    manager: Manager,
) -> DeviceMesh:
    """Return a mesh as torch's ``init_device_mesh`` does, with one dimension across the groups.

    The other dimensions are this group's workers. For torch, the dimension ``replicate_dim`` has
    size 1, so its value in ``mesh_shape`` is ignored; its process group is a
    `ManagedProcessGroup`, which reduces over the groups that contribute in the step, and whose
    ``size()`` is their number. FSDP2's ``fully_shard`` over this dimension and another one is HSDP;
    ``replicate_across_groups`` is not needed then. A step in which nothing was reduced across the
    groups is discarded.

    Raises:
        ConfigError: the arguments do not match, or ``torch.distributed.init_process_group`` was
            not called by this group's workers.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    shape, names = list(mesh_shape), list(mesh_dim_names)
    if len(shape) != len(names):
        raise ConfigError("mesh_dim_names", tuple(names), f"there are {len(shape)} dimensions")
    if not 0 <= replicate_dim < len(shape):
        raise ConfigError("replicate_dim", replicate_dim, f"use 0 to {len(shape) - 1}")
    group = ManagedProcessGroup(manager)
    manager.register_reducer(group)
    group.register(f"torchft_replicate_{next(_numbers)}")
    replicate_name = names.pop(replicate_dim)
    shape.pop(replicate_dim)
    if not shape:
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=(replicate_name,))
    inner = init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names))
    groups = [inner.get_group(name) for name in names]
    groups.insert(replicate_dim, group)
    return DeviceMesh.from_group(
        groups,
        device_type,
        mesh=inner.mesh.unsqueeze(replicate_dim),
        mesh_dim_names=tuple(mesh_dim_names),
    )
