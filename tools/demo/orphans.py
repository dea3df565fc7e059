"""No process outlives the run that started it: how children are started, and those left found."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

# Inherited by every descendant, it shows which processes on the machine are ours.
MARK = "TORCHFT_DEMO_RUN"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
# Loaded here, because a child of a program with threads may not be able to.
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Make the system kill this child when the parent's starting thread ends (Linux).

    For `subprocess.Popen(preexec_fn=...)` in a program that starts its children on the main thread:
    a parent that is killed has no chance to stop them.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def processes_with(mark: str) -> dict[int, str]:
    """Living processes of this run but this one, by pid; the machine's others are not looked at."""
    found: dict[int, str] = {}
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        try:
            # A zombie's environment is empty: what is dead already is not left over.
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace").strip()
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
    return found


def end_leftovers(mark: str, grace_s: float) -> list[str]:
    """Wait ``grace_s`` for the processes of this run to go; kill those that stay, and name them."""
    deadline = time.monotonic() + grace_s
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in left.items()]
