"""Forks the processes that carry a trainer's collectives, from a server that has imported torch."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection

from torchft_svc.client.process_groups.isolated.messages import MAX_FORK_MESSAGE
from torchft_svc.errors import DeadlineExceeded, QuorumFailed

# Importing torch takes two seconds, and much longer on a machine that starts many processes.
START_S = 60.0
# Exit statuses that were not asked for, of processes whose end was not noticed: keep a few.
MAX_STATUSES = 64
_ENDED = "the process that starts those for collectives has ended; see stderr"


class ForkServer:
    """The fork server of all process groups of this process; started when it is first needed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = 0
        self._started_at = 0.0
        self._ready = False
        self._num_requests = 0
        self._forked: dict[int, int] = {}  # process ids, by the number of the request
        self._statuses: OrderedDict[int, int] = OrderedDict()
        self._forking = threading.Lock()

    def start(self) -> None:
        """Start the server unless it runs; returns before it is ready."""
        with self._changed:
            # After a fork the parent's server is not ours.
            if self._socket is not None and self._owner == os.getpid():
                return
            if self._process is not None and self._owner == os.getpid():
                self._process.wait()  # it closed its socket, as its last action
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            module = f"{__package__}.fork_server_main"
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            self._socket, self._owner = ours, os.getpid()
            self._started_at = time.monotonic()
            self._ready, self._forked = False, {}
        threading.Thread(
            target=self._read, args=(ours,), name="torchft-fork-server", daemon=True
        ).start()

    def fork(self) -> tuple[int, Connection]:
        """Fork a process; its id, and the connection to it.

        Raises:
            DeadlineExceeded: the server is not ready within `START_S`.
            QuorumFailed: the server has exited.
        """
        with self._forking:
            self.start()
            ours, theirs = socket.socketpair()
            with theirs, self._changed:
                server = self._socket
                if server is None:
                    raise QuorumFailed(_ENDED)
                self._wait_for(lambda: self._ready, server)
                self._num_requests += 1
                number = self._num_requests
                with contextlib.suppress(OSError):
                    socket.send_fds(server, [b"fork %d" % number], [theirs.fileno()])
                # A process that is forked after the deadline exits: its connection is closed.
                self._wait_for(lambda: number in self._forked, server)
                pid = self._forked[number]
                self._forked.clear()
        return pid, Connection(ours.detach())

    def is_ready(self, within_s: float) -> bool:
        """Whether the server has imported torch; waits up to ``within_s`` for that.

        Raises:
            DeadlineExceeded: it has not done so within `START_S` of its start.
            QuorumFailed: the server has exited.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._socket is None, within_s)
            if self._socket is None:
                raise QuorumFailed(_ENDED)
            if not self._ready and time.monotonic() > self._started_at + START_S:
                raise DeadlineExceeded("starting a process for collectives", START_S)
            return self._ready

    def status_of(self, pid: int, timeout_s: float) -> int | None:
        """The exit status of a process; None if it does not arrive in time."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._statuses, timeout_s)
            return self._statuses.pop(pid, None)

    def _wait_for(self, is_there: Callable[[], bool], server: socket.socket) -> None:
        if not self._changed.wait_for(lambda: self._socket is not server or is_there(), START_S):
            raise DeadlineExceeded("starting a process for collectives", START_S)
        if self._socket is not server:
            raise QuorumFailed(_ENDED)

    def _read(self, server: socket.socket) -> None:
        while True:
            try:
                message = server.recv(MAX_FORK_MESSAGE)
            except OSError:
                message = b""
            kind, *numbers = message.decode().split() or [""]
            with self._changed:
                if kind == "ready":
                    self._ready = True
                elif kind == "forked":
                    number, pid = map(int, numbers)
                    self._forked[number] = pid
                    # An earlier process may have had this id, and its status was not asked for.
                    self._statuses.pop(pid, None)
                elif kind == "ended":
                    self._statuses[int(numbers[0])] = int(numbers[1])
                    while len(self._statuses) > MAX_STATUSES:
                        self._statuses.popitem(last=False)
                elif self._socket is server:
                    self._socket = None
                self._changed.notify_all()
            if not kind:
                server.close()
                return


FORK_SERVER = ForkServer()
