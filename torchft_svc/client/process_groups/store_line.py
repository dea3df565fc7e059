"""Connections to the stores at which members meet."""

from __future__ import annotations

import socket
from datetime import timedelta

from torchft_svc.client.process_groups.stores import TCPStore
from torchft_svc.errors import Unreachable
from torchft_svc.rpc.address import HostPort, parse_address

# Connecting to what is there takes milliseconds; this is for a lost packet.
CONNECT_TIMEOUT_S = 5.0


class StoreLine:
    """The connection to the store where the members met last.

    Usually the next meeting is there, too. Connecting anew is not free: torch looks up the name of
    the other end, and a slow name server makes that seconds.
    """

    def __init__(self) -> None:
        self._address = ""
        self._store: TCPStore | None = None

    def to(self, address: str, timeout_s: float) -> TCPStore:
        """The store at ``address``.

        Raises:
            Unreachable: nobody answers there.
        """
        if self._store is None or self._address != address:
            self.drop()
            self._store = connect(address, timeout_s)
            self._address = address
        return self._store

    def drop(self) -> None:
        """Forget the connection, because it does not work."""
        self._store = None


def connect(address: str, timeout_s: float) -> TCPStore:
    """The store has been there since before the quorum: if it does not answer now, it is gone.

    Torch's own connecting would try for all of its timeout, and could not be interrupted.
    """
    where = parse_address(address)
    try:
        socket.create_connection((where.host, where.port), CONNECT_TIMEOUT_S).close()
        return store_at(where, timeout_s)
    except (OSError, RuntimeError) as error:
        raise Unreachable("store", address, str(error)) from error


def store_at(where: HostPort, timeout_s: float) -> TCPStore:
    """As a client of somebody else's; ``timeout_s`` is for each of its operations."""
    return TCPStore(
        where.host,
        where.port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
