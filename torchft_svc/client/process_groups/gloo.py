"""Collectives over TCP between CPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchft_svc.client.process.uninterruptible import UninterruptibleCall
from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup, WholeBackend
from torchft_svc.client.process_groups.operations import HIDDEN_BY_GLOO
from torchft_svc.client.process_groups.rendezvous.store_connection import CONNECT_TIMEOUT_S

# The thread that connects.
_NAME = "gloo-connect"
# Of which gloo takes so many when it connects, and an end if the store does not answer meanwhile.
_CONNECT_TIMEOUTS = 7


class ProcessGroupGloo(DelegatingProcessGroup):
    """gloo, with members that change.

    A dead member's peers notice at once. A member that hangs is noticed at ``timeout``, and an
    operation that was abandoned may write to its tensors until then. Members that disagree on the
    size of an operation are a mistake that gloo answers by ending their processes.
    """

    _hidden = HIDDEN_BY_GLOO

    def _make_backend(self, store: Store, rank: int, world_size: int) -> Any:
        # All members are there. One that hangs now must not keep the others for a whole timeout.
        # Gloo waits so long for its address, and five times that for it to connect.
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
        """See `ProcessGroup.cut`; gloo ends what it waits for when a connection does."""
        self._sockets.cut()

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        work = super()._launch(name, args, kwargs)
        return _Transfer(work, self._timeout) if name in self._hidden else work

    def _has_failed(self, work: Any) -> bool:
        try:
            future = work.get_future()
        except RuntimeError:  # it tells that to nobody but who waits for it
            return False
        try:
            future.value()
        except RuntimeError:
            return True
        return False


class _GlooBackend(WholeBackend):
    kind = dist.ProcessGroup.BackendType.GLOO
    device_type = "cpu"


class _Transfer(dist.Work):
    """An operation of whose end gloo tells only who waits, with the ``timeout`` of the others.

    Gloo's own wait would end when connecting has to. One that ends in vain also ends the operation:
    gloo closes the connection.
    """

    def __init__(self, work: Any, timeout: timedelta) -> None:
        super().__init__()
        self._work = work
        self._timeout = timeout
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raises RuntimeError if it failed or is not over in time."""
        try:
            return bool(self._work.wait(timeout or self._timeout))
        finally:
            self._waited = True

    def is_completed(self) -> bool:
        """False until it was waited for."""
        return self._waited or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it was waited for and has not failed."""
        return bool(self._work.is_success())

    def synchronize(self) -> None:
        """Nothing: no device is behind it."""

    def result(self) -> Any:
        """The tensors."""
        return self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """Raises RuntimeError: gloo tells of the end only to who waits."""
        future: torch.futures.Future[Any] = self._work.get_future()
        return future

    def _source_rank(self) -> int:
        """From whom it came; torch asks for it by this name."""
        return int(self._work._source_rank())
