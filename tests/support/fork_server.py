"""The fork servers of the tests: they have imported torch, or the services, and fork what a test
would start.

A fork runs a function, or becomes a program like any other, from its arguments to the end of its
interpreter, or nearly so; only its parent is another one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import psutil

from tools.demo.orphans import MARK
from torchft_svc.host.fork_server import ForkServer

TESTS = Path(__file__).parents[1]
# The fork server of a trainer's workers on this machine.
LOCAL_PROCESS = "torchft_svc.trainer.local_process"
# What a fork server has imported: a service must not have torch, nor its memory.
TORCH = "torch"
SERVICES = "services"
# What forks may show as their command lines: the server's own has room for it.
MAX_COMMAND_LINE = 4000
# So long waits one thread for the end of a process while others do.
_TURN_S = 0.1
# A process is gone so long before its end is reported, at most.
_REPORT_S = 5.0
# Of a process that has ended long ago, so that another one has had its id since.
LOST_STATUS = 255


@dataclass(frozen=True)
class Place:
    """The network ``namespace`` of a program; the command ``prepare`` makes its mounts and host
    name, which are its own."""

    namespace: str
    prepare: Sequence[str]


@dataclass(frozen=True)
class Program:
    """``arguments``: a script or ``-W ignore -m MODULE``, and its own.

    ``pace_s``: how long it sleeps in each step of an optimizer.
    ``loaded``: which of the fork servers forks it.
    ``drops_memory``: it ends without freeing what it has imported, which takes 0.25 s with torch,
        as a `Call` does; not for tests of the end.
    ``parent_pid``: it becomes a child of this process, which adopts orphans, and writes its own
        process id to the first descriptor.
    ``serves``: its first fork server with this module needs no import.
    ``passed``: the numbers that the descriptors after its streams get (default: from 3 up).
    ``forks_programs``: it forks the Python programs that it starts, see forking_popen.py.
    ``place``: it leaves that of its fork server for this one.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    leads_session: bool
    pace_s: float = 0.0
    loaded: str = TORCH
    drops_memory: bool = False
    parent_pid: int = 0
    serves: str = ""
    passed: tuple[int, ...] = ()
    forks_programs: bool = False
    place: Place | None = None


@dataclass(frozen=True)
class Call:
    """``run(*arguments)``, with ``variables`` added to the environment and output to ``log``;
    ``serves``: see `Program`."""

    run: Callable[..., object]
    arguments: tuple[Any, ...]
    variables: Mapping[str, str]
    log: Path
    serves: str = ""


@functools.cache
def server(loaded: str) -> ForkServer:
    """The only one of this session that has imported this; it ends with this process, and not with
    a run of faults that needs it first."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looks for devices without CUDA
    }
    inherited = {name: value for name, value in os.environ.items() if name != MARK}
    room = " " * MAX_COMMAND_LINE
    return ForkServer(
        "support.fork_server_main", "tests", loaded, room, environment=inherited | environment
    )


def _begin_of(pid: int) -> float | None:
    """The instant at which the process with this id began (None: there is none)."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None


class Forked:
    """A forked process, with the part of `subprocess.Popen` that tests need."""

    def __init__(self, what: Program | Call, descriptors: Sequence[int] = ()) -> None:
        self._server = server(what.loaded if isinstance(what, Program) else TORCH)
        self.pid = self._server.fork(pickle.dumps(what), *descriptors)
        self.returncode: int | None = None
        self._ending = threading.Lock()
        self._began_at = _begin_of(self.pid)

    def poll(self) -> int | None:
        return self._end(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._end(timeout)
        if status is None:
            raise TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def _end(self, timeout_s: float | None) -> int | None:
        # The server reports an end once, to one of the threads that wait for it.
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self.returncode is None:
            left_s = max(0.0, until - time.monotonic())
            with self._ending:
                if self.returncode is None:
                    self.returncode = self._find_status(min(left_s, _TURN_S))
            if left_s <= _TURN_S:
                break
        return self.returncode

    def _find_status(self, wait_s: float) -> int | None:
        begin = _begin_of(self.pid)
        if None not in (begin, self._began_at) and begin != self._began_at:
            return LOST_STATUS  # another process has its id now, and the server the status of that
        ended = self._server.end_of(self.pid, wait_s)
        if ended is None and _begin_of(self.pid) is None:
            ended = self._server.end_of(self.pid, _REPORT_S) or (LOST_STATUS, 0.0)
        return None if ended is None else ended[0]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its end is not reported yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
