"""Members meet at a store before they connect, in waits that can be interrupted."""

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

# Members come within a few milliseconds of one another, or not soon.
_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 0.02
# For so long a thread looks whether they have come, before another one goes on with it.
_LOOKS_S = 0.25
# Of strangers, or of a cleaning that has failed for long: listing them would take too long.
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
    """The store of the members at ``store_addr`` (``host:port/prefix``), once all are there.

    Backends wait for missing members in one long call. A member that died on its way here would
    keep them in it, so the waiting is done here first. ``check`` is called again and again, and
    raises to end the wait.

    Raises:
        DeadlineExceeded: not all came within ``timeout_s``; the sentence names who is missing.
        Unreachable: no store answers at the address.
        QuorumFailed: a member that is missing says that it will not come.
    """
    if world_size == 1:
        return HashStore()
    address, _, prefix = store_addr.partition("/")
    deadline = time.monotonic() + timeout_s
    connection = last_store.connect(address, timeout_s, check)
    store = PrefixStore(prefix, connection.store)
    missing = collections.deque(range(world_size))

    def look() -> bool:
        store.set(_key(rank), _PRESENT)
        return _all_come(store, missing, min(deadline, time.monotonic() + _LOOKS_S))

    while not connection.call(look, check):
        check()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                "meeting the other groups", timeout_s, f"replica rank {missing[0]} did not come"
            )
    check()
    return store


def tidy_store(last_store: LastStore, store_addr: str) -> None:
    """Delete what earlier quorums left in the store of the last meeting, without waiting for it:
    one member does so once it is connected with the others."""
    prefix = store_addr.partition("/")[2]
    last_store.start(lambda store: _forget_earlier(store, prefix))


def _all_come(store: Store, missing: collections.deque[int], until: float) -> bool:
    """Whether all have come at ``until``; takes those that have out of ``missing``."""
    pause_s = _FIRST_LOOK_S
    while True:
        while missing and store.check([_key(missing[0])]):
            missing.popleft()
        if not missing:
            return True
        check_failures(store)
        if time.monotonic() > until:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_LOOK_S)


def _key(rank: int) -> str:
    return f"present/{rank}"


def _forget_earlier(store: TCPStore, prefix: str) -> None:
    """Delete what earlier quorums left in the store, which lives as long as its group.

    A prefix is ``torchft/{quorum_id}/{group_rank}``, and ids only grow. Anybody may have put
    anything there: what cannot be understood stays, and so does all if torch cannot tell the keys
    (torch 2.7 does not, nor does any where one is no UTF-8). A few of each quorum stay then.
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
            if time.monotonic() > until:  # the next quorum goes on with it
                return


def _quorum_id(text: str) -> int | None:
    """None: it is no id; they travel as int64, Python reads no number of some thousand digits."""
    is_id = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    return int(text) if is_id else None
