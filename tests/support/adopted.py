"""Starts the package's fork servers in no time: they are forked from the tests' own one, which has
imported torch, and become children of this process, as if it had started them itself."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
from threading import Lock

from support.fork_server import LOCAL_PROCESS, TORCH, Program, server
from tools.chaos.forked import ForkedChild
from torchft_svc.host.fork_server import ServerProcess, ServerProgram, spawn_server

# What imports little more than torch; others are started as users start them.
MODULES = (LOCAL_PROCESS, "tools.chaos.fork_server")
_PR_SET_CHILD_SUBREAPER = 36
# The descriptor after those of its streams.
_SOCKET = "3"
# No process id has more digits.
_MAX_ID = 20
# Those that this process has started.
ADOPTED: set[int] = set()
# One thread at a time: the first that is done would end the adopting of the others.
_adopting = Lock()


def spawn_adopted(program: ServerProgram, descriptor: int) -> ServerProcess:
    """Start a fork server by the tests' own one, if that has imported what it needs."""
    environment = dict(program.environment or os.environ)
    is_special = "LD_PRELOAD" in environment  # only the start of a program looks at it
    if program.module not in MODULES or is_special or sys.platform != "linux":
        return spawn_server(program, descriptor)
    words = ["-m", program.module, _SOCKET, str(os.getpid()), *program.arguments]
    asked = Program(words, environment, os.getcwd(), False, parent_pid=os.getpid())
    return ForkedChild(adopt(TORCH, asked, 1, 2, descriptor))


def adopt(loaded: str, asked: Program, *descriptors: int) -> int:
    """Fork a program below the fork server with ``loaded``, as a child of this process; its id.

    ``descriptors`` are those of the program after its input, which is empty.
    """
    reading, writing = os.pipe()
    libc = ctypes.CDLL(None)
    with _adopting:
        # The process between the two ends at once: its child becomes ours, not the system's.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            with os.fdopen(reading, "rb", buffering=0) as answer:
                with os.fdopen(writing, "wb"):
                    server(loaded).fork(pickle.dumps(asked), writing, *descriptors)
                # Not up to its end: what another thread has forked meanwhile may hold it open.
                pid = int(answer.read(_MAX_ID))
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    ADOPTED.add(pid)
    return pid
