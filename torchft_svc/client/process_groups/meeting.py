"""Members meet at a store before they connect, in waits that can be interrupted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from torchft_svc.client.process_groups.failures import check_failures
from torchft_svc.client.process_groups.store_line import StoreLine
from torchft_svc.client.process_groups.stores import HashStore, PrefixStore, Store, TCPStore
from torchft_svc.errors import DeadlineExceeded

# A wait inside torch cannot be interrupted: nothing waits longer than this in one go.
SLICE_S = 0.05
# Members come within a few milliseconds of one another, or not soon.
_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 0.02
_MAX_DOUBLINGS = 16  # more than lead to the last; a float ends at 1024
_PRESENT = "1"


def meet(
    line: StoreLine,
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
        Unreachable: nobody answers at the address.
        QuorumFailed: a member that is missing says that it will not come.
    """
    if world_size == 1:
        return HashStore()
    address, _, prefix = store_addr.partition("/")
    deadline = time.monotonic() + timeout_s
    shared = line.to(address, timeout_s)
    store = PrefixStore(prefix, shared)
    store.set(_key(rank), _PRESENT)
    for other in range(world_size):
        for attempt in itertools.count():
            if store.check([_key(other)]):
                break
            check()
            check_failures(store)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    "meeting the other groups", timeout_s, f"replica rank {other} did not come"
                )
            time.sleep(min(_FIRST_LOOK_S * 2 ** min(attempt, _MAX_DOUBLINGS), _LAST_LOOK_S))
    check()
    if rank == 0:
        _forget_earlier(shared, prefix)
    return store


def _key(rank: int) -> str:
    return f"present/{rank}"


def _forget_earlier(store: TCPStore, prefix: str) -> None:
    """Delete what earlier quorums left in the store, which lives as long as its group.

    A prefix is ``torchft/{quorum_id}/{group_rank}``, and ids only grow. Torch 2.7 does not tell
    which keys there are: there they stay, a few for each quorum.
    """
    parts = prefix.split("/")
    if len(parts) != 3 or not parts[1].isdecimal() or not hasattr(store, "list_keys"):
        return
    for key in store.list_keys():
        place = key.lstrip("/").split("/")
        ours = len(place) > 3 and place[0] == parts[0] and place[2] == parts[2]
        if ours and place[1].isdecimal() and int(place[1]) < int(parts[1]):
            store.delete_key(key)
