"""Lets go, in a forked child, of what the parent's death has to close, and of no signal to it."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import Protocol


class Holder(Protocol):
    """Has open what others recognise this process by."""

    def drop_descriptors(self) -> None:
        """Close them; called in the child, right after the fork, where no other thread runs."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_hook = threading.Event()


def drop_after_fork(holder: Holder) -> None:
    """From now on forked children, such as DataLoader workers, keep nothing of ``holder`` open."""
    _holders.add(holder)
    if not _hook.is_set():
        _hook.set()
        os.register_at_fork(after_in_child=_drop_all)


def _drop_all() -> None:
    for holder in list(_holders):
        holder.drop_descriptors()
    _holders.clear()


class _Masks(threading.local):
    """What each thread that forks had blocked before."""

    blocked: set[signal.Signals | int]


_masks = _Masks()
_keeps = threading.Event()


def keep_term_signals() -> None:
    """From now on a child whose parent ends it right away hears it, although it has a handler.

    Python forgets in a child which signals came while it was being forked, before their handlers
    could run; the system does not, as long as they are blocked.
    """
    if not _keeps.is_set():
        _keeps.set()
        os.register_at_fork(before=_block, after_in_child=_unblock, after_in_parent=_unblock)


def _block() -> None:
    _masks.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.blocked)
