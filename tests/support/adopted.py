"""Starts the package's fork servers in no time: they are forked from the tests' own one, which has
imported torch, and become children of this process, as if it had started them itself."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys

from support.fork_server import LOCAL_PROCESS, TORCH, Program, server
from tools.chaos.forked import ForkedChild
from torchft_svc.host.fork_server import ServerProcess, ServerProgram, spawn_server

# What imports little more than torch; others are started as users start them.
MODULES = (LOCAL_PROCESS, "tools.chaos.fork_server")
_PR_SET_CHILD_SUBREAPER = 36
# The descriptor after those of its streams.
_SOCKET = "3"
# Those that this process has started.
ADOPTED: set[int] = set()


def spawn_adopted(program: ServerProgram, descriptor: int) -> ServerProcess:
    """Start a fork server by the tests' own one, if that has imported what it needs."""
    environment = dict(program.environment or os.environ)
    is_special = "LD_PRELOAD" in environment  # only the start of a program looks at it
    if program.module not in MODULES or is_special or sys.platform != "linux":
        return spawn_server(program, descriptor)
    words = ["-m", program.module, _SOCKET, str(os.getpid()), *program.arguments]
    asked = Program(words, environment, os.getcwd(), False, parent_pid=os.getpid())
    reading, writing = os.pipe()
    libc = ctypes.CDLL(None)
    # The process between the two ends at once: its child becomes ours, not the system's.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        with os.fdopen(reading) as answer:
            with os.fdopen(writing, "w"):
                server(TORCH).fork(pickle.dumps(asked), writing, 1, 2, descriptor)
            pid = int(answer.read())
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    ADOPTED.add(pid)
    return ForkedChild(pid)
