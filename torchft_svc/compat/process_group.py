"""`torchft.process_group`: process groups with members that change, by both of their interfaces.

The stable release calls `configure` with a store. The nightlies exchange *handles*: each member
hosts a store, and names it; `reconfigure` gets those of all members, in the order of their ranks.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from torchft_svc.client import device_mesh, managed
from torchft_svc.client.process_groups import base, dummy, gloo, nccl, torch_group, wrappers
from torchft_svc.client.process_groups.isolated import group as isolated
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.operations import CompletedWork
from torchft_svc.client.process_groups.registry import make_process_group
from torchft_svc.client.process_groups.rendezvous import StoreConnection
from torchft_svc.compat.errors import public_errors
from torchft_svc.compat.futures import context_timeout, stream_timeout
from torchft_svc.compat.meeting_places import MeetingPlaces
from torchft_svc.compat.utils import get_stream_context, record_event, synchronize
from torchft_svc.compat.work import _DummyWork
from torchft_svc.errors import ConfigError
from torchft_svc.host.address import HostPort, reachable_host
from torchft_svc.host.uninterruptible import nothing
from torchft_svc.settings import positive_s
from torchft_svc.testing import faults

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchft_svc.compat.manager import Manager

__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupBaby",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "ProcessGroupXCCL",
    "ReconfigureOptions",
    "_DummyWork",
    "context_timeout",
    "create_store_client",
    "ft_init_device_mesh",
    "get_stream_context",
    "reconfigure_with_store",
    "record_event",
    "stream_timeout",
    "synchronize",
]

_TIMEOUT = timedelta(seconds=60)


@dataclass
class ReconfigureOptions:
    """The next members of a process group, by their handles.

    A list is in the order of their ranks; a set is put in an order that all members find.
    ``uuid`` names this set of members, such as by the quorum's id. ``timeout`` is how long they may
    take to come (default: the group's own, which is that of collectives). ``hints`` have no effect.
    """

    uuid: int = 0
    handles: list[str] | set[str] = field(default_factory=list)
    timeout: timedelta | None = None
    hints: dict[str, str] = field(default_factory=dict)


class ProcessGroup(base.ProcessGroup):
    """The base of process groups, also of a program's own.

    A subclass of a program implements the collectives, and either `configure` or `reconfigure`
    with `get_reconfigure_handle`.
    """

    supports_reconfigure = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, timedelta)]
        super().__init__(given[0] if given else _TIMEOUT)
        self._replica_id = ""
        self._global_rank: int | None = None
        self._handle = ""
        self._store: TCPStore | None = None  # this member's own, for groups whose first it is
        self._places = MeetingPlaces()

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no {name}()")

    def _configure(self, members: Members) -> None:
        if type(self).reconfigure is ProcessGroup.reconfigure:
            raise NotImplementedError(f"{type(self).__name__} has no configure()")
        reconfigure_with_store(
            self, members.store_addr, members.rank, members.world_size, self._timeout
        )

    def abort(self, errored: bool = True) -> None:
        """Do nothing: a group without collectives has none under way."""

    def set_rank_info(
        self,
        replica_id: str,
        group_rank: int,
        group_world_size: int,
        global_rank: int | None = None,
    ) -> None:
        """Set what the handle says of this member; before `get_reconfigure_handle`."""
        self._replica_id, self._global_rank = replica_id, global_rank

    def get_reconfigure_handle(self) -> str:
        """Return this member's handle: JSON with an id and the address of a store."""
        if not self._handle:
            self._store = store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            where = HostPort(reachable_host(HostPort("0.0.0.0", store.port)), store.port)
            named = {"id": uuid.uuid4().hex, "store": str(where), "global_rank": self._global_rank}
            self._handle = json.dumps(named)
        return self._handle

    def reconfigure(self, opts: ReconfigureOptions) -> dist.Work:
        """Leave the present members, and connect those of the handles; returns when connected.

        Raises:
            RuntimeError, TimeoutError: a member did not arrive in time, or failed.
            ConfigError: this member is not among the handles, or the first one is not a handle.
        """
        own = self.get_reconfigure_handle()
        handles = opts.handles if isinstance(opts.handles, list) else sorted(opts.handles)
        if own not in handles:
            raise ConfigError("handles", handles, "this member's own handle is not among them")
        timeout = self._timeout if opts.timeout is None else opts.timeout
        positive_s("timeout", timeout)
        rank = handles.index(own)
        with public_errors():
            place = self._places.agree_on_place(handles, rank, opts.uuid, timeout)
            name = self._replica_id or json.loads(own)["id"]
            self.configure(place, name, rank, len(handles), opts.uuid or None)
        return CompletedWork()

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> dist.Work:
        """Broadcast one tensor from the member with rank ``root``."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        work: dist.Work = self.broadcast([tensor], options)
        return work

    def register(self, name: str) -> ProcessGroup:  # type: ignore[override]
        """Register the group with torch under ``name``, and return it."""
        super().register(name)
        return self

    def unregister(self) -> None:
        """Let torch forget the group, which is shut down; its name stays taken."""
        dist.destroy_process_group(self)


class Abortable:
    """The argument that `abort` has in the public release; the group is unusable either way."""

    def abort(self, errored: bool = True) -> None:
        """Leave the members at once, so that their collectives fail instead of waiting."""
        super().abort()  # type: ignore[misc]


class ProcessGroupGloo(Abortable, gloo.ProcessGroupGloo, ProcessGroup):
    """The native gloo group; see `torchft_svc.ProcessGroupGloo`."""

    def __init__(self, timeout: timedelta = _TIMEOUT, pg: dist.ProcessGroup | None = None) -> None:
        _refuse_given(pg)
        super().__init__(timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's name in torch's registry."""
        return "torchft-gloo"


class ProcessGroupNCCL(Abortable, nccl.ProcessGroupNCCL, ProcessGroup):
    """The native NCCL group; see `torchft_svc.ProcessGroupNCCL`."""

    def __init__(self, timeout: timedelta = _TIMEOUT) -> None:
        super().__init__(timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's name in torch's registry."""
        return "torchft-nccl"


class ProcessGroupXCCL(ProcessGroup):
    """What `torchft_svc.register_process_group` has registered as ``xccl``."""

    def __new__(cls, timeout: timedelta = _TIMEOUT) -> Any:
        """Return the group that the registered factory makes."""
        return make_process_group("xccl", timeout)


class ProcessGroupDummy(Abortable, dummy.ProcessGroupDummy, ProcessGroup):
    """Acts as the only member; see `torchft_svc.ProcessGroupDummy`."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's name in torch's registry."""
        return "torchft-dummy"


class ProcessGroupBaby(ProcessGroup):
    """The base of groups whose collectives run in a process of their own."""

    def __init__(self, timeout: float | timedelta = 60.0, *args: Any) -> None:
        super().__init__(_as_timedelta(timeout), *args)

    def num_active_work(self) -> int:
        """Return how many collectives are under way."""
        child = getattr(self, "_child", None)
        return 0 if child is None else int(child.num_under_way)


class ProcessGroupBabyGloo(Abortable, isolated.ProcessGroupBabyGloo, ProcessGroupBaby):
    """The native isolated gloo group; see `torchft_svc.ProcessGroupBabyGloo`."""

    def __init__(self, timeout: float | timedelta = 60.0) -> None:
        super().__init__(_as_timedelta(timeout))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's name in torch's registry."""
        return "torchft-baby-gloo"


class ProcessGroupBabyNCCL(Abortable, isolated.ProcessGroupBabyNCCL, ProcessGroupBaby):
    """The native isolated NCCL group; see `torchft_svc.ProcessGroupBabyNCCL`."""

    def __init__(self, timeout: float | timedelta = 60.0) -> None:
        super().__init__(_as_timedelta(timeout))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's name in torch's registry."""
        return "torchft-baby-nccl"


class ProcessGroupBabyXCCL(ProcessGroupBaby):
    """What `torchft_svc.register_process_group` has registered as ``baby-xccl``."""

    def __new__(cls, timeout: float | timedelta = 60.0) -> Any:
        """Return the group that the registered factory makes."""
        return make_process_group("baby-xccl", _as_timedelta(timeout))


class ProcessGroupWrapper(Abortable, wrappers.ProcessGroupWrapper, ProcessGroup):
    """Forwards everything to ``pg``."""

    def __init__(self, timeout: timedelta = _TIMEOUT, pg: base.ProcessGroup | None = None) -> None:
        if pg is None:
            raise ConfigError("pg", None, "a process group to wrap is needed")
        super().__init__(pg)


class ErrorSwallowingProcessGroupWrapper(
    Abortable, wrappers.ErrorSwallowingProcessGroupWrapper, ProcessGroup
):
    """See `torchft_svc.ErrorSwallowingProcessGroupWrapper`."""

    def __init__(self, pg: base.ProcessGroup) -> None:
        super().__init__(pg)

    def report_error(self, e: Exception) -> None:
        """Act from now on as if a collective had failed with ``e``."""
        super().report_error(e)


class FakeProcessGroupWrapper(Abortable, faults.FakeProcessGroupWrapper, ProcessGroup):
    """See `torchft_svc.testing.FakeProcessGroupWrapper`."""

    def __init__(self, pg: base.ProcessGroup) -> None:
        super().__init__(pg)

    def report_future_error(self, e: Exception) -> None:
        """Let the wait for the next collective raise ``e``."""
        super().report_future_error(e)


class ManagedProcessGroup(Abortable, managed.ManagedProcessGroup, ProcessGroup):
    """A group of those that contribute in the manager's step; see the native one.

    Reductions between two steps are those of the last quorum, and their errors fail no step.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(manager)

    def errored(self) -> Exception | None:
        """The first error of the manager's step."""
        found = self._manager.errored()
        return getattr(found, "original_exception", found)


def ft_init_device_mesh(
    *,
    device_type: str,
    mesh_shape: tuple[int, ...],
    mesh_dim_names: tuple[str, ...],
    replicate_dim: int,
    manager: Manager,
) -> DeviceMesh:
    """Return a mesh with one dimension across the groups; see the native function."""
    return device_mesh.ft_init_device_mesh(
        device_type=device_type,
        mesh_shape=mesh_shape,
        mesh_dim_names=mesh_dim_names,
        replicate_dim=replicate_dim,
        manager=manager,
    )


def create_store_client(store_addr: str, timeout: timedelta) -> Store:
    """Connect to the store at ``host:port/prefix``; keys go below the prefix.

    Raises:
        RuntimeError: no store answers there.
    """
    address, _, prefix = store_addr.partition("/")
    with public_errors():
        connection = StoreConnection(address, timeout.total_seconds())
    return PrefixStore(prefix, connection.store)


def reconfigure_with_store(
    pg: dist.ProcessGroup,
    store_addr: str,
    rank: int,
    world_size: int,
    timeout: timedelta = _TIMEOUT,
) -> None:
    """Connect ``world_size`` members that meet at the store ``host:port/prefix``.

    Torch's own groups, too, if they were made with ``enable_reconfigure=True`` (torch 2.14).

    Raises:
        RuntimeError, TimeoutError: a member did not arrive in time, or failed.
    """
    group: Any = pg
    is_ours = isinstance(pg, base.ProcessGroup)
    has_handles = isinstance(pg, ProcessGroup) or not is_ours
    store = create_store_client(store_addr, timeout)
    if torch_group.torch_reconfigures() and not is_ours:
        torch_group.check_reconfigurable(pg)
        torch_group.reconnect(pg, store, rank, world_size, timeout, nothing)
        return
    store.set(f"handle/{rank}", group.get_reconfigure_handle() if has_handles else "")
    keys = [f"handle/{each}" for each in range(world_size)]
    store.wait(keys, timeout)
    if has_handles:
        handles = [store.get(key).decode() for key in keys]
        group.reconfigure(ReconfigureOptions(handles=handles, timeout=timeout)).wait()
        return
    with public_errors():
        group.configure(f"{store_addr}/members", f"rank {rank}", rank, world_size)


def _refuse_given(pg: dist.ProcessGroup | None) -> None:
    if pg is not None:
        reason = "a group of its own is made for each set of members: leave it out"
        raise ConfigError("pg", type(pg).__name__, reason)


def _as_timedelta(timeout: float | timedelta) -> timedelta:
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
