"""The trainer's side of the processes that carry its collectives."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from torchft_svc.client.process_groups.isolated.messages import (
    ChildFailed,
    Command,
    Reply,
    Share,
    ShareDevice,
)
from torchft_svc.client.process_groups.isolated.segments import Pool
from torchft_svc.errors import QuorumFailed
from torchft_svc.host.clean_start import ended_how
from torchft_svc.host.fork_server import ForkServer
from torchft_svc.host.process_end import ProcessEnd

log = logging.getLogger(__name__)

# A killed process exits within milliseconds; this limit is for a busy machine.
_REAP_S = 5.0
# Its connection closes a moment before the fork server reports its exit status.
_STATUS_S = 1.0
# Its connection closes before the kernel has reclaimed a device's memory from it.
_GONE_S = 30.0

OnEnd = Callable[[Exception | None], None]


# Of all process groups of this process.
FORK_SERVER = ForkServer(f"{__package__}.child", "collectives")


def fork_carrier(server: ForkServer) -> tuple[int, Connection]:
    """Fork a process for collectives; its id, and the connection to it.

    Raises:
        PeerError: see `ForkServer.fork`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        pid = server.fork(b"", theirs.fileno())
    return pid, Connection(ours.detach())


class ChildProcess:
    """A child process; each numbered command is answered once, at the latest by the child's exit.

    Raises:
        PeerError: no process could be started.
    """

    def __init__(self) -> None:
        self.pid, self._connection = fork_carrier(FORK_SERVER)
        self._end_of_process = ProcessEnd(self.pid)
        self._lock = threading.Lock()
        self._waiting: dict[int, OnEnd] = {}
        self._ended: Exception | None = None
        # A failed operation in a live process may still write to shared memory.
        self.has_failed = False
        self._reader = threading.Thread(target=self._read, name="torchft-isolated", daemon=True)
        self._reader.start()

    @property
    def ended(self) -> Exception | None:
        return self._ended

    @property
    def is_gone(self) -> bool:
        """Whether the process has exited and the kernel has reclaimed its resources."""
        return not self._reader.is_alive()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    @property
    def num_under_way(self) -> int:
        """How many commands have no answer yet."""
        return len(self._waiting)

    def send(
        self,
        request: Command,
        number: int | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        """Send ``request``; ``on_end`` is called when command ``number`` has ended, and must not
        raise.

        Raises:
            QuorumFailed: the process has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            if number is not None and on_end is not None:
                self._waiting[number] = on_end
            with contextlib.suppress(OSError):  # the reader notices, and answers all commands
                self._connection.send(request)

    def share(self, segment: Share | ShareDevice, descriptor: int | None) -> None:
        """Announce ``segment``; its ``descriptor`` follows, if it has one.

        Raises:
            QuorumFailed: the process has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            with contextlib.suppress(OSError):
                self._connection.send(segment)
                if descriptor is not None:
                    send_handle(self._connection, descriptor, self.pid)

    def kill(self, wait_s: float = _REAP_S) -> None:
        """Kill the process, and wait up to ``wait_s`` for its exit; idempotent."""
        error = QuorumFailed("the process group was left while a collective was under way")
        self._ended = self._ended or error  # before the reader sets another reason
        with contextlib.suppress(ProcessLookupError):
            if self._reader.is_alive():  # until then its pid is not reused
                os.kill(self.pid, signal.SIGKILL)
        # Not earlier: a send that is blocked, because the process does not read, holds the lock.
        self._end(error)
        if threading.current_thread() is not self._reader:
            self._reader.join(wait_s)

    def _read(self) -> None:
        how = ""
        while True:
            try:
                answer: Reply | ChildFailed = self._connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(answer, ChildFailed):
                how = f"failed: {answer.line}"
            else:
                self._receive(answer)
        ended = FORK_SERVER.end_of(self.pid, _STATUS_S)
        if not how:
            how = "has ended" if ended is None else ended_how(ended[0])
        self._end(QuorumFailed(f"the process that carries the collectives {how}"))
        with self._lock:
            self._connection.close()
        self._end_of_process.wait(_GONE_S)
        self._end_of_process.close()

    def _receive(self, answer: Reply) -> None:
        with self._lock:
            on_end = self._waiting.pop(answer.number, None)
        self.has_failed = self.has_failed or answer.error is not None
        if on_end is not None:
            on_end(None if answer.error is None else QuorumFailed(answer.error))

    def _end(self, error: Exception) -> None:
        """Answer all open commands with ``error``."""
        with self._lock:
            self._ended = error = self._ended or error
            waiting, self._waiting = self._waiting, {}
        for on_end in waiting.values():
            on_end(error)


class KilledProcesses:
    """Killed processes, each with the memory that was shared with it.

    Until a process has exited, its device may still write to that memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[ChildProcess, Pool]] = []

    def kill(self, child: ChildProcess, pool: Pool) -> None:
        """Kill ``child``, and free ``pool`` once it is unused."""
        if not pool.on_device:
            child.kill()
            pool.close()  # the kernel keeps it until the process exits
            return
        child.kill(wait_s=0)
        with self._lock:
            self._kept.append((child, pool))
        self.clear()

    def clear(self) -> None:
        """Free the memory that is unused; cheap."""
        with self._lock:
            over = [(c, p) for c, p in self._kept if c.is_gone and p.is_idle()]
            self._kept = [entry for entry in self._kept if entry not in over]
        for _, pool in over:
            pool.close()

    def close(self, timeout_s: float) -> None:
        """Free what can be freed within ``timeout_s``; the rest is freed when the trainer exits."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            kept = list(self._kept)
        for child, _ in kept:
            child.kill(wait_s=max(0.0, deadline - time.monotonic()))
        self.clear()
