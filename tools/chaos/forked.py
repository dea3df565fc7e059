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

from torchft_svc.host.fork_server import ServerProcess, ServerProgram, replace_spawner

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


def fork_first(module: str) -> int:
    """Fork a child that becomes the first fork server of this process with ``module``; its id.

    To be called while this process has no other thread.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner_pid, pid = os.getpid(), os.fork()
    if pid == 0:
        ours.close()
        _be_server(module, owner_pid, theirs)
    theirs.close()

    def hand_over(program: ServerProgram, descriptor: int) -> ServerProcess:
        if program.module != module:
            return spawn_before(program, descriptor)
        replace_spawner(spawn_before)
        environment = dict(program.environment or os.environ)
        with ours:
            request = pickle.dumps((program.arguments, environment))
            socket.send_fds(ours, [request], [descriptor])
        return ForkedChild(pid)

    spawn_before = replace_spawner(hand_over)
    return pid


def _be_server(module: str, owner_pid: int, asked: socket.socket) -> None:
    status = 1
    try:
        with asked:
            request, descriptors, _, _ = socket.recv_fds(asked, _MAX_MESSAGE, 1)
        if descriptors:  # else the owner has ended without a question
            arguments, environment = pickle.loads(request)  # noqa: S301 - from the owner
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[:] = [module, str(descriptors[0]), str(owner_pid), *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:  # noqa: BLE001 - a process ends here
        traceback.print_exc()
    finally:
        os._exit(status)
