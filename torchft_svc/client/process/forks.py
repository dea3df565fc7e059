"""Closes descriptors in forked children, and delivers SIGTERM to them from the first moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from typing import Protocol


class Holder(Protocol):
    """Holds descriptors that have to close when this process dies."""

    def drop_descriptors(self) -> None:
        """Close them; called in the child right after the fork, before other threads exist."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_hook = threading.Event()


def drop_after_fork(holder: Holder) -> None:
    """From now on close the descriptors of ``holder`` in forked children."""
    _holders.add(holder)
    if not _hook.is_set():
        _hook.set()
        os.register_at_fork(after_in_child=_drop_all)


def _drop_all() -> None:
    for holder in list(_holders):
        with contextlib.suppress(OSError):  # it was closed already; the others have to be, too
            holder.drop_descriptors()
    _holders.clear()


class _Masks(threading.local):
    """The signal mask before the fork, per thread."""

    blocked: set[signal.Signals | int]


_masks = _Masks()
_keeps = threading.Event()


def keep_term_signals() -> None:
    """From now on deliver SIGTERM to a child also if it arrives during the fork.

    In a child Python drops signals that arrived during the fork, before their handlers could run.
    The kernel keeps them as long as they are blocked.
    """
    if not _keeps.is_set():
        _keeps.set()
        os.register_at_fork(before=_block, after_in_child=_unblock, after_in_parent=_unblock)


def _block() -> None:
    _masks.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.blocked)
