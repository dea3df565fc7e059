"""Starts programs in no time: a process that has imported torch forks itself for each of them.

Such a program is a process like any other, from its arguments to the end of its interpreter; only
its parent is another one, which tells how it has ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from types import TracebackType
from typing import Any

# Until the first one runs, torch is imported, on a machine that may be busy.
START_S = 60.0
_MAX_BYTES = 1 << 17
# How often to look whether a program has ended; not every system tells that to a descriptor.
_LOOK_S = 0.01
_template: socket.socket | None = None


class Warm:
    """A running program, with the part of `subprocess.Popen` that tests need.

    ``command`` is our interpreter, then a script or ``-W ignore -m MODULE``, and arguments.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path = ".",
        stdin: int = DEVNULL,
        stdout: int = PIPE,
        stderr: int = PIPE,
        text: bool = False,
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        """``preexec_fn`` is not called: what is forked ends with its streams, as these do."""
        assert command[0] == sys.executable, command
        asked = {
            "arguments": list(command[1:]),
            "environment": dict(env),
            "folder": str(cwd),
            "session": start_new_session,
        }
        with contextlib.ExitStack() as given:
            theirs: list[int] = []
            self.stdin = _stream(stdin, "w", theirs, given, text=text)
            self.stdout = _stream(stdout, "r", theirs, given, text=text)
            self.stderr = _stream(stderr, "r", theirs, given, text=text)
            self._news = _stream(PIPE, "r", theirs, given, text=True)
            socket.send_fds(_the_template(), [json.dumps(asked).encode()], theirs)
        self.returncode: int | None = None
        if not self._has_news(START_S):
            raise AssertionError(f"{command} did not start within {START_S} s")
        self.pid = int(self._news.readline())

    def _has_news(self, timeout_s: float | None) -> bool:
        return bool(select.select([self._news], [], [], timeout_s)[0])

    def poll(self) -> int | None:
        if self.returncode is None and self._has_news(0.0):
            self.returncode = int(self._news.readline())
            self._news.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None and not self._has_news(timeout):
            raise TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and that is not told yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Of a program that has ended."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
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


def _stream(
    wanted: int, mode: str, theirs: list[int], given: contextlib.ExitStack, *, text: bool
) -> Any:
    """Our end of a new pipe, or None; adds the program's descriptor to ``theirs``.

    What was opened for the program is closed with ``given``.
    """
    ours = None
    if wanted == PIPE:
        read, write = os.pipe()
        mine, descriptor = (write, read) if mode == "w" else (read, write)
        ours = os.fdopen(mine, mode if text else f"{mode}b")
    elif wanted == DEVNULL:
        descriptor = os.open(os.devnull, os.O_RDWR)
    else:
        theirs.append(theirs[1] if wanted == STDOUT else wanted)
        return None
    given.callback(os.close, descriptor)
    theirs.append(descriptor)
    return ours


def _the_template() -> socket.socket:
    """The line to it; it ends with this process."""
    global _template
    if _template is None:
        _template, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            Popen(
                [sys.executable, __file__, str(its.fileno())],
                stdin=DEVNULL,
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
        request, told, _, _ = socket.recv_fds(asking, _MAX_BYTES, 4)
        if not request:
            return None
        *standard, news = told
        pid = os.fork()
        if pid == 0:
            for other in (asking.detach(), news, *tell.values()):
                os.close(other)
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return dict(json.loads(request))
        for descriptor in standard:
            os.close(descriptor)
        _say(news, pid)
        tell[pid] = news


def _say(news: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # who asked has no interest any more
        os.write(news, f"{number}\n".encode())


def _become(asked: dict[str, Any]) -> list[str]:
    """What the interpreter would have made ready; its arguments."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    if asked["session"]:
        os.setsid()
    if "PYTHONUNBUFFERED" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments: list[str] = asked["arguments"]
    if arguments[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        del arguments[:2]
    is_module = arguments[0] == "-m"
    sys.argv[:] = arguments[is_module:]
    sys.path[0] = os.getcwd() if is_module else str(Path(arguments[0]).parent.resolve())
    return arguments


def _load() -> None:
    """All that torch loads at its first use, which takes seconds; starts no thread."""
    import torch

    import torchft_svc.client  # noqa: F401

    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()
    gc.collect()
    gc.freeze()  # or each program would look through all of it when it ends, and copy it


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the tests
    with socket.socket(fileno=int(sys.argv[1])) as _asking:
        _load()
        _asked = _serve(_asking)
    if _asked is not None:
        _arguments = _become(_asked)
        if _arguments[0] == "-m":
            runpy.run_module(_arguments[1], run_name="__main__", alter_sys=True)
        else:
            __file__ = _arguments[0]
            exec(compile(Path(__file__).read_bytes(), __file__, "exec"))  # noqa: S102
