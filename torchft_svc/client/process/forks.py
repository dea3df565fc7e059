"""Closes descriptors in forked children, and lets SIGTERM end them from the first moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Protocol


class Holder(Protocol):
    """Holds descriptors that have to close when this process dies."""

    def drop_descriptors(self) -> None:
        """Close them; called in the child right after the fork, before other threads exist."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_hook = threading.Event()


def drop_after_fork(holder: Holder) -> None:
    """Close the descriptors of ``holder`` in forked children from now on."""
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
_is_own_handler: Callable[[object], bool] | None = None


def end_children_by_term(is_own_handler: Callable[[object], bool]) -> None:
    """Make SIGTERM end forked children from now on, as if this process did not handle it.

    A handler in Python runs only when the interpreter comes to it: a child that is about to block
    in a system call, as each worker of a pool does, would never run it. So a child that has
    inherited a handler of ours, by ``is_own_handler``, gets the default back. A signal that arrives
    during the fork counts, too: Python drops it in a child, but the kernel keeps it as long as it
    is blocked.
    """
    global _is_own_handler
    if _is_own_handler is None:
        os.register_at_fork(
            before=_block, after_in_child=_unblock_in_child, after_in_parent=_unblock
        )
    _is_own_handler = is_own_handler


def _block() -> None:
    _masks.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_in_child() -> None:
    assert _is_own_handler is not None
    with contextlib.suppress(ValueError):  # in a subinterpreter
        if _is_own_handler(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.blocked)
