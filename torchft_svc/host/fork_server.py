"""A process that has imported torch and forks: importing takes seconds, forking milliseconds.

`ForkServer` is the owner's side. The server's side is a module that imports what the program needs
and calls `serve`. It never starts a thread and never looks at a device, so its forks may do both.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from torchft_svc.errors import DeadlineExceeded, QuorumFailed
from torchft_svc.host.clean_start import FAILED, module_command
from torchft_svc.host.process_end import POLL_S, ProcessEnd

# Importing torch takes two seconds, and much longer on a machine that starts many processes.
START_S = 60.0
# One that is ready forks within milliseconds.
FORK_S = 20.0
# A server that was told to end only has to leave its loop.
_END_S = 5.0
# Exit statuses that were not asked for, of processes whose end was not noticed: keep a few.
MAX_STATUSES = 64
# A request may hold a whole environment; a number goes before it.
_MAX_MESSAGE = 1 << 17
MAX_REQUEST = _MAX_MESSAGE - 64
_MAX_DESCRIPTORS = 4


class ForkServer:
    """Starts ``python -m module`` when it is first needed, and again after it was lost.

    Args:
        module: what calls `serve`.
        purpose: what the forked processes are for, in error messages.
        arguments: of the module, behind those that `serve` reads.
        environment: of the server, and so of its forks (default: that of this process).
    """

    def __init__(
        self,
        module: str,
        purpose: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._module = module
        self._arguments = arguments
        self._environment = environment
        self._action = f"starting a process for {purpose}"
        self._lost = f"the process that starts those for {purpose} has ended"
        self._why_lost = ""
        self._changed = threading.Condition()
        self._forking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = 0
        self._started_at = 0.0
        self._ready = False
        self._num_requests = 0
        self._forked: dict[int, int] = {}  # process ids, by the number of the request
        self._ends: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._watched: set[int] = set()  # process ids whose ends the server will tell

    def start(self) -> None:
        """Start the server unless it runs; returns before it is ready."""
        with self._changed:
            # After a fork the parent's server is not ours.
            if self._socket is not None and self._owner == os.getpid():
                return
            if self._process is not None and self._owner == os.getpid():
                self._process.wait()  # it closed its socket, as its last action
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = self._spawn(theirs.fileno())
            self._socket, self._owner = ours, os.getpid()
            self._started_at = time.monotonic()
            self._ready, self._forked, self._why_lost = False, {}, "; see stderr"
        threading.Thread(
            target=self._read, args=(ours,), name="torchft-fork-server", daemon=True
        ).start()

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            module_command(
                self._module, descriptor, str(descriptor), str(os.getpid()), *self._arguments
            ),
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env=self._environment,
        )

    def fork(self, request: bytes, *descriptors: int) -> int:
        """The id of a new process, to which `serve` gives ``request`` and the ``descriptors``.

        Raises:
            DeadlineExceeded: the server is not ready within `START_S`, or does not fork within
                `FORK_S`: then it is frozen, so it is killed, and the next call starts another.
            QuorumFailed: the server has exited.
        """
        with self._forking:
            self.start()
            with self._changed:
                server = self._socket
                if server is None:
                    raise QuorumFailed(self._lost + self._why_lost)
                self._wait_for(lambda: self._ready, server, START_S)
                self._num_requests += 1
                number = self._num_requests
                with contextlib.suppress(OSError):
                    socket.send_fds(server, [b"%d " % number + request], descriptors)
                # A process that is forked after the deadline exits: its descriptors are closed.
                try:
                    self._wait_for(lambda: number in self._forked, server, FORK_S)
                except DeadlineExceeded:
                    assert self._process is not None
                    self._process.kill()
                    self._changed.wait_for(lambda: self._socket is not server, _END_S)
                    raise
                pid = self._forked[number]
                self._forked.clear()
        return pid

    def is_ready(self, within_s: float) -> bool:
        """Whether the server has imported its program; waits up to ``within_s`` for that.

        Raises:
            DeadlineExceeded: it has not done so within `START_S` of its start.
            QuorumFailed: the server has exited.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._socket is None, within_s)
            if self._socket is None:
                raise QuorumFailed(self._lost + self._why_lost)
            if not self._ready and time.monotonic() > self._started_at + START_S:
                raise DeadlineExceeded(self._action, START_S)
            return self._ready

    def end_of(self, pid: int, timeout_s: float | None = 0.0) -> tuple[int, float] | None:
        """Exit status (negative: the signal) and instant of the end of a forked process.

        None if it is not known in time, or the server was lost before. It is told once.
        """
        with self._changed:
            self._changed.wait_for(lambda: pid not in self._watched, timeout_s)
            return self._ends.pop(pid, None)

    def close(self, within_s: float = _END_S) -> None:
        """End the server; what it has forked lives on. It is killed after ``within_s``, for
        instance while it imports. May be called twice."""
        with self._changed:
            server, process = self._socket, self._process
            if server is not None:
                server.shutdown(socket.SHUT_RDWR)
        if process is not None:
            try:
                process.wait(within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _wait_for(
        self, is_there: Callable[[], bool], server: socket.socket, within_s: float
    ) -> None:
        if not self._changed.wait_for(lambda: self._socket is not server or is_there(), within_s):
            raise DeadlineExceeded(self._action, within_s)
        if self._socket is not server:
            raise QuorumFailed(self._lost + self._why_lost)

    def _read(self, server: socket.socket) -> None:
        while True:
            try:
                message = server.recv(_MAX_MESSAGE)
            except OSError:
                message = b""
            kind, *values = message.decode().split() or [""]
            with self._changed:
                if kind == FAILED.strip():
                    self._why_lost = f": {' '.join(values)}"
                elif kind == "ready":
                    self._ready = True
                elif kind == "forked":
                    number, pid = map(int, values)
                    self._forked[number] = pid
                    self._watched.add(pid)
                    # An earlier process may have had this id, and its status was not asked for.
                    self._ends.pop(pid, None)
                elif kind == "ended":
                    self._watched.discard(int(values[0]))
                    self._ends[int(values[0])] = int(values[1]), float(values[2])
                    while len(self._ends) > MAX_STATUSES:
                        self._ends.popitem(last=False)
                elif self._socket is server:
                    self._socket = None
                    self._watched.clear()
                self._changed.notify_all()
            if not kind:
                server.close()
                return


# -- the server's side ---------------------------------------------------------------------------


def serve(descriptor: int, owner_pid: int) -> tuple[bytes, list[int]] | None:
    """Fork a process for each request of ``owner_pid``; report its id, and later its exit status.

    Returns in each fork, with the request and its descriptors, and in the server with None, once
    the owner has closed the socket or is gone. Forks ignore SIGINT and SIGTERM, as the server does.
    """
    # A terminal or a service manager signals all processes; this one exits with its owner.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise copy these pages
    server = socket.socket(fileno=descriptor)
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    owner = ProcessEnd(owner_pid)
    watched: list[socket.socket | int] = [server, wake]
    if owner.descriptor is not None:
        watched.append(owner.descriptor)
    with contextlib.suppress(ConnectionError):  # the owner has ended
        server.send(b"ready")
    while os.getppid() == owner_pid:
        pause_s = POLL_S if owner.descriptor is None else None
        readable, _, _ = select.select(watched, [], [], pause_s)
        if wake in readable:
            wake.recv(_MAX_MESSAGE)
            _reap(server)
        if server in readable:
            message, descriptors = _receive(server)
            if not message:
                break
            asked, _, request = message.partition(b" ")
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (server, wake, woken, owner):
                    end.close()
                return request, descriptors
            for each in descriptors:
                os.close(each)
            with contextlib.suppress(ConnectionError):  # noticed with the next message
                server.send(b"forked %s %d" % (asked, pid))
    signal.set_wakeup_fd(-1)  # before it is closed: the last forks exit just now
    return None


def _receive(server: socket.socket) -> tuple[bytes, list[int]]:
    """A request with its descriptors; empty: the owner is gone."""
    try:
        message, descriptors, _, _ = socket.recv_fds(server, _MAX_MESSAGE, _MAX_DESCRIPTORS)
    except ConnectionError:  # it had not read all
        return b"", []
    return message, descriptors


def _reap(server: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError, ConnectionError):  # nothing to reap, or no owner
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            told = pid, os.waitstatus_to_exitcode(status), time.monotonic()
            server.send(b"ended %d %d %r" % told)
