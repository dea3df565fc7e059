"""Forks the manager of a trainer that is a fork itself: it has imported what a manager imports."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchft_svc.manager_server import early

# The name of a forked manager, whose command line is that of the fork server.
NAME = "manager_server"
_PR_SET_NAME = 15
# Threads that only wait when a manager is started: those of a store and of gloo, and Python's own,
# which have the process' name. gRPC has others, and cannot be used in a fork once it has them.
_HARMLESS_THREADS = {"pt_tcpstore_uv", "gloo_tcp_loop", "pt_gloo_runloop"}
# Loaded here, because a fork of a program with threads may not be able to.
_LIBC = ctypes.CDLL(None)


def fork_managers() -> None:
    """From now on this process forks its managers, as long as none of its threads is in the way.

    Later ones, such as that which replaces a lost one, are started as always.
    """
    names = SimpleNamespace(Popen=_ForkedPopen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    setattr(early, "subprocess", names)  # noqa: B010 - it is a module for its type


def is_manager(pid: int) -> bool:
    """Whether a process is a trainer's manager, forked or not."""
    process = Path(f"/proc/{pid}")
    if NAME.encode() in (process / "cmdline").read_bytes():
        return True
    return (process / "comm").read_text().strip() == NAME


class _ForkedPopen(subprocess.Popen[bytes]):
    """Of ``python -m module arguments``; its descriptors and its end are those of the real one."""

    def _execute_child(self, command: Sequence[str], *given: Any) -> None:
        if not _may_fork():
            super()._execute_child(command, *given)  # type: ignore[misc]
            return
        _, _, _, pass_fds, _, env, _, _, _, *pipes = given
        stdin, stdout = pipes[0], pipes[3]
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, stdin, stdout, pass_fds, env)
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]


def _become(
    command: Sequence[str], stdin: int, stdout: int, kept: Iterable[int], env: Mapping[str, str]
) -> None:
    """Be the program, to its end."""
    status = 1
    try:
        _LIBC.prctl(_PR_SET_NAME, NAME.encode())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
            if _is_open(number):
                os.close(number)
        os.environ.clear()
        os.environ.update(env)
        random.seed()
        _forget_logging()
        _, _, module, *arguments = command
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - a process ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _forget_logging() -> None:
    """How the trainer's program has set it up, which is not for its manager."""
    known = logging.root.manager.loggerDict.values()
    for logger in (logging.root, *(each for each in known if isinstance(each, logging.Logger))):
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
    logging.root.setLevel(logging.WARNING)


def _may_fork() -> bool:
    own = Path("/proc/self/comm").read_text().strip()
    try:
        threads = {
            (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()
        }
    except OSError:  # one has just ended
        return False
    return threads <= {own, *_HARMLESS_THREADS}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:  # the listing's own
        return False
    return True
