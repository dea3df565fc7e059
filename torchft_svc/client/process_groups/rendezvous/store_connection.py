"""Connections to the stores where members meet; every call keeps its deadline (rule P4).

A store is in another process, which may be frozen, or may not be a store at all. Torch's client
then blocks forever, whatever its timeout. So each call runs on its own thread, and is abandoned if
it takes too long.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import TCPStore

from torchft_svc.client.process.uninterruptible import UninterruptibleCall, nothing
from torchft_svc.errors import DeadlineExceeded, PeerError, Unreachable
from torchft_svc.rpc.address import parse_address
from torchft_svc.rpc.process_sockets import connected_to, cut
from torchft_svc.rpc.store_ping import check_store_answers

T = TypeVar("T")

# A reachable store is connected within milliseconds; this covers a lost packet.
CONNECT_TIMEOUT_S = 5.0
# Likewise for every call.
CALL_TIMEOUT_S = 5.0


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
            self.drop()
            self._connection = StoreConnection(address, timeout_s, check)
        return self._connection

    def start(self, action: Callable[[TCPStore], None]) -> None:
        """Run ``action`` on the last store, on another thread; its outcome is dropped."""
        if self._connection is not None:
            self._connection.start(action)

    def drop(self) -> None:
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
