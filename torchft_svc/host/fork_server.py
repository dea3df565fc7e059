"""A process that has imported torch and forks: importing takes seconds, forking milliseconds.

`ForkServer` is the owner's side. The server's side is a module that imports what the program needs
and calls `serve`, which returns a `Fork` in each fork. The server never starts a thread and never
uses a device, so its forks may do both.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchft_svc.errors import DeadlineExceeded, QuorumFailed
from torchft_svc.host.clean_start import FAILED, module_command
from torchft_svc.host.process_end import POLL_S, ProcessEnd, end_with

# Importing torch takes two seconds, and much longer on a machine that starts many processes.
START_S = 60.0
# One that is ready forks within milliseconds.
FORK_S = 20.0
# A server that was asked to end only has to leave its loop.
_END_S = 5.0
# How many exit statuses are kept that nobody has asked for yet.
MAX_STATUSES = 64
# A request may hold a whole environment; a number goes before it.
_MAX_MESSAGE = 1 << 17
MAX_REQUEST = _MAX_MESSAGE - 64
_MAX_DESCRIPTORS = 4
# The audit event of each fork (see `sys.addaudithook`), with the module of the server.
FORK_EVENT = "torchft_svc.fork"
# Begins the message of a server that must not fork.
_REFUSED = "refused:"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerProgram:
    """The program of a fork server, as a `Spawner` starts it.

    Args:
        module: calls `serve` with the first two of its arguments.
        arguments: of the module, after a descriptor and the process id of the owner.
        environment: of the server, and so of its forks (None: that of the owner).
    """

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None


class ServerProcess(Protocol):
    """The process of a fork server, for its owner."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """End the process at once."""


# Starts a program, which inherits a descriptor.
Spawner = Callable[[ServerProgram, int], ServerProcess]


def spawn_server(program: ServerProgram, descriptor: int) -> ServerProcess:
    """Start a new interpreter for ``program``."""
    arguments = str(descriptor), str(os.getpid()), *program.arguments
    return subprocess.Popen(
        module_command(program.module, descriptor, *arguments),
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        env=program.environment,
    )


_spawner: Spawner = spawn_server


def replace_spawner(spawner: Spawner) -> Spawner:
    """Start all fork servers of this process by ``spawner`` from now on; return the one before.

    For a process that can fork its servers from one that has imported what they need.
    """
    global _spawner
    before, _spawner = _spawner, spawner
    return before


class ForkServer:
    """Starts ``python -m module`` when it is first needed, and again after it was lost.

    Args:
        module, arguments, environment: see `ServerProgram`.
        purpose: what the forked processes are for, in error messages.
    """

    def __init__(
        self,
        module: str,
        purpose: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._program = ServerProgram(module=module, arguments=arguments, environment=environment)
        self._action = f"starting a process for {purpose}"
        self._lost = f"the process that starts those for {purpose} has ended"
        self._why_lost = self._refusal = ""
        self._changed = threading.Condition()
        self._forking = threading.Lock()
        self._process: ServerProcess | None = None
        self._socket: socket.socket | None = None
        self._owner = 0
        self._started_at = 0.0
        self._ready = False
        self._num_requests = 0
        self._forked: dict[int, int] = {}  # process ids, by the number of the request
        self._ends: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._watched: set[int] = set()  # process ids whose ends the server will report

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
                self._process = _spawner(self._program, theirs.fileno())
            self._socket, self._owner = ours, os.getpid()
            self._started_at = time.monotonic()
            self._ready, self._forked = False, {}
            self._why_lost, self._refusal = "; see stderr", ""
        threading.Thread(
            target=self._read, args=(ours,), name="torchft-fork-server", daemon=True
        ).start()

    def fork(self, request: bytes, *descriptors: int) -> int:
        """Fork a process, where `serve` returns ``request`` and ``descriptors``; return its id.

        Raises:
            DeadlineExceeded: the server is not ready within `START_S`. Or it does not fork within
                `FORK_S`, so it is frozen: it is killed, and the next call starts another.
            QuorumFailed: the server has exited.
        """
        sys.audit(FORK_EVENT, self._program.module)
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
        """Wait up to ``within_s`` until the server has imported its program; return whether it has.

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

    @property
    def refusal(self) -> str:
        """Why the last server would not fork (empty: it would); see `refuse`."""
        return self._refusal

    def end_of(self, pid: int, timeout_s: float | None = 0.0) -> tuple[int, float] | None:
        """Exit status (negative: the signal) and instant of the end of a forked process.

        None if it is not known in time, or the server was lost before, or it was returned already.
        """
        with self._changed:
            self._changed.wait_for(lambda: pid not in self._watched, timeout_s)
            return self._ends.pop(pid, None)

    def close(self, within_s: float = _END_S) -> None:
        """End the server, but not its forks; idempotent.

        It is killed after ``within_s``, for instance while it imports.
        """
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
                if kind in (FAILED.strip(), _REFUSED):
                    self._why_lost = f": {' '.join(values)}"
                    self._refusal = " ".join(values) if kind == _REFUSED else ""
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


@dataclass(frozen=True, slots=True)
class Fork:
    """A forked process, with the request and its descriptors.

    ``handlers``: those of SIGINT and SIGTERM before the server ignored these signals.
    """

    request: bytes
    descriptors: list[int]
    server_pid: int
    handlers: Mapping[signal.Signals, Any]

    def lead_session(self, *handled: signal.Signals) -> None:
        """Lead a session that ends with the server, and handle these signals as it once did."""
        end_with(self.server_pid)
        os.setsid()
        for number in handled:
            signal.signal(number, self.handlers[number])


def refuse(descriptor: int, reason: str) -> None:
    """Inform the owner that this process must not fork, and so will end."""
    with contextlib.suppress(OSError):  # the owner has ended
        os.write(descriptor, f"{_REFUSED} {reason}".encode()[:_MAX_MESSAGE])


def serve(descriptor: int, owner_pid: int) -> Fork | None:
    """Fork a process for each request of ``owner_pid``; report its id, and later its exit status.

    Returns in each fork, and in the server with None, once the owner has closed the socket or is
    gone. Forks ignore SIGINT and SIGTERM, as the server does, until they call `lead_session`.
    """
    # A terminal or a service manager signals all processes; this one exits with its owner.
    numbers = signal.SIGINT, signal.SIGTERM
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    server_pid = os.getpid()
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
                return Fork(request, descriptors, server_pid, handlers)
            for each in descriptors:
                os.close(each)
            with contextlib.suppress(ConnectionError):  # noticed with the next message
                server.send(b"forked %s %d" % (asked, pid))
    signal.set_wakeup_fd(-1)  # before it is closed: the last forks exit just now
    return None


def _receive(server: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a request with its descriptors; an empty one if the owner is gone."""
    try:
        message, descriptors, _, _ = socket.recv_fds(server, _MAX_MESSAGE, _MAX_DESCRIPTORS)
    except ConnectionError:  # it had not read all
        return b"", []
    return message, descriptors


def _reap(server: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError, ConnectionError):  # nothing to reap, or no owner
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            exit_code = os.waitstatus_to_exitcode(status)
            server.send(b"ended %d %d %r" % (pid, exit_code, time.monotonic()))
