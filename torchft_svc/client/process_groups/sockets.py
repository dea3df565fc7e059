"""Closes a backend's connections in forked children, such as DataLoader workers (rule P2).

Leaving the members closes the connections, and that makes their collectives fail. If a child had
them open as well, the members would wait for a whole timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator

from torchft_svc.client.process.forks import drop_after_fork

# Where the system lists the descriptors of this process.
_DESCRIPTORS = "/dev/fd"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class BackendSockets:
    """The network sockets that torch's backends have opened; torch does not expose them.

    A socket that another thread opens in the same millisecond counts as one of them, and is closed
    in forked children, too.
    """

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        drop_after_fork(self)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Sockets opened inside this block belong to a backend."""
        before = _sockets()
        yield
        after = _sockets()
        still_there = {fd: inode for fd, inode in self._known.items() if after.get(fd) == inode}
        opened = {
            fd: inode
            for fd, inode in after.items()
            if before.get(fd) != inode and _is_between_machines(fd)
        }
        self._known = still_there | opened  # assigned at once: a fork may happen at any moment

    def cut(self) -> None:
        """Shut down the connections, so that all waits for them fail.

        Listening sockets stay open: gloo terminates the process if one fails.
        """
        cut({fd: inode for fd, inode in self._known.items() if _peer(fd) is not None})

    def drop_descriptors(self) -> None:
        """In a forked child."""
        for fd, inode in self._known.items():
            if _socket_at(fd) == inode:  # else it was closed, and the number is another's
                os.close(fd)


def connected_to(hosts: Collection[str], port: int) -> dict[int, int]:
    """The sockets of this process that are connected to ``port`` of one of ``hosts`` (IPs)."""
    wanted = {(host, port) for host in hosts}
    return {fd: inode for fd, inode in _sockets().items() if _peer(fd) in wanted}


def cut(sockets: dict[int, int]) -> None:
    """Shut down these connections, so that all waits for them fail."""
    for fd, inode in sockets.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if _socket_at(copy.fileno()) == inode:  # else it was closed, the number is another's
                copy.shutdown(socket.SHUT_RDWR)


def _peer(fd: int) -> tuple[str, int] | None:
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family not in _FAMILIES:
                return None
            host, port = copy.getpeername()[:2]
    except OSError:  # it is closed by now, or not connected
        return None
    return host.removeprefix("::ffff:"), port


def _sockets() -> dict[int, int]:
    """The sockets of this process: descriptor and inode."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return {}
    found = ((int(name), _socket_at(int(name))) for name in names)
    return {fd: inode for fd, inode in found if inode is not None}


def _socket_at(fd: int) -> int | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _is_between_machines(fd: int) -> bool:
    try:
        looked_at = socket.socket(fileno=fd)
    except OSError:
        return False
    family = looked_at.family
    looked_at.detach()
    return family in _FAMILIES
