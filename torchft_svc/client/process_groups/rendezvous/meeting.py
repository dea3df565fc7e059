"""Members meet at a store before they connect; the wait can be interrupted."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from torchft_svc.client.process_groups.rendezvous.failures import check_failures
from torchft_svc.client.process_groups.rendezvous.store_connection import LastStore
from torchft_svc.errors import DeadlineExceeded

# Members arrive within a few milliseconds of one another, or much later.
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
# How long one thread polls for the members, before another one continues.
_POLL_FOR_S = 0.25
# More keys are not ours, or cleaning has failed for long: listing them would take too long.
_MAX_KEYS = 100_000
_CLEANING_S = 1.0
_MAX_DIGITS = 19
_PRESENT = "1"


def meet(
    last_store: LastStore,
    store_addr: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    check: Callable[[], None],
) -> Store:
    """Wait until all members have arrived at ``store_addr`` (``host:port/prefix``); the store.

    Backends wait for missing members in one long call that cannot be interrupted. A member that
    died before it arrived would block them in it, so this function waits first. ``check`` is
    called repeatedly, and raises to end the wait.

    Raises:
        DeadlineExceeded: a member did not arrive within ``timeout_s``; the message names it.
        Unreachable: no store answers at the address.
        QuorumFailed: a member has failed.
    """
    if world_size == 1:
        return HashStore()
    address, _, prefix = store_addr.partition("/")
    deadline = time.monotonic() + timeout_s
    connection = last_store.connect(address, timeout_s, check)
    store = PrefixStore(prefix, connection.store)
    missing = collections.deque(range(world_size))

    def poll() -> bool:
        store.set(_key(rank), _PRESENT)
        return _all_arrived(store, missing, min(deadline, time.monotonic() + _POLL_FOR_S))

    while not connection.call(poll, check):
        check()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                "meeting the other groups", timeout_s, f"replica rank {missing[0]} did not come"
            )
    check()
    return store


def tidy_store(last_store: LastStore, store_addr: str) -> None:
    """Start to delete what earlier quorums left in the store of the last meeting.

    One member does so once it is connected; this does not wait for the end.
    """
    prefix = store_addr.partition("/")[2]
    last_store.start(lambda store: _forget_earlier(store, prefix))


def _all_arrived(store: Store, missing: collections.deque[int], until: float) -> bool:
    """Whether all have arrived by ``until``; removes the present ones from ``missing``."""
    pause_s = _FIRST_PAUSE_S
    while True:
        while missing and store.check([_key(missing[0])]):
            missing.popleft()
        if not missing:
            return True
        check_failures(store)
        if time.monotonic() > until:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _key(rank: int) -> str:
    return f"present/{rank}"


def _forget_earlier(store: TCPStore, prefix: str) -> None:
    """Delete what earlier quorums left in the store, which lives as long as its group.

    A prefix is ``torchft/{quorum_id}/{group_rank}``, and ids only grow. The keys are untrusted:
    unknown ones stay, and all stay if torch cannot list them (torch 2.7 cannot, nor can any
    version if one is not UTF-8). A few keys of each quorum are left then.
    """
    parts = prefix.split("/")
    this_id = _quorum_id(parts[1]) if len(parts) == 3 else None
    if this_id is None or not hasattr(store, "list_keys") or store.num_keys() > _MAX_KEYS:
        return
    try:
        keys = store.list_keys()
    except UnicodeDecodeError:
        return
    until = time.monotonic() + _CLEANING_S
    for key in keys:
        place = key.lstrip("/").split("/")
        ours = len(place) > 3 and place[0] == parts[0] and place[2] == parts[2]
        quorum_id = _quorum_id(place[1]) if ours else None
        if quorum_id is not None and quorum_id < this_id:
            store.delete_key(key)
            if time.monotonic() > until:  # the next quorum continues
                return


def _quorum_id(text: str) -> int | None:
    """None if it is no id: ids are int64, and Python does not parse thousands of digits."""
    is_id = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    return int(text) if is_id else None
