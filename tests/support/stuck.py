"""Pipes that nobody reads, as the output of programs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class StuckPipe:
    """A pipe that is full: who writes to ``writing`` blocks until `read` is called."""

    reading: int
    writing: int
    num_filled: int

    def read(self, until: str) -> str:
        """What programs have written, up to ``until``, which is waited for."""
        self.skip_filling()
        text = b""
        while until.encode() not in text:
            more = os.read(self.reading, 1 << 16)
            assert more, f"no {until!r} in {text.decode()}"
            text += more
        return text.decode()

    def read_rest(self) -> str:
        """What was written, until all that write have closed it."""
        os.close(self.writing)
        self.writing = -1
        self.skip_filling()
        text = b""
        while more := os.read(self.reading, 1 << 16):
            text += more
        return text.decode()

    def skip_filling(self) -> None:
        """Read what has filled the pipe: from now on it has room."""
        while self.num_filled:
            self.num_filled -= len(os.read(self.reading, min(1 << 16, self.num_filled)))


@contextlib.contextmanager
def stuck_pipe() -> Iterator[StuckPipe]:
    reading, writing = os.pipe()
    pipe = StuckPipe(reading, writing, 0)
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            pipe.num_filled += os.write(writing, b"\n" * 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            pipe.num_filled += os.write(writing, b"\n")
    os.set_blocking(writing, True)
    try:
        yield pipe
    finally:
        for descriptor in (pipe.reading, pipe.writing):
            if descriptor >= 0:
                os.close(descriptor)
