"""Leaves operations of a broken world that gloo does not end (rule L37).

When a connection breaks while gloo sends or receives one part of an operation, gloo forgets that
part: the operation ends at the timeout of the process group, although all of its sockets are shut
down. So a wait from Python is left a moment after the group was cut. The operation goes on in a
thread of gloo. It is kept with its process group, whose destruction would wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchft_svc.rpc.abandoned import AbandonedBackends
from torchft_svc.rpc.uninterruptible import UninterruptibleCall, wait_in_slices

_NO_TIMEOUT = timedelta(0)


def leave_waits(why: Callable[[], str]) -> None:
    """From now on waits for operations end when ``why`` returns a reason."""
    global _why
    _why = why
    _install()


@functools.lru_cache(maxsize=1)
def _install() -> None:
    """Python's waits only: those of C++ (the reducer of DDP) call no method of the class."""
    original: Any = dist.Work.wait

    def wait(self: dist.Work, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if type(self) is not dist.Work or not _is_gloo_alone():
            return bool(original(self, timeout))
        operation = _Operation(self, functools.partial(original, self), _why)
        return operation.wait(timeout)

    wait.__doc__ = original.__doc__
    dist.Work.wait = wait  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Operation:
    work: Any
    original: Callable[[timedelta], bool]
    why: Callable[[], str]

    def wait(self, timeout: timedelta) -> bool:
        timeout_s = timeout.total_seconds() or float("inf")
        if self._can_be_waited_for_in_slices():
            return wait_in_slices(self.original, self.work.is_completed, self._check, timeout_s)
        call = UninterruptibleCall(lambda: self.original(timeout), "torchft-world-wait")
        return call.result(functools.partial(self._check, call.is_over))

    def _can_be_waited_for_in_slices(self) -> bool:
        """A timeout ends those that have no future: sends, receives, reduce-scatters."""
        try:
            self.work.get_future()
        except RuntimeError:
            return False
        return True

    def _check(self, is_over: Callable[[], bool] | None = None) -> None:
        reason = self.why()
        if reason:
            groups = list(distributed_c10d._world.pg_map)
            _abandoned.add((groups, self.work), [_Left(is_over or self.work.is_completed)])
            raise dist.DistBackendError(reason)


@dataclass(frozen=True)
class _Left:
    is_completed: Callable[[], bool]


def _is_gloo_alone() -> bool:
    """Whether an operation can be left: its connections were cut, so it writes nothing any more.

    Those of subgroups are not known; a wait with a timeout means something else to NCCL.
    """
    groups = distributed_c10d._world.pg_map
    return len(groups) == 1 and all(backend == "gloo" for backend, _ in groups.values())


def _no_reason() -> str:
    return ""


_why: Callable[[], str] = _no_reason
_abandoned = AbandonedBackends()
