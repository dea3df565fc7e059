"""Collectives over TCP between CPUs."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup, WholeBackend
from torchft_svc.client.process_groups.operations import HIDDEN_BY_GLOO, WrappedWork
from torchft_svc.client.process_groups.rendezvous import CONNECT_TIMEOUT_S
from torchft_svc.errors import QuorumFailed
from torchft_svc.host.uninterruptible import UninterruptibleCall, wait_in_slices

_NAME = "gloo-connect"
# Gloo connects within this many timeouts, unless the store stops answering.
_CONNECT_TIMEOUTS = 7
# When connections break while a part of an operation is transferred, gloo forgets this part, and
# the operation ends at its timeout only. All others end at once; so nobody waits for longer.
_LEAVE_WAITS_S = 0.5


class ProcessGroupGloo(DelegatingProcessGroup):
    """gloo, with members that change.

    The death of a member is noticed at once, a hang at ``timeout``; until then an abandoned
    operation may write to its tensors. Where members disagree on the size of an operation, gloo
    terminates their processes.
    """

    _hidden = HIDDEN_BY_GLOO

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._life = _Life()

    def _make_backend(self, store: Store, rank: int, world_size: int) -> Any:
        backend = self._connect(store, rank, world_size)
        self._life = _Life()
        return backend

    def _connect(self, store: Store, rank: int, world_size: int) -> Any:
        """Implements `_make_backend`."""
        # All members have arrived. One that hangs now must not block the others for that long.
        # Gloo waits this long for its address, and five times as long for its connection.
        connect_timeout = min(timedelta(seconds=CONNECT_TIMEOUT_S), self._timeout)

        def connect() -> Any:
            return dist.ProcessGroupGloo(store, rank, world_size, connect_timeout)

        if world_size == 1:
            backend = connect()
        else:
            call = UninterruptibleCall(connect, _NAME, self._last_store.cutter())
            limit_s = connect_timeout.total_seconds() * _CONNECT_TIMEOUTS
            backend = call.result(self._check_wanted, limit_s, "connecting over gloo")
        backend._set_default_timeout(self._timeout)
        return _GlooBackend(backend, store, rank, world_size)

    def cut(self) -> None:
        """See `ProcessGroup.cut`; gloo fails an operation when its connection ends."""
        self._life.end()
        self._sockets.cut()

    def abort(self) -> None:
        """See `ProcessGroup.abort`."""
        self._life.end()
        super().abort()

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        life = self._life
        work = super()._launch(name, args, kwargs)
        if name in self._hidden:
            return _Transfer(work, life, self._timeout)
        return _Collective(work, life)

    def _has_failed(self, work: Any) -> bool:
        try:
            future = work.get_future()
        except RuntimeError:  # gloo reports it only to a waiting caller
            return False
        try:
            future.value()
        except RuntimeError:
            return True
        return False


class _GlooBackend(WholeBackend):
    kind = dist.ProcessGroup.BackendType.GLOO
    device_type = "cpu"


class _Life:
    """How long operations of one backend are waited for."""

    def __init__(self) -> None:
        self._ended_at = math.inf

    def end(self) -> None:
        """The connections are closed."""
        self._ended_at = min(self._ended_at, time.monotonic())

    def check(self) -> None:
        """Raise QuorumFailed if nobody should wait any more."""
        if time.monotonic() > self._ended_at + _LEAVE_WAITS_S:
            raise QuorumFailed("the group was left or cut, and gloo has not ended an operation")


class _Collective(WrappedWork):
    """An operation that is left when its group was left or cut, and gloo does not end it."""

    def __init__(self, work: Any, life: _Life) -> None:
        super().__init__(work)
        self._life = life

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raises RuntimeError if it failed or timed out, QuorumFailed if left."""
        timeout_s = timeout.total_seconds() if timeout else math.inf
        work = self._work
        return wait_in_slices(work.wait, work.is_completed, self._life.check, timeout_s)

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()


class _Transfer(_Collective):
    """An operation whose end gloo reports only in ``wait``, with the ``timeout`` of the others.

    Gloo's own ``wait`` would use the timeout for connecting. A ``wait`` that times out also ends
    the operation: gloo closes the connection.
    """

    def __init__(self, work: Any, life: _Life, timeout: timedelta) -> None:
        super().__init__(work, life)
        self._timeout = timeout
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raises RuntimeError if it failed or timed out, QuorumFailed if left."""
        work, limit = self._work, timeout or self._timeout
        call = UninterruptibleCall(lambda: bool(work.wait(limit)), "gloo-transfer")
        try:
            return call.result(self._life.check)
        finally:
            self._waited = True

    def is_completed(self) -> bool:
        """False until `wait` was called."""
        return self._waited or super().is_completed()

    def synchronize(self) -> None:
        """Return at once: no device is involved."""

    def _source_rank(self) -> int:
        """The rank that sent it; torch calls it by this name."""
        return int(self._work._source_rank())
