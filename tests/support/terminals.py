"""Runs a program in a real pseudo-terminal, whose screen an emulator draws."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence

import pyte

from support.running import ROOT, environment

END_S = 20.0


class Terminal:
    """A program, the screen that it sees, and everything that it has written."""

    def __init__(
        self, command: Sequence[str], columns: int = 80, lines: int = 24, **variables: str
    ) -> None:
        self._master, slave = pty.openpty()
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.written = bytearray()
        self.slave_before = termios.tcgetattr(slave)
        self._slave = slave
        self.resize(columns, lines)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=environment(**{"TERM": "xterm-256color", **variables}),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def read(self, for_s: float = 0.1) -> None:
        """Draw what the program writes meanwhile."""
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0:
            if select.select([self._master], [], [], left_s)[0]:
                with contextlib.suppress(OSError):
                    more = os.read(self._master, 1 << 16)
                    self.written += more
                    self._stream.feed(more)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def wait_for(self, *words: str, within_s: float = 20.0) -> str:
        """The screen, as soon as it shows all of these."""
        deadline = time.monotonic() + within_s
        while not all(word in self.text for word in words):
            assert time.monotonic() < deadline, f"no {words} in\n{self.text}"
            self.read()
        return self.text

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for_end(self) -> int:
        deadline = time.monotonic() + END_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it goes on:\n{self.text}"
            self.read(0.02)
        self.read()
        return self.process.returncode

    def is_restored(self) -> bool:
        """Whether the terminal has its modes, its first screen and its cursor again."""
        after = termios.tcgetattr(self._slave)
        enters, leaves = self.written.count(b"\x1b[?1049h"), self.written.count(b"\x1b[?1049l")
        shows_cursor = self.written.rfind(b"\x1b[?25h") > self.written.rfind(b"\x1b[?25l")
        return after == self.slave_before and enters == leaves == 1 and shows_cursor

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(END_S)
        os.close(self._master)
        os.close(self._slave)


@contextlib.contextmanager
def terminal(
    command: Sequence[str], columns: int = 80, lines: int = 24, **variables: str
) -> Iterator[Terminal]:
    made = Terminal(command, columns, lines, **variables)
    try:
        yield made
    finally:
        made.close()
