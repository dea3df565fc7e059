"""Members that know each other's handles agree on where in the first one's store they meet.

The same members may meet again under the same number, and one of them may have given up before. So
each arrival has a name of its own, and the first member answers all of them with one new place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, Store

from torchft_svc.client.process_groups.rendezvous import StoreConnection
from torchft_svc.errors import ConfigError, DeadlineExceeded, PeerError

# Members come within milliseconds of one another, or much later.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class MeetingPlaces:
    """The places in a member's own store, where it is the first of the members."""

    def __init__(self) -> None:
        self._num_places = 0

    def agree_on_place(
        self, handles: Sequence[str], rank: int, number: int, timeout: timedelta
    ) -> str:
        """Wait for the members of ``handles``; returns ``host:port/prefix``, equal in all of them.

        Args:
            handles: of all members, in the order of their ranks.
            rank: this member's.
            number: names this set of members; equal in all of them.

        Raises:
            DeadlineExceeded, Unreachable: a member did not come in time.
            ConfigError: the first one is not a handle.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        address = _store_of(handles[0])
        connection = StoreConnection(address, timeout.total_seconds())
        named = hashlib.sha256(json.dumps([number, *handles]).encode()).hexdigest()
        arrivals = _Arrivals(connection, PrefixStore(f"torchft/arrivals/{named}", connection.store))

        def wait(is_there: Callable[[], bool]) -> None:
            pause_s = _FIRST_PAUSE_S
            while not connection.call(is_there):
                if time.monotonic() > deadline:
                    seconds = timeout.total_seconds()
                    raise DeadlineExceeded("meeting the other members", seconds, "one is missing")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

        if rank == 0:
            arrivals.wait_for_all(len(handles), wait)
            self._num_places += 1
            # Numbers that grow: what earlier meetings have left in the store is deleted by them.
            place = f"torchft/{self._num_places}/members"
            arrivals.answer_all(place)
        else:
            place = arrivals.arrive(rank, wait)
        return f"{address}/{place}"


class _Arrivals:
    """The arrivals at one meeting, below a prefix of the first member's store."""

    def __init__(self, connection: StoreConnection, store: Store) -> None:
        self._connection = connection
        self._store = store
        self._names: list[str] = []

    def wait_for_all(self, num_members: int, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Wait until all others have arrived, and take their names out of the store."""
        keys = [f"here/{rank}" for rank in range(1, num_members)]
        if keys:
            wait(lambda: self._store.check(keys))
        for key in keys:
            self._names.append(self._connection.call(partial(self._store.get, key)).decode())
            self._connection.call(partial(self._store.delete_key, key))

    def answer_all(self, place: str) -> None:
        """Write ``place`` for each of those that have arrived."""
        for name in self._names:
            self._connection.call(partial(self._store.set, f"place/{name}", place))

    def arrive(self, rank: int, wait: Callable[[Callable[[], bool]], None]) -> str:
        """Arrive as member ``rank``, and wait for the place."""
        key, name = f"here/{rank}", uuid.uuid4().hex
        answer = f"place/{name}"
        self._connection.call(lambda: self._store.set(key, name))
        try:
            wait(lambda: self._store.check([answer]))
        except PeerError:
            with contextlib.suppress(PeerError):  # nobody has to wait for a member that is gone
                self._connection.call(lambda: self._store.delete_key(key))
            raise
        place = self._connection.call(lambda: self._store.get(answer)).decode()
        self._connection.call(lambda: self._store.delete_key(answer))
        return place


def _store_of(handle: str) -> str:
    """Return the address of the store that the member with ``handle`` hosts."""
    try:
        return str(json.loads(handle)["store"])
    except (ValueError, KeyError, TypeError) as error:
        reason = "no get_reconfigure_handle() of this package has returned it"
        raise ConfigError("handles", handle, reason) from error
