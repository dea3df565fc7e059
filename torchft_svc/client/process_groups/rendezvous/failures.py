"""Reports a failed member to the other ones over the store where they meet (rule P3)."""

from __future__ import annotations

import contextlib
import threading
import time

from torch._C._distributed_c10d import PrefixStore, Store

from torchft_svc.client.process.uninterruptible import start_uninterruptible
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.rendezvous.store_connection import (
    CALL_TIMEOUT_S,
    StoreConnection,
)
from torchft_svc.core.types import one_line
from torchft_svc.errors import PeerError, QuorumFailed, Unreachable

_KEY = "failed"
# A backend connects within milliseconds. After this time, check whether a member has failed.
_DELAY_S = 0.25
_POLL_S = 0.1
# A sentence; this package writes none that is longer.
_MAX_REASON_LENGTH = 1000


def announce(members: Members, error: PeerError) -> None:
    """Tell the other ``members`` that this one has failed; on a thread, as the store may hang."""
    if members.world_size == 1:
        return

    def tell() -> None:
        with contextlib.suppress(Unreachable):
            connection, store = _open(members.store_addr)
            connection.call(lambda: store.set(_KEY, f"{members.replica_id} has failed: {error}"))

    start_uninterruptible(tell, "torchft-failure")


def check_failures(store: Store) -> None:
    """Raise `QuorumFailed` if a member that meets in ``store`` has failed.

    Its message is untrusted, and goes into errors and logs.
    """
    if store.check([_KEY]):
        said = store.get(_KEY)[:_MAX_REASON_LENGTH].decode(errors="replace")
        raise QuorumFailed(one_line(said))


class FailureWatch:
    """Checks for failed members while a backend connects.

    The backend may keep its connection to the store busy. So, once connecting takes unusually
    long, this uses another connection on another thread.
    """

    def __init__(self, store_addr: str) -> None:
        self._store_addr = store_addr
        self._begins_at = time.monotonic() + _DELAY_S
        self._is_checking = False
        self._closed = threading.Event()
        self._error: PeerError | None = None

    def check(self) -> None:
        """Raise if a member is known to have failed, or the store does not answer."""
        if self._error is not None:
            raise self._error
        if not self._is_checking and time.monotonic() > self._begins_at:
            self._is_checking = True
            start_uninterruptible(self._run, "torchft-failures")

    def close(self) -> None:
        """Stop checking; returns at once."""
        self._closed.set()

    def _run(self) -> None:
        try:
            connection, store = _open(self._store_addr)
            while not self._closed.wait(_POLL_S):
                connection.call(lambda: check_failures(store))
        except PeerError as error:
            self._error = error


def _open(store_addr: str) -> tuple[StoreConnection, Store]:
    address, _, prefix = store_addr.partition("/")
    connection = StoreConnection(address, CALL_TIMEOUT_S)
    return connection, PrefixStore(prefix, connection.store)
