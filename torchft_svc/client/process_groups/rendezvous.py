"""Members meet at a store before they connect; every call to it keeps its deadline (rules P3, P4).

Backends wait for missing members in one long call that cannot be interrupted. A member that died
before it arrived would block them in it, so the members meet first. One that fails to connect
writes that to the store for the others.

A store is in another process, which may be frozen, or may not be a store at all. Torch's client
then blocks forever, whatever its timeout. So each call runs on its own thread, and is abandoned if
it takes too long.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from torchft_svc.client.process_groups.members import Members
from torchft_svc.core.limits import one_line
from torchft_svc.errors import DeadlineExceeded, PeerError, QuorumFailed, Unreachable
from torchft_svc.host.address import parse_address
from torchft_svc.host.process_sockets import connected_to, cut
from torchft_svc.host.store_ping import check_store_answers
from torchft_svc.host.uninterruptible import UninterruptibleCall, nothing, start_uninterruptible

T = TypeVar("T")

# A reachable store is connected within milliseconds; this covers a lost packet.
CONNECT_TIMEOUT_S = 5.0
# Likewise for every call.
CALL_TIMEOUT_S = 5.0
# The key of a member that has failed, and of the one that has seen that all have arrived.
_FAILED = "failed"
_MET = "met"
# A backend connects within milliseconds. After this time, check whether a member has failed. Each
# member needs a connection of its own for that, and a store about a millisecond to accept it.
_DELAY_S = 0.25
_DELAY_PER_MEMBER_S = 1e-3
_CHECK_S = 0.1
# A sentence; this package writes none that is longer.
_MAX_REASON_LENGTH = 1000
# Members arrive within a few milliseconds of one another, or much later. A pause is a part of the
# time that was waited so far, so that the wait is not much longer than it has to be.
_FIRST_PAUSE_S = 0.001
_PAUSE_PART = 1 / 8
_LONGEST_PAUSE_S = 0.02
# All members together poll 10,000 times a second, which takes a store a tenth of a core. The
# longest pause is this for each member, where that is longer.
_PAUSE_PER_MEMBER_S = 1e-4
# A store needs 0.35 us for each member in a look at all: for the looks of all members but rank 0,
# a hundredth of a core times the logarithm of their number.
_LOOK_PER_MEMBER_S = 3.5e-5
# How long one thread polls for the members, before another one continues.
_POLL_FOR_S = 0.25
# More keys are not ours, or cleaning has failed for long: listing them would take too long.
_MAX_KEYS = 100_000
_CLEANING_S = 1.0
_MAX_DIGITS = 19
_PRESENT = "1"


class LastStore:
    """The connection to the store where the members met last.

    The next meeting is usually there, too. A new connection is expensive: torch resolves the
    peer's name, which takes seconds with a slow name server.
    """

    def __init__(self) -> None:
        self._connection: StoreConnection | None = None

    def connect(self, address: str, timeout_s: float, check: Callable[[], None]) -> StoreConnection:
        """The store at ``address``; ``check`` raises to end the wait for it.

        Raises:
            Unreachable: no store answers there.
        """
        if self._connection is None or self._connection.address != address:
            self.drop_connection()
            self._connection = StoreConnection(address, timeout_s, check)
        return self._connection

    def start(self, action: Callable[[TCPStore], None]) -> None:
        """Run ``action`` on the last store, on another thread; its outcome is dropped."""
        if self._connection is not None:
            self._connection.start(action)

    def drop_connection(self) -> None:
        """Drop the connection, because it does not work."""
        self._connection = None

    def cutter(self) -> Callable[[], None]:
        """A function that makes all waits for the present connection fail, on any thread."""
        return nothing if self._connection is None else self._connection.cut


class StoreConnection:
    """A connection to the store at ``address``, which has been running since before the quorum.

    So if it does not answer, it is gone. ``timeout_s`` is for operations that wait for another
    member. ``check`` raises to end the wait for the connection.

    Raises:
        Unreachable: no store answers there.
    """

    def __init__(self, address: str, timeout_s: float, check: Callable[[], None] = nothing) -> None:
        self.address = address
        self._where = parse_address(address)
        # Its sockets once they are known; until then, all sockets opened since, except `_others`.
        self._others: dict[int, int] = {}
        self._mine: dict[int, int] | None = None
        self._hosts: set[str] = set()
        self.store = self.call(lambda: self._open(timeout_s), check)

    def call(self, action: Callable[[], T], check: Callable[[], None] = nothing) -> T:
        """Run ``action``, which uses the store, on another thread; returns its result.

        After an error the connection must not be used again.

        Raises:
            Unreachable: the store does not answer within `CALL_TIMEOUT_S`, or fails.
        """
        return _call(action, self.address, check, self.cut)

    def start(self, action: Callable[[TCPStore], None]) -> None:
        """See `LastStore.start`."""
        UninterruptibleCall(lambda: action(self.store), "torchft-store", self.cut).abandon()

    def cut(self) -> None:
        """Make all waits for the store fail; may be called on any thread."""
        cut(self._opened() if self._mine is None else self._mine)

    def _opened(self) -> dict[int, int]:
        now = connected_to(self._hosts, self._where.port)
        return dict(now.items() - self._others.items())

    def _open(self, timeout_s: float) -> TCPStore:
        host, port = self._where.host, self._where.port
        self._hosts = {str(each[4][0]) for each in socket.getaddrinfo(host, port)}
        check_store_answers(host, port, CONNECT_TIMEOUT_S, CALL_TIMEOUT_S)
        self._others = connected_to(self._hosts, port)
        store = TCPStore(
            host,
            port,
            is_master=False,
            timeout=timedelta(seconds=CALL_TIMEOUT_S),  # it tries again for so long
            wait_for_workers=False,
        )
        self._mine = self._opened()
        store.set_timeout(timedelta(seconds=timeout_s))
        return store


def call_store(action: Callable[[], T], where: str) -> T:
    """Run ``action``, which uses the replica group's own store at ``where``; returns its result.

    Raises:
        Unreachable: the store does not answer within `CALL_TIMEOUT_S`, or fails.
    """
    return _call(action, where, nothing, nothing)


def _call(
    action: Callable[[], T], where: str, check: Callable[[], None], release: Callable[[], None]
) -> T:
    try:
        return UninterruptibleCall(action, "torchft-store", release).result(check, CALL_TIMEOUT_S)
    except DeadlineExceeded:
        reason = f"it does not answer within {CALL_TIMEOUT_S:g} s"
        raise Unreachable("store", where, reason) from None
    except PeerError:  # raised by ``check``, or by the action itself
        raise
    except (OSError, RuntimeError) as error:  # torch's errors are runtime errors
        raise Unreachable("store", where, str(error)) from error


def meet(
    last_store: LastStore,
    store_addr: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    check: Callable[[], None],
) -> Store:
    """Wait until all members have arrived at ``store_addr`` (``host:port/prefix``); the store.

    ``check`` is called repeatedly, and raises to end the wait.

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
    meeting = MembersMeeting(store, rank, world_size)
    while not connection.call(lambda: meeting.poll(deadline), check):
        check()
        if time.monotonic() > deadline:
            missing = connection.call(meeting.first_missing, check)
            raise DeadlineExceeded(
                "meeting the other groups", timeout_s, f"replica rank {missing} did not come"
            )
    check()
    return store


