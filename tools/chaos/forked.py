"""Forks fork servers instead of starting them: they need not import what their parent has."""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import socket
import sys
import time
import traceback
from subprocess import TimeoutExpired
from typing import Any

from torchft_svc.host.fork_server import ForkServer

_LOOK_S = 0.005
# An environment, and some words.
_MAX_MESSAGE = 1 << 17


class ForkedChild:
    """A child, with the part of `subprocess.Popen` that a `ForkServer` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_first(module: str) -> None:
    """Fork a child that becomes the first fork server of this process that runs ``module``, once it
    is asked for. To be called while this process has no other thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner_pid, pid = os.getpid(), os.fork()
    if pid == 0:
        ours.close()
        _be_server(module, owner_pid, theirs)
    theirs.close()
    spawn = ForkServer._spawn

    def hand_over(server: ForkServer, descriptor: int) -> Any:
        if server._module != module:
            return spawn(server, descriptor)
        ForkServer._spawn = spawn  # type: ignore[method-assign]
        told = pickle.dumps((server._arguments, dict(server._environment or os.environ)))
        with ours:
            socket.send_fds(ours, [told], [descriptor])
        return ForkedChild(pid)

    ForkServer._spawn = hand_over  # type: ignore[method-assign]


def _be_server(module: str, owner_pid: int, asked: socket.socket) -> None:
    status = 1
    try:
        with asked:
            told, descriptors, _, _ = socket.recv_fds(asked, _MAX_MESSAGE, 1)
        if descriptors:  # else the owner has ended without a question
            arguments, environment = pickle.loads(told)  # noqa: S301 - from the owner
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[:] = [module, str(descriptors[0]), str(owner_pid), *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:  # noqa: BLE001 - a process ends here
        traceback.print_exc()
    finally:
        os._exit(status)
