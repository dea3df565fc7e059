"""Where a trainer gets the processes from that carry its collectives."""

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

from torchft_svc.client.process_groups.isolated.messages import MAX_TEMPLATE_MESSAGE
from torchft_svc.errors import DeadlineExceeded, QuorumFailed

# Importing torch takes two seconds, and many times that on a machine that starts many.
START_S = 60.0
# A status that nobody asked for is of a process whose end nobody noticed: keep a few.
MAX_STATUSES = 64
_ENDED = "the process that starts those for collectives has ended; its own words are on stderr"


class Nursery:
    """One template for all process groups of this process; started when it is first needed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._template: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._owner = 0
        self._started_at = 0.0
        self._ready = False
        self._num_asked = 0
        self._born: dict[int, int] = {}  # processes, by the number of the question
        self._statuses: OrderedDict[int, int] = OrderedDict()
        self._bearing = threading.Lock()

    def start(self) -> None:
        """Begin to start the template, unless there is one; waits for nothing."""
        with self._changed:
            # After a fork the parent's template is not ours.
            if self._line is not None and self._owner == os.getpid():
                return
            if self._template is not None and self._owner == os.getpid():
                self._template.wait()  # it has closed its line, which is the last that it does
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            module = f"{__package__}.template"
            with theirs:
                self._template = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            self._line, self._owner = ours, os.getpid()
            self._started_at = time.monotonic()
            self._ready, self._born = False, {}
        threading.Thread(
            target=self._read, args=(ours,), name="torchft-nursery", daemon=True
        ).start()

    def bear(self) -> tuple[int, Connection]:
        """A new process, and the connection to it.

        Raises:
            DeadlineExceeded: the template is not ready within `START_S`.
            QuorumFailed: it ended.
        """
        with self._bearing:
            self.start()
            ours, theirs = socket.socketpair()
            with theirs, self._changed:
                line = self._line
                if line is None:
                    raise QuorumFailed(_ENDED)
                self._wait_for(lambda: self._ready, line)
                self._num_asked += 1
                number = self._num_asked
                with contextlib.suppress(OSError):
                    socket.send_fds(line, [b"bear %d" % number], [theirs.fileno()])
                # One that comes later than this ends by itself, as nobody has its connection.
                self._wait_for(lambda: number in self._born, line)
                pid = self._born[number]
                self._born.clear()
        return pid, Connection(ours.detach())

    def is_ready(self, within_s: float) -> bool:
        """Whether the template has imported torch, which is waited for this long.

        Raises:
            DeadlineExceeded: it has not within `START_S` of its start.
            QuorumFailed: it ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._line is None, within_s)
            if self._line is None:
                raise QuorumFailed(_ENDED)
            if not self._ready and time.monotonic() > self._started_at + START_S:
                raise DeadlineExceeded("starting a process for collectives", START_S)
            return self._ready

    def status_of(self, pid: int, timeout_s: float) -> int | None:
        """The exit status of a process that has ended; None if it is not known in time."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._statuses, timeout_s)
            return self._statuses.pop(pid, None)

    def _wait_for(self, is_there: Callable[[], bool], line: socket.socket) -> None:
        if not self._changed.wait_for(lambda: self._line is not line or is_there(), START_S):
            raise DeadlineExceeded("starting a process for collectives", START_S)
        if self._line is not line:
            raise QuorumFailed(_ENDED)

    def _read(self, line: socket.socket) -> None:
        while True:
            try:
                message = line.recv(MAX_TEMPLATE_MESSAGE)
            except OSError:
                message = b""
            kind, *numbers = message.decode().split() or [""]
            with self._changed:
                if kind == "ready":
                    self._ready = True
                elif kind == "born":
                    number, pid = map(int, numbers)
                    self._born[number] = pid
                    # An earlier process may have had this id, and nobody asked for its status.
                    self._statuses.pop(pid, None)
                elif kind == "ended":
                    self._statuses[int(numbers[0])] = int(numbers[1])
                    while len(self._statuses) > MAX_STATUSES:
                        self._statuses.popitem(last=False)
                elif self._line is line:
                    self._line = None
                self._changed.notify_all()
            if not kind:
                line.close()
                return


NURSERY = Nursery()
