"""Starts programs in no time: they are forked from a process that has imported what they need."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from types import TracebackType
from typing import Any

from support.fork_server import TORCH, Forked, Place, Program


class Warm(Forked):
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
        pace_s: float = 0.0,
        loaded: str = TORCH,
        drops_memory: bool = False,
        serves: str = "",
        forks_programs: bool = False,
        place: Place | None = None,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        """``preexec_fn`` is not called: what is forked ends with its streams, as these do."""
        assert command[0] == sys.executable, command
        program = Program(
            command[1:],
            dict(env),
            str(cwd),
            start_new_session,
            pace_s,
            loaded,
            drops_memory,
            serves=serves,
            forks_programs=forks_programs,
            place=place,
        )
        with contextlib.ExitStack() as given:
            theirs: list[int] = []
            self.stdin = _stream(stdin, "w", theirs, given, text=text)
            self.stdout = _stream(stdout, "r", theirs, given, text=text)
            self.stderr = _stream(stderr, "r", theirs, given, text=text)
            super().__init__(program, theirs)

    def close(self) -> None:
        """Close the streams of a program that has ended."""
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
