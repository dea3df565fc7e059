"""Runs programs for the tests: their lines can be waited for, and they end with the test."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.fork_server import Place
from support.running import ROOT, end_tree
from support.warm import Warm

DEADLINE_S = 60.0


class Program:
    """A process that leads its own session, its output read line by line; a context manager."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        warm: bool = False,
        pace_s: float = 0.0,
        serves: str = "",
        forks_programs: bool = False,
        place: Place | None = None,
        folder: Path = ROOT,
    ) -> None:
        """``warm``: it has imported torch before it is started. Such a program may be slowed down:
        it sleeps ``pace_s`` in each step of its optimizer, and so do all that train with it.
        ``forks_programs``: the workers or the manager that it starts have, too.
        ``place``: where a warm program runs, if not here. ``folder``: its working directory.
        """
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        how: Any = (
            functools.partial(
                Warm,
                pace_s=pace_s,
                drops_memory=True,
                serves=serves,
                forks_programs=forks_programs,
                place=place,
            )
            if warm
            else subprocess.Popen
        )
        self._process: Any = how(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
            | dict(environment or {}),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="program-output")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        for line in self._process.stdout:
            self._new.put(line.rstrip("\n"))
        self._new.put(None)

    def wait_for(self, text: str, deadline_s: float = DEADLINE_S) -> str:
        """The first line with ``text`` in it, among those already there and those to come."""
        return self.wait_until(lambda line: text in line, text, deadline_s)

    def wait_until(
        self, holds: Callable[[str], bool], what: str, deadline_s: float = DEADLINE_S
    ) -> str:
        """The first line for which ``holds``, among those already there and those to come."""
        for line in self.lines:
            if holds(line):
                return line
        deadline = time.monotonic() + deadline_s
        while True:
            line = self._next_line(deadline, what)
            if holds(line):
                return line

    def _next_line(self, deadline: float, text: str) -> str:
        seen = "\n".join(self.lines)
        try:
            line = self._new.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"{text!r} did not come in time after:\n{seen}") from None
        if line is None:
            self._new.put(None)
            raise AssertionError(f"the program ended without {text!r}:\n{seen}")
        self.lines.append(line)
        return line

    def poll(self) -> int | None:
        """The program's exit status, if it has ended."""
        status: int | None = self._process.poll()
        return status

    def read_so_far(self) -> list[str]:
        """The program's lines until now."""
        with contextlib.suppress(queue.Empty):
            while (line := self._new.get_nowait()) is not None:
                self.lines.append(line)
            self._new.put(None)
        return self.lines

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit status; all its output is in ``lines`` then."""
        status = self._process.wait(deadline_s)
        self._reader.join(deadline_s)
        while (line := self._new.get_nowait()) is not None:
            self.lines.append(line)
        self._new.put(None)
        return status

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        end_tree(self._process)
        self._reader.join()
        self._process.stdout.close()
