"""Connections to the stores at which members meet, which keep every deadline (rule P4).

A store is in another process, which may be frozen, or not be a store at all. Torch's own client
waits for it without an end, whatever its timeout. So each of its calls has a thread of its own, and
is given up if it takes too long.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import TCPStore

from torchft_svc.client.process.uninterruptible import UninterruptibleCall, nothing
from torchft_svc.client.process_groups.sockets import connected_to, cut
from torchft_svc.errors import DeadlineExceeded, PeerError, Unreachable
from torchft_svc.rpc.address import HostPort, parse_address

T = TypeVar("T")

# Connecting to what is there takes milliseconds; this is for a lost packet.
CONNECT_TIMEOUT_S = 5.0
# So does any call.
CALL_TIMEOUT_S = 5.0

# A client's first word to torch's store, and a ping, which it answers with the same number.
_HELLO = struct.pack("=BI", 0, 0x3C85F7CE)
_NUMBER = struct.Struct("=I")
_PING = 13


class LastStore:
    """The connection to the store where the members met last.

    Usually the next meeting is there, too. Connecting anew is not free: torch looks up the name of
    the other end, and a slow name server makes that seconds.
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
        """Have ``action`` use the store where the members met last, on another thread; nobody waits
        for it, or hears whether it has failed."""
        if self._connection is not None:
            self._connection.start(action)

    def drop(self) -> None:
        """Forget the connection, because it does not work."""
        self._connection = None

    def cutter(self) -> Callable[[], None]:
        """Has whatever waits for the present connection fail; may be called on any thread."""
        return nothing if self._connection is None else self._connection.cut


class StoreConnection:
    """To the store at ``address``, which has been there since before the quorum.

    If it does not answer now, it is gone. ``timeout_s`` is for those of the store's operations that
    wait for another member. ``check`` raises to end the wait for the connection.

    Raises:
        Unreachable: no store answers there.
    """

    def __init__(self, address: str, timeout_s: float, check: Callable[[], None] = nothing) -> None:
        self.address = address
        self._where = parse_address(address)
        # Its sockets, once they are known; before, all that this process did not have then.
        self._others: dict[int, int] = {}
        self._mine: dict[int, int] | None = None
        self._hosts: set[str] = set()
        self.store = self.call(lambda: self._open(timeout_s), check)

    def call(self, action: Callable[[], T], check: Callable[[], None] = nothing) -> T:
        """What ``action`` returns, which uses the store on another thread.

        After an error the connection is of no use any more.

        Raises:
            Unreachable: the store does not answer within `CALL_TIMEOUT_S`, or fails.
        """
        return _call(action, self.address, check, self.cut)

    def start(self, action: Callable[[TCPStore], None]) -> None:
        """See `LastStore.start`."""
        UninterruptibleCall(lambda: action(self.store), "torchft-store", self.cut).abandon()

    def cut(self) -> None:
        """Have whatever waits for the store fail; may be called on any thread."""
        cut(self._opened() if self._mine is None else self._mine)

    def _opened(self) -> dict[int, int]:
        now = connected_to(self._hosts, self._where.port)
        return dict(now.items() - self._others.items())

    def _open(self, timeout_s: float) -> TCPStore:
        host, port = self._where.host, self._where.port
        self._hosts = {str(each[4][0]) for each in socket.getaddrinfo(host, port)}
        _check_answers(self._where)
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
    """What ``action`` returns, which uses the replica group's own store, at ``where``.

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
    except PeerError:  # what ``check`` has to say, or the action itself
        raise
    except (OSError, RuntimeError) as error:  # torch's errors are runtime errors
        raise Unreachable("store", where, str(error)) from error


def _check_answers(where: HostPort) -> None:
    """Raise OSError unless a store answers at ``where``, in waits that have an end."""
    number = _NUMBER.pack(os.getpid() & 0xFFFFFFFF)
    with socket.create_connection((where.host, where.port), CONNECT_TIMEOUT_S) as line:
        line.settimeout(CALL_TIMEOUT_S)
        line.sendall(_HELLO + bytes([_PING]) + number)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while len(answer) < len(number) and (more := line.recv(len(number) - len(answer))):
                answer += more
    if answer != number:
        raise ConnectionError("what answers there is no store")
