"""Closes a backend's connections in forked children, such as DataLoader workers (rule P2).

Leaving the members closes the connections, and that makes their collectives fail. If a child had
them open as well, the members would wait for a whole timeout.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from torchft_svc.client.process.forks import drop_after_fork
from torchft_svc.host.process_sockets import cut, is_between_machines, open_sockets, peer, socket_at


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
        before = open_sockets()
        yield
        after = open_sockets()
        still_there = {fd: inode for fd, inode in self._known.items() if after.get(fd) == inode}
        opened = {
            fd: inode
            for fd, inode in after.items()
            if before.get(fd) != inode and is_between_machines(fd)
        }
        self._known = still_there | opened  # assigned at once: a fork may happen at any moment

    def cut(self) -> None:
        """Shut down the connections, so that all waits for them fail.

        Listening sockets stay open: gloo terminates the process if one fails.
        """
        cut({fd: inode for fd, inode in self._known.items() if peer(fd) is not None})

    def drop_descriptors(self) -> None:
        for fd, inode in self._known.items():
            if socket_at(fd) == inode:  # else it was closed, and the number is another's
                os.close(fd)
