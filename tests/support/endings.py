"""Runs a program of scripts/endings.py as a process, and watches how it ends."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator

import psutil

from support.running import SCRIPTS, eventually, lives
from support.training import DEADLINE_S
from support.warm import Warm

PROGRAM = SCRIPTS / "endings.py"
# What is promised.
END_S = 2.0
# The interpreter's own end, with torch on a busy machine; far below the timeout of a collective,
# which would be waited for if one that was abandoned were destroyed.
EXIT_S = 30.0


class Program:
    """A running program of scripts/endings.py."""

    def __init__(self, name: str, address: str) -> None:
        command = [sys.executable, str(PROGRAM), name, address]
        self.process = Warm(command, env=os.environ, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.children: list[psutil.Process] = []

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def read_until(self, word: str) -> str:
        """The line that begins with ``word``; notes the manager's process."""
        while line := self._lines.get(timeout=DEADLINE_S):
            if line.startswith("manager"):
                self.children.append(psutil.Process(int(line.split()[1])))
            if line.startswith(word):
                return line
        raise AssertionError(f"no {word!r}: {self.errors()}")

    def errors(self) -> str:
        return self.process.stderr.read()

    def end(self, number: signal.Signals) -> float:
        """Send a signal; how many seconds until it has ended, its manager included."""
        began_at = time.monotonic()
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(DEADLINE_S)
        else:
            self.read_until("ended")
        self.check_children()
        took_s = time.monotonic() - began_at
        self.process.wait(EXIT_S)
        return took_s

    def check_children(self) -> None:
        """No manager is left."""
        assert self.children, "no manager was started"
        eventually(lambda: not any(map(lives, self.children)), DEADLINE_S, str(self.children))

    def ends(self) -> int:
        """The exit status of a program that ends by itself."""
        status = self.process.wait(DEADLINE_S)
        self.check_children()
        return status


@contextlib.contextmanager
def running(name: str, address: str) -> Iterator[Program]:
    program = Program(name, address)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.wait()
        program._reader.join()
        program.process.close()
