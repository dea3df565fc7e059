"""Detects at once, on the other workers of a group, the death of group rank 0 (rule M6).

Over a connection without any data. Rank 0 does not even accept it: the kernel does, and closes it
with the process, also if that is killed together with the manager, which then cannot announce the
end itself.
"""

from __future__ import annotations

import logging
import socket
import threading

from torchft_svc.client.process.forks import drop_after_fork
from torchft_svc.host.address import HostPort, listen

log = logging.getLogger(__name__)

# One connection for each other worker of the group; the system may allow fewer.
_BACKLOG = 4096
# A worker that cannot connect continues without; that must not delay its start for long.
_DIAL_TIMEOUT_S = 1.0


class LeaderSign:
    """Rank 0's end, at ``port`` of every interface; open until ``close`` or the process' death."""

    def __init__(self) -> None:
        self._listener = listen(HostPort("", 0), _BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        drop_after_fork(self)

    def close(self) -> None:
        """Stop listening: the others then consider this process dead; idempotent."""
        self._listener.close()

    def drop_descriptors(self) -> None:
        self._listener.close()


class LeaderWatch:
    """A worker's connection to rank 0 at ``where``; detects its death. Thread-safe."""

    def __init__(self, where: HostPort) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._is_dead = False
        try:
            self._line = self._dial()
        except OSError as error:
            log.info("the death of group rank 0 may be noticed late: %s: %s", where, error)

    def is_dead(self) -> bool:
        """Whether rank 0 is known to be dead; returns within a second."""
        with self._lock:
            if self._line is None or not _has_ended(self._line):
                return self._is_dead
            self._line.close()
            self._line = None
            try:  # the network may have cut it
                self._line = self._dial()
            except ConnectionRefusedError:
                self._is_dead = True
            except OSError as error:
                log.info("the death of group rank 0 can no longer be detected: %s", error)
            return self._is_dead

    def close(self) -> None:
        """Close the connection; idempotent."""
        with self._lock:
            if self._line is not None:
                self._line.close()
                self._line = None

    def _dial(self) -> socket.socket:
        line = socket.create_connection((self._where.host, self._where.port), _DIAL_TIMEOUT_S)
        line.setblocking(False)
        return line


def _has_ended(line: socket.socket) -> bool:
    try:
        return not line.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