def tidy_store(last_store: LastStore, store_addr: str) -> None:
    """Start to delete what earlier quorums left in the store of the last meeting.

    One member does so once it is connected; this does not wait for the end.
    """
    prefix = store_addr.partition("/")[2]
    last_store.start(lambda store: _forget_earlier(store, prefix))


class MembersMeeting:
    """A member that meets the others in ``store`` (rule P9); its calls are requests to the store.

    Whoever sees that all have arrived writes that to the store. Looking for all is one request, but
    costs the store some time for each of them: rank 0 does it whenever it polls, the others less
    often the higher their rank is. They look in case the ones before them have died.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._keys = [_key(each) for each in range(world_size)]
        self._pause_of_all_s = max(_FIRST_PAUSE_S, world_size * _PAUSE_PER_MEMBER_S)
        self._looks_every_s = rank * world_size * _LOOK_PER_MEMBER_S
        self._look_at = time.monotonic() + self._looks_every_s

    def poll(self, deadline: float) -> bool:
        """Arrive, and wait a moment for the others; whether all have arrived."""
        began_at = time.monotonic()
        until = min(deadline, began_at + _POLL_FOR_S)
        self._store.set(_key(self._rank), _PRESENT)
        pause_s = _FIRST_PAUSE_S
        while not self._have_met():
            check_failures(self._store)
            now = time.monotonic()
            if now > until:
                return False
            time.sleep(pause_s)
            longest_s = min(_PAUSE_PART * (now - began_at), _LONGEST_PAUSE_S)
            pause_s = min(2 * pause_s, max(longest_s, self._pause_of_all_s))
        return True

    def first_missing(self) -> int:
        """The lowest rank that has not arrived."""
        low, high = 0, len(self._keys)
        while high - low > 1:
            middle = (low + high) // 2
            if self._store.check(self._keys[low:middle]):
                low = middle
            else:
                high = middle
        return low

    def _have_met(self) -> bool:
        now = time.monotonic()
        if now < self._look_at:
            return self._store.check([_MET])
        self._look_at = now + self._looks_every_s
        if not self._store.check(self._keys):
            return False
        self._store.set(_MET, _PRESENT)
        return True


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


def announce(members: Members, error: PeerError) -> None:
    """Report this member's failure to the other ``members``; on a thread: the store may hang."""
    if members.world_size == 1:
        return

    def write_failure() -> None:
        with contextlib.suppress(Unreachable):
            connection, store = _open(members.store_addr)
            connection.call(lambda: store.set(_FAILED, f"{members.replica_id} has failed: {error}"))

    start_uninterruptible(write_failure, "torchft-failure")


def check_failures(store: Store) -> None:
    """Raise `QuorumFailed` if a member that meets in ``store`` has failed.

    Its message is untrusted, and goes into errors and logs.
    """
    if store.check([_FAILED]):
        reason = store.get(_FAILED)[:_MAX_REASON_LENGTH].decode(errors="replace")
        raise QuorumFailed(one_line(reason))


class FailureWatch:
    """Checks for failed members while a backend connects.

    The backend may keep its connection to the store busy. So, once connecting takes unusually
    long, this uses another connection on another thread.
    """

    def __init__(self, store_addr: str, world_size: int) -> None:
        self._store_addr = store_addr
        self._begins_at = time.monotonic() + _DELAY_S + world_size * _DELAY_PER_MEMBER_S
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
            while not self._closed.wait(_CHECK_S):
                connection.call(lambda: check_failures(store))
        except PeerError as error:
            self._error = error


def _open(store_addr: str) -> tuple[StoreConnection, Store]:
    address, _, prefix = store_addr.partition("/")
    connection = StoreConnection(address, CALL_TIMEOUT_S)
    return connection, PrefixStore(prefix, connection.store)
