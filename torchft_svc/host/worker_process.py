"""A worker's process: how it is started, how it is ended with all that it has started, and its end.

Both supervisors use it, an agent and a trainer's local backend: as a command of its own, or forked
from a process that has imported what the worker needs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import IO

from torchft_svc.host.fork_server import ForkServer
from torchft_svc.host.process_end import ProcessEnd

# A process that gets SIGKILL ends as soon as the kernel lets it, which a device may prevent.
KILL_S = 10.0
# The end of a forked process can be seen a moment before the fork server reports its exit code.
_EXIT_CODE_S = 5.0
# Signals that also go to what a Python worker has started.
_FOR_ALL = signal.SIGKILL, signal.SIGCONT


class WorkerProcess(ABC):
    """A process with id ``pid``; all calls come from one thread, or under one lock."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.end = ProcessEnd(pid)

    @property
    def descriptors(self) -> list[int]:
        """Readable when `poll` has something new. Empty: call it every `POLL_S` seconds."""
        return [] if self.end.descriptor is None else [self.end.descriptor]

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code (negative: the signal) of a process that has ended; None: it runs."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process, unless it has ended."""

    def close(self, *, kill_rest: bool) -> None:
        """Free what an ended process leaves; ``kill_rest``: also kill what it has started."""
        self.end.close()


class SessionProcess(WorkerProcess):
    """A process that leads a session, to which all belongs that it starts.

    Of a Python program (``is_python``) only itself is signalled, except by SIGKILL and SIGCONT: it
    may need its children to end in order. Without the workers of its DataLoader it cannot finish
    its step.
    """

    def __init__(self, pid: int, *, is_python: bool = True) -> None:
        super().__init__(pid)
        self._is_python = is_python

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # A fork becomes the leader of its session a moment after it exists.
            is_leader = os.getpgid(self.pid) == self.pid
            to_all = number in _FOR_ALL or not self._is_python
            send = os.killpg if is_leader and to_all else os.kill
            send(self.pid, number)

    def close(self, *, kill_rest: bool) -> None:
        super().close(kill_rest=kill_rest)
        if kill_rest:  # DataLoader workers and others would hold memory and devices
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class SpawnedProcess(SessionProcess):
    """A command that this process has started, with its streams (None: those of this process)."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
        *,
        is_python: bool = True,
    ) -> None:
        self._process = subprocess.Popen(
            words, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
        )
        super().__init__(self._process.pid, is_python=is_python)

    def poll(self) -> int | None:
        return self._process.poll()


class ForkedProcess(SessionProcess):
    """A process that ``server`` has forked, which is its parent and reports its exit code."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        super().__init__(pid)
        self._server = server
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        if self._exit_code is None and self.end.has_ended():
            reported = self._server.end_of(self.pid, _EXIT_CODE_S)
            # Without a code the server is lost, and with it its forks: see `end_with`.
            self._exit_code = -signal.SIGKILL if reported is None else reported[0]
        return self._exit_code
