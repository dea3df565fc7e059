"""Forwards every collective to a torch backend that is replaced whenever the members change."""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchft_svc.client.process_groups.base import ProcessGroup, left_error
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.recording import RecordedWork
from torchft_svc.client.process_groups.rendezvous import (
    FailureWatch,
    LastStore,
    announce,
    meet,
    tidy_store,
)
from torchft_svc.client.process_groups.sockets import BackendSockets
from torchft_svc.errors import PeerError, QuorumFailed
from torchft_svc.host.abandoned import AbandonedBackends

log = logging.getLogger(__name__)

# Works are kept for `abort`; above this number, completed ones are dropped.
_MAX_TRACKED_WORKS = 64
# Longest wait for the lock; a launch holds it for less, unless it is stuck.
_LOCK_S = 0.05
# One call without arguments.
_ONCE: tuple[tuple[()]] = ((),)


class DelegatingProcessGroup(ProcessGroup):
    """A process group whose members and backend change; subclasses make the backend.

    ``_hidden``: the collectives whose end the backend does not report.
    """

    _hidden: frozenset[str] = frozenset()

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._lock = threading.Lock()
        self._backend: Any = None
        self._works: list[Any] = []
        self._abandoned = AbandonedBackends()
        self._last_store = LastStore()
        self._failures: FailureWatch | None = None
        self._sockets = BackendSockets()

    @abc.abstractmethod
    def _make_backend(self, store: Store, rank: int, world_size: int) -> Any:
        """Connect the members that have met in ``store``; `_check_wanted` raises to end it."""

    def _configure(self, members: Members) -> None:
        rank, world_size, quorum_id = members.rank, members.world_size, members.quorum_id
        self._leave_record()
        self.abort()
        timeout_s = self._timeout.total_seconds()
        self._wanted_quorum_id = quorum_id
        check = self._check_wanted
        check()
        self._abandoned.make_room(timeout_s, check)
        try:
            store = meet(self._last_store, members.store_addr, rank, world_size, timeout_s, check)
            with self._sockets.noting(), self._watching(members):
                backend = self._make_backend(store, rank, world_size)
        except PeerError:
            self._last_store.drop_connection()
            raise
        except RuntimeError as error:  # torch's only class for errors of its backends
            self._last_store.drop_connection()
            failure = QuorumFailed(
                f"{members.replica_id} could not connect to the members of quorum {quorum_id}: "
                f"{error}"
            )
            announce(members, failure)
            raise failure from error
        with self._lock:
            self._backend, self._rank, self._world_size = backend, rank, world_size
            self._quorum_id, self._error = quorum_id, None
        if rank == 0 and world_size > 1:
            tidy_store(self._last_store, members.store_addr)
        if self._stopped:
            self.abort()
        else:
            self._begin_record(members, backend.kind.name.lower())
        log.debug("process group of %d members as %d, quorum %s", world_size, rank, quorum_id)

    def _check_wanted(self) -> None:
        """Raise if the quorum whose members are being connected is obsolete."""
        self._check_meeting(self._wanted_quorum_id)
        if self._failures is not None:
            self._failures.check()

    @contextlib.contextmanager
    def _watching(self, members: Members) -> Iterator[None]:
        """Inside this block, `_check_wanted` also raises when a member has failed."""
        self._failures = watch = FailureWatch(members.store_addr, members.world_size)
        try:
            yield
        finally:
            self._failures = None
            watch.close()

    def abort(self) -> None:
        """See `ProcessGroup.abort`.

        Closing the connections makes the operations of the other members fail. A backend with
        operations of this member under way cannot close: it is kept until they have ended.
        """
        self._give_up_record()
        with self._lock:
            backend, works = self._backend, self._works
            self._backend, self._works = None, []
            self._error = left_error() if backend is not None else self._error
        if backend is not None:
            self._abandoned.add(backend, works)
            del backend, works  # the last reference closes the connections
            self._abandoned.clear_soon()

    def forget_completed(self) -> None:
        """Release the tensors of completed operations."""
        with self._lock:
            self._works = [work for work in self._works if not work.is_completed()]

    def shutdown(self) -> None:
        """Leave the members for good; idempotent."""
        self.interrupt()
        self.save_record("shut down", only_if_broken=True)
        self.abort()
        self._abandoned.clear()
        self._last_store.drop_connection()

    def _update_record(self) -> None:
        if self._lock.acquire(timeout=_LOCK_S):
            try:
                self._works = [work for work in self._works if not self._is_over(work)]
            finally:
                self._lock.release()

    def _is_over(self, work: Any) -> bool:
        """Whether ``work`` has ended; may be False where the check itself is not safe."""
        return bool(work.is_completed())

    def _has_failed(self, work: Any) -> bool:
        """Whether ``work``, which has ended, has failed, as far as that is known at no cost."""
        return False

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        with self._lock:
            if self._backend is None:
                raise self._error or left_error()
            if len(self._works) >= _MAX_TRACKED_WORKS:
                self._works = [w for w in self._works if not w.is_completed()]
            record = self._record(name, args, kwargs)
            launch = functools.partial(getattr(self._backend, name), *args, **kwargs)
            # In one call, so that Ctrl-C cannot come between the launch and the append: `abort`
            # would not know of the operation, and the other members would wait for it.
            self._works.extend(itertools.starmap(launch, _ONCE))
            work = known = self._works[-1]
            if record is not None:
                known = RecordedWork(work, record, self._has_failed)
            if name in self._hidden:
                known = _Timed(time.monotonic() + self._timeout.total_seconds(), known)
            self._works[-1] = known
        return work


class WholeBackend:
    """A torch ``backend`` with all operations, also those that only a group offers to Python."""

    kind: dist.ProcessGroup.BackendType
    device_type: str

    def __init__(self, backend: Any, store: Store, rank: int, world_size: int) -> None:
        self.backend = backend
        self._place = store, rank, world_size
        self._group: Any = None

    def __getattr__(self, name: str) -> Any:
        """An operation of the backend, or of a group around it; looked up once."""
        owner = self.backend
        if not hasattr(owner, name):
            owner = self._group
        if owner is None:
            self._group = owner = dist.ProcessGroup(*self._place)
            owner._set_default_backend(self.kind)
            owner._register_backend(torch.device(self.device_type), self.kind, self.backend)
        found = self.__dict__[name] = getattr(owner, name)
        return found


class _Timed:
    """An operation that counts as ended at ``over_at``.

    For a ``work`` that does not report its end, and would be kept forever.
    """

    def __init__(self, over_at: float, work: Any) -> None:
        self._over_at = over_at
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed()) or time.monotonic() > self._over_at
