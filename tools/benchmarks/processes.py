"""The processes of a benchmark: started with pipes, read line by line with deadlines, always ended.

A child dies with this process (Linux), and only children started here are ever killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import Popen

import psutil

from tools.demo.orphans import die_with_parent

ROOT = Path(__file__).resolve().parent.parent.parent
PEER_VARIABLE = "TORCHFT_PEER_PYTHON"
# Importing torch takes seconds, and several children do it at once.
START_TIMEOUT_S = 150.0
_STOP_TIMEOUT_S = 3.0
_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # What is installed has been compiled: no start may pay for that, on one side of a comparison.
    "PYTHONDONTWRITEBYTECODE": "",
}


class ChildError(RuntimeError):
    """A child ended or stayed silent; the text has its last words."""


class Child:
    """A running process with its standard output as a stream of lines."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        root: Path = ROOT,
        quiet: bool = True,
    ) -> None:
        self.command = list(command)
        self._lines: list[str] = []
        self._partial = b""
        # Several children write at the same time; what they say is shown only if one fails.
        self._errors = _anonymous_file() if quiet else None
        self._process = Popen(
            self.command,
            cwd=root,
            env={**os.environ, **_ENVIRONMENT, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            preexec_fn=die_with_parent,
        )
        self._stats = psutil.Process(self._process.pid)
        # A sidecar outlives its trainer for a moment; it is remembered to be ended with it.
        self._relatives: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: str) -> None:
        """Write ``line`` to the child's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def read_line(self, timeout_s: float) -> str:
        """The next line of output, without its end.

        Raises:
            ChildError: none within ``timeout_s``, or the child has ended.
        """
        deadline = time.monotonic() + timeout_s
        while not self._lines:
            if not self.wait_for_output(deadline - time.monotonic()):
                raise self.error(f"said nothing for {timeout_s:g} s")
            if not self.read_available():
                raise self.error("ended")
        return self._lines.pop(0)

    def wait_for_output(self, timeout_s: float) -> bool:
        """Whether there is something to read (or the child's end) within ``timeout_s``."""
        return bool(select.select([self.fileno()], [], [], max(0.0, timeout_s))[0])

    def read_available(self) -> bool:
        """Take in what can be read now; False if the output has ended."""
        chunk = os.read(self.fileno(), 1 << 16)
        *complete, self._partial = (self._partial + chunk).split(b"\n")
        self._lines += [line.decode() for line in complete]
        return bool(chunk)

    def take_lines(self) -> list[str]:
        """The complete lines that were read and not yet taken."""
        lines, self._lines = self._lines, []
        return lines

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def cpu_s(self) -> float:
        """CPU time used so far, user and system, in seconds; its own children are not counted."""
        times = self._stats.cpu_times()
        return float(times.user + times.system)

    def memory_bytes(self) -> int:
        """How much of the machine's memory it has now."""
        return int(self._stats.memory_info().rss)

    def children(self) -> list[psutil.Process]:
        """The processes that this one has started (a trainer's manager)."""
        found: list[psutil.Process] = self._stats.children(recursive=True)
        self._relatives |= {process.pid: process for process in found}
        return found

    def kill(self) -> None:
        """SIGKILL, at once."""
        self._process.kill()

    def stop(self) -> None:
        """End the child and what it has started; may be called twice."""
        if self._process.poll() is None:
            with contextlib.suppress(psutil.Error):
                self.children()
            self._end_input()  # to a trainer of ours SIGTERM alone says: finish your step
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        # A killed trainer's sidecar goes by itself; one that has not by now never will.
        _, left = psutil.wait_procs(list(self._relatives.values()), _STOP_TIMEOUT_S)
        for process in left:  # psutil looks at the start time, so the id is still the same process
            with contextlib.suppress(psutil.Error):
                process.kill()

    def close(self) -> None:
        """Close the pipes; the process is left alone."""
        self._end_input()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _end_input(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what it has not read yet is lost with it
            self._process.stdin.close()

    def error(self, what: str) -> ChildError:
        """Return the error to raise when this child has failed, with its last output."""
        name = " ".join(self.command[3:6])
        words = ""
        if self._errors is not None:
            size = os.lseek(self._errors, 0, os.SEEK_END)
            words = os.pread(self._errors, 4000, max(0, size - 4000)).decode(errors="replace")
        return ChildError(f"{name} (status {self._process.poll()}) {what}\n{words}".rstrip())

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.close()
        if self._errors is not None:
            os.close(self._errors)
            self._errors = None


def printed_lines(children: Mapping[int, Child], timeout_s: float) -> Iterator[tuple[int, str]]:
    """Yield the lines of ``children`` as they print them, for ``timeout_s``, with the child's key.

    Raises:
        ChildError: one of them has ended.
    """
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select(list(children.values()), [], [], left_s)
        for key, child in children.items():
            if child not in readable:
                continue
            if not child.read_available():
                raise child.error("ended")
            for line in child.take_lines():
                yield key, line


def program(name: str, *arguments: object, python: str = sys.executable) -> list[str]:
    """The command that runs module ``name``, with the interpreter ``python``."""
    return [python, "-W", "ignore", "-m", name, *map(str, arguments)]


def by_public_names(name: str, *arguments: object) -> list[str]:
    """The command that runs module ``name``, in which ``import torchft`` finds this package."""
    return program("torchft_svc.compat", "-m", name, *arguments)


def peer_python() -> str | None:
    """A Python that has the public release, from the environment; None: there is none."""
    python = os.environ.get(PEER_VARIABLE)
    if not python:
        return None
    question = "import importlib.util as u; print(u.find_spec('torchft') is not None)"
    try:
        answer = subprocess.run(
            [python, "-c", question], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return None
    return python if answer.stdout.strip() == "True" else None


@contextlib.contextmanager
def root_with_package_of(checkout: Path | None) -> Iterator[Path | None]:
    """A root for children: these benchmarks, and the package of another checkout of the project.

    None for None. Both sides of a comparison so run the very same loops.
    """
    if checkout is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="torchft-before-") as folder:
        root = Path(folder)
        for name, origin in (("torchft_svc", checkout), ("tools", ROOT)):
            (root / name).symlink_to(origin.resolve() / name)
        yield root


def start_lighthouse(
    *, min_replicas: int, peer: str | None = None, root: Path = ROOT, **flags: int | str
) -> Child:
    """Start our lighthouse, or with ``peer`` (a Python) the public release's, and do not wait.

    ``flags``: others of its command line; what is not named has the default of each.
    """
    options = [f"--min-replicas={min_replicas}"]
    options += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    if peer is not None:
        return Child(program("tools.benchmarks.children.lighthouse_public", *options, python=peer))
    bind = ["--bind=127.0.0.1:0", "--log-level=error"]
    return Child(program("torchft_svc.lighthouse_server", *bind, *options), root=root)


def lighthouse_address(lighthouse: Child) -> str:
    """``host:port``, as soon as the lighthouse listens."""
    return lighthouse.read_line(START_TIMEOUT_S).rsplit(" ", 1)[-1]


def _anonymous_file() -> int:
    return os.memfd_create("stderr")
