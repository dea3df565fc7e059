"""The network sockets of this process: which there are, and how to shut them down.

torch opens its connections in C++ and does not expose them; the system lists them all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection

# Where the system lists the descriptors of this process.
_DESCRIPTORS = "/dev/fd"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def connected_to(hosts: Collection[str], port: int) -> dict[int, int]:
    """The sockets of this process that are connected to ``port`` of one of ``hosts`` (IPs)."""
    wanted = {(host, port) for host in hosts}
    return {fd: inode for fd, inode in open_sockets().items() if peer(fd) in wanted}


def cut(sockets: dict[int, int]) -> None:
    """Shut down these connections, so that all waits for them fail."""
    for fd, inode in sockets.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if socket_at(copy.fileno()) == inode:  # else it was closed, the number is another's
                copy.shutdown(socket.SHUT_RDWR)


def peer(fd: int) -> tuple[str, int] | None:
    """Host and port at the other end; None: it is not connected between machines."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family not in _FAMILIES:
                return None
            host, port = copy.getpeername()[:2]
    except OSError:  # it is closed by now, or not connected
        return None
    return host.removeprefix("::ffff:"), port


def open_sockets() -> dict[int, int]:
    """The sockets of this process: descriptor and inode."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return {}
    found = ((int(name), socket_at(int(name))) for name in names)
    return {fd: inode for fd, inode in found if inode is not None}


def socket_at(fd: int) -> int | None:
    """The inode of the socket at this descriptor; None: there is no socket."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def is_between_machines(fd: int) -> bool:
    """Whether it is a socket for IP, listening or connected."""
    try:
        looked_at = socket.socket(fileno=fd)
    except OSError:
        return False
    family = looked_at.family
    looked_at.detach()
    return family in _FAMILIES
