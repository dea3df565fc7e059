"""Lets go, in a forked child, of what the parent's death has to close, whoever lives on."""

from __future__ import annotations

import os
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
