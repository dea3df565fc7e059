"""Keeps the end of DataLoader's workers from spoiling a drain (rule M11).

Slurm, systemd and others send SIGTERM to every process of a job. A loader's workers end at once,
and torch raises an error for each in the main thread, wherever that is: in a step, or instead of
`Drained`. So once a drain was requested such an error is not raised between two instructions, but
as `Drained` where the program asks the loader for more data.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.utils.data.dataloader
from torch.utils.data._utils import signal_handling

from torchft_svc.errors import Drained

# How long after the end of a worker this process may receive the same signal.
_TERM_GRACE_S = 0.5
_LOOK_S = 0.01
_KILLED_BY_SIGTERM = "Terminated"


def follow_drain(reason: Callable[[], str]) -> None:
    """Ask ``reason`` from now on why this process drains; empty: it does not.

    A later call replaces an earlier one.
    """
    global _reason
    _reason = reason
    _install()


@functools.lru_cache(maxsize=1)
def _install() -> None:
    names: Any = signal_handling
    names._error_if_any_worker_fails = _without_draining(names._error_if_any_worker_fails)
    iterator: Any = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    iterator._try_get_data = _or_drained(iterator._try_get_data)


def _without_draining(check: Callable[[], None]) -> Callable[[], None]:
    """torch calls it in its handler for SIGCHLD, on the main thread."""

    def check_unless_draining() -> None:
        try:
            check()
        except RuntimeError as error:
            if _KILLED_BY_SIGTERM in str(error):
                _await_drain()
            if not _reason():
                raise
            if _waiting_thread == threading.get_ident():
                raise _drained() from error

    return check_unless_draining


def _or_drained(get: Callable[..., Any]) -> Callable[..., Any]:
    """The loader's wait for a batch, which would notice within seconds that no worker is left."""

    @functools.wraps(get)
    def try_get_data(iterator: Any, *args: Any, **named: Any) -> Any:
        global _waiting_thread
        _waiting_thread = threading.get_ident()
        try:
            if _reason() and _has_lost_workers(iterator):
                raise _drained()
            return get(iterator, *args, **named)
        except Exception as error:  # such as the end of a worker's connection
            _await_drain()
            if _reason():
                raise _drained() from error
            raise
        finally:
            _waiting_thread = 0

    return try_get_data


def _has_lost_workers(iterator: Any) -> bool:
    workers = zip(iterator._workers, iterator._workers_status, strict=True)
    return any(is_needed and not worker.is_alive() for worker, is_needed in workers)


def _drained() -> Drained:
    return Drained(f"{_reason()}, and so did the workers of its DataLoader")


def _await_drain() -> None:
    """The handler for SIGTERM runs while this sleeps."""
    deadline = time.monotonic() + _TERM_GRACE_S
    on_main = threading.current_thread() is threading.main_thread()
    while on_main and not _reason() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _no_reason() -> str:
    return ""


_reason: Callable[[], str] = _no_reason
_waiting_thread = 0  # of the program, for a batch
