"""Stands in for torch's own process groups that reconfigure (torch 2.14), where torch is older.

The interface, and what a group refuses, are those of torch's documentation and of its own tests for
gloo; the collectives are real ones of gloo.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from torchft_svc.client.process_groups.operations import COLLECTIVES, CompletedWork


class ReconfigurableGroup(dist.ProcessGroup):
    """A gloo group as ``init_process_group("gloo", enable_reconfigure=True)`` makes it.

    Its members share ``store``, and their ``number`` differs. It has no members at first.
    """

    supports_reconfigure = True

    def __init__(self, store: Store, number: int) -> None:
        super().__init__(number, 1)
        self.shared = store
        self.uuids: list[int] = []
        self.num_aborts = 0
        self.limit: timedelta | None = None
        self._handle = f"gloo:{number}:0:{number}:store"
        self._members: tuple[int, int] = (number, 1)
        self._gloo: Any = None
        self._busy = threading.Lock()

    def name(self) -> str:
        return "gloo"

    def rank(self) -> int:
        return self._members[0]

    def size(self) -> int:
        return self._members[1]

    def abort(self) -> None:
        self.num_aborts += 1

    def set_timeout(self, timeout: timedelta) -> None:
        self.limit = timeout

    def get_reconfigure_handle(self) -> str:
        return self._handle

    def reconfigure(self, opts: Any) -> dist.Work:
        """Connect the members of ``opts.handles``, of which this one's rank is its index."""
        assert self._busy.acquire(blocking=False), "one call at a time"
        try:
            self._connect(opts.uuid, opts.handles, opts.timeout)
        finally:
            self._busy.release()
        return CompletedWork()

    def _connect(self, uuid: int, handles: list[str], timeout: timedelta) -> None:
        if len(set(handles)) < len(handles):
            raise RuntimeError("handles must be unique")
        if self._handle not in handles:
            raise RuntimeError("the local handle is not part of the new members")
        rank = handles.index(self._handle)
        store = PrefixStore(f"reconfigure/{uuid}", self.shared)
        if rank == 0 and store.compare_set("claimed", "", self._handle) != self._handle.encode():
            raise RuntimeError(f"uuid {uuid} was already used")
        self._gloo = dist.ProcessGroupGloo(store, rank, len(handles), timeout)
        self._members = rank, len(handles)
        stable = self._handle.split(":")[3]
        self._handle = f"gloo:{rank}:{uuid}:{stable}:store"
        self.uuids.append(uuid)


def _collective(name: str) -> Any:
    def call(self: ReconfigurableGroup, *args: Any, **kwargs: Any) -> Any:
        if self._gloo is None:
            raise RuntimeError("collectives need a first reconfigure()")
        return getattr(self._gloo, name)(*args, **kwargs)

    return call


for _name in COLLECTIVES:
    setattr(ReconfigurableGroup, _name, _collective(_name))


def make_groups(shared: dist.TCPStore, num: int) -> list[ReconfigurableGroup]:
    """Return ``num`` groups of one member each, as if each was in a process of its own."""
    return [
        ReconfigurableGroup(dist.TCPStore("localhost", shared.port, is_master=False), number)
        for number in range(num)
    ]


def add_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ``torch.distributed`` the functions that it has from 2.14 on."""

    def reconfigure(
        uuid: int,
        handles: list[str],
        group: Any = None,
        timeout: timedelta | None = None,
        hints: dict[str, str] | None = None,
    ) -> Any:
        options = SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints=hints or {})
        return group.reconfigure(options)

    functions = {
        "_supports_reconfigure": lambda group=None: getattr(group, "supports_reconfigure", False),
        "_get_reconfigure_handle": lambda group=None: group.get_reconfigure_handle(),
        "_reconfigure": reconfigure,
    }
    for name, function in functions.items():
        monkeypatch.setattr(dist, name, function, raising=False)
