"""Starts programs in no time: a process that has imported torch forks itself for each of them.

Such a program is a process like any other, from its arguments to the end of its interpreter; only
its parent is another one, which tells how it has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

# Until the first one runs, torch is imported, on a machine that may be busy.
START_S = 60.0
_MAX_BYTES = 1 << 17
# How often to look whether a program has ended; not every system tells that to a descriptor.
_LOOK_S = 0.01
_template: socket.socket | None = None


class Warm:
    """A running program, with the part of `subprocess.Popen` that tests need."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        asked = {"arguments": list(arguments), "environment": dict(environment)}
        told = [write for _, write in pipes]
        socket.send_fds(_the_template(), [json.dumps(asked).encode()], told)
        for descriptor in told:
            os.close(descriptor)
        self.stdout, self.stderr, self._news = (os.fdopen(read) for read, _ in pipes)
        self.returncode: int | None = None
        if not self._has_news(START_S):
            raise AssertionError(f"{arguments} did not start within {START_S} s")
        self.pid = int(self._news.readline())

    def _has_news(self, timeout_s: float | None) -> bool:
        return bool(select.select([self._news], [], [], timeout_s)[0])

    def poll(self) -> int | None:
        if self.returncode is None and self._has_news(0.0):
            self.returncode = int(self._news.readline())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None and not self._has_news(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and that is not told yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Of a program that has ended."""
        for stream in (self.stdout, self.stderr, self._news):
            stream.close()

    def __enter__(self) -> Warm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.wait()
        self.close()


def _the_template() -> socket.socket:
    """The line to it; it ends with this process."""
    global _template
    if _template is None:
        _template, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            subprocess.Popen(
                [sys.executable, __file__, str(its.fileno())],
                pass_fds=[its.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
    return _template


def _serve(asking: socket.socket) -> dict[str, Any] | None:
    """Fork for each request, and tell how those that were forked ended.

    Returns in them, with the request, and in this process when nobody can ask any more.
    """
    tell: dict[int, int] = {}  # a process' id: whom to tell
    while True:
        is_asked = select.select([asking], [], [], _LOOK_S if tell else None)[0]
        for pid in list(tell):
            has_ended, status = os.waitpid(pid, os.WNOHANG)
            if has_ended:
                _say(tell[pid], os.waitstatus_to_exitcode(status))
                os.close(tell.pop(pid))
        if not is_asked:
            continue
        request, told, _, _ = socket.recv_fds(asking, _MAX_BYTES, 3)
        if not request:
            return None
        output, errors, news = told
        pid = os.fork()
        if pid == 0:
            for other in (asking.detach(), news, *tell.values()):
                os.close(other)
            for standard, descriptor in enumerate((output, errors), start=1):
                os.dup2(descriptor, standard)
                os.close(descriptor)
            return dict(json.loads(request))
        os.close(output)
        os.close(errors)
        _say(news, pid)
        tell[pid] = news


def _say(news: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # who asked has no interest any more
        os.write(news, f"{number}\n".encode())


def _become(asked: dict[str, Any]) -> str:
    """What the interpreter would have made ready; the program's path."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv[:] = asked["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return sys.argv[0]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the tests
    with socket.socket(fileno=int(sys.argv[1])) as _asking:
        import torch  # noqa: F401

        import torchft_svc.client  # noqa: F401

        _asked = _serve(_asking)
    if _asked is not None:
        __file__ = _become(_asked)
        exec(compile(Path(__file__).read_bytes(), __file__, "exec"))  # noqa: S102
