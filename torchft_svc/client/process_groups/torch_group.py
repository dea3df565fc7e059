"""Torch's own process groups, which torch 2.14 connects to other members by itself.

Such a group was made with ``enable_reconfigure=True``. It stays the same object, and gets the
handles of its next members; these come with a number that no earlier members have used.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup
from torchft_svc.client.process_groups.gloo import ProcessGroupGloo
from torchft_svc.client.process_groups.rendezvous import CONNECT_TIMEOUT_S
from torchft_svc.errors import ConfigError, QuorumFailed, TorchFTError
from torchft_svc.host.uninterruptible import UninterruptibleCall, wait_checking

_NAME = "torch-reconfigure"
_ACTION, _REASON = "exchanging handles", "a member has not shown its own"
_POLL_S = 0.002
_NUMBER, _NUMBER_BITS = "number", 62  # torch's is signed
# An attempt that was given up may end only after a few timeouts, and the next one waits for that.
_CONNECT_TIMEOUTS = 14


def adopt_torch_group(group: dist.ProcessGroup, timeout: timedelta) -> DelegatingProcessGroup:
    """Return torch's own ``group`` as one that a manager can configure.

    Args:
        group: made by torch with ``enable_reconfigure=True``; the program keeps it, and ends it.
        timeout: the longest time for a collective, and for connecting.

    Raises:
        ConfigError: this torch cannot reconfigure groups, or ``group`` was not made for that.
    """
    check_reconfigurable(group)
    if group.name() == "gloo":
        return TorchGlooGroup(group, timeout)
    return TorchDeviceGroup(group, timeout)


def torch_reconfigures() -> bool:
    """Whether this version of torch can reconfigure its own groups."""
    return hasattr(dist, "_reconfigure")


def check_reconfigurable(group: dist.ProcessGroup) -> None:
    """Raise ConfigError unless torch can connect ``group`` to other members."""
    if not torch_reconfigures():
        reason = f"torch reconfigures its own groups from 2.14 on, and this is {torch.__version__}"
        raise ConfigError("pg", type(group).__name__, f"{reason}: give torchft_svc's own, or none")
    distributed: Any = dist
    if not distributed._supports_reconfigure(group=group):
        reason = "torch made it for fixed members: give init_process_group enable_reconfigure=True"
        raise ConfigError("pg", type(group).__name__, reason)


def reconnect(
    group: dist.ProcessGroup,
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    check: Callable[[], None],
) -> None:
    """Exchange the members' handles in ``store``, and connect ``group`` to them.

    ``check`` is called before torch begins, and raises to keep it from that.

    Raises:
        DeadlineExceeded: a member has not shown its handle within ``timeout``.
        RuntimeError: torch could not connect them within ``timeout``.
    """
    distributed: Any = dist
    if rank == 0:
        store.set(_NUMBER, str(secrets.randbits(_NUMBER_BITS)))
    store.set(_handle_key(rank), distributed._get_reconfigure_handle(group=group))
    keys = [_NUMBER, *map(_handle_key, range(world_size))]

    def are_there(wait_s: float) -> bool:
        if store.check(keys):
            return True
        time.sleep(wait_s)
        return False

    wait_checking(are_there, check, timeout.total_seconds(), _ACTION, _REASON, check_s=_POLL_S)
    number, *handles = [store.get(key).decode() for key in keys]
    check()
    work = distributed._reconfigure(uuid=int(number), handles=handles, group=group, timeout=timeout)
    if work is not None:
        work.wait()


class TorchGroup(DelegatingProcessGroup):
    """What groups over all backends of torch have in common."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__(timeout)
        self.group = group
        # One object can connect to one list of members at a time, the newest one.
        self._connecting = threading.Lock()
        self._newest: object = None

    def abort(self) -> None:
        """See `ProcessGroup.abort`; torch keeps the connections until it is given other members."""
        was_connected = self._backend is not None
        super().abort()
        if was_connected:
            self.group.abort()

    def _reconnect(self, store: Store, rank: int, world_size: int) -> Any:
        """Connect torch's group to the members that have met in ``store``."""
        timeout = min(timedelta(seconds=CONNECT_TIMEOUT_S), self._timeout)
        this = self._newest = object()

        def check() -> None:
            if self._newest is not this:
                raise QuorumFailed("other members have followed meanwhile")

        def connect() -> None:
            with self._connecting:
                check()
                try:
                    reconnect(self.group, store, rank, world_size, timeout, check)
                except (RuntimeError, TorchFTError):
                    raise
                except Exception as error:  # what backends raise is theirs to choose
                    raise RuntimeError(f"torch has raised {error!r}") from error

        call = UninterruptibleCall(connect, _NAME, self._last_store.cutter())
        limit_s = timeout.total_seconds() * _CONNECT_TIMEOUTS
        call.result(self._check_wanted, limit_s, "connecting torch's process group")
        self.group.set_timeout(self._timeout)
        return _Connected(self.group)


class TorchGlooGroup(TorchGroup, ProcessGroupGloo):
    """Torch's own group over gloo."""

    _connect = TorchGroup._reconnect


class TorchDeviceGroup(TorchGroup):
    """Torch's own group over another backend, whose works are torch's: they block the stream."""

    _make_backend = TorchGroup._reconnect


class _Connected:
    """Torch's ``group`` while it is connected to the members of one quorum."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        kinds = dist.ProcessGroup.BackendType
        self.kind = kinds.GLOO if group.name() == "gloo" else kinds.CUSTOM
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def _handle_key(rank: int) -> str:
    return f"handle/{rank}"
