"""Ends a worker together with its agent: for functions a call, for commands a program before them.

As a program (``python -I -S parent_death.py <pid of the agent> command ...``) it becomes the
command: the kernel keeps the wish over ``exec``, and so the process id, too. It imports nothing of
this package, because it runs once for each worker that is started.

Of a Python worker only itself is ended: what it has started (DataLoader workers) watches it.
Another command, such as a shell script around the program, is ended with its process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5  # where the system has no process descriptors
# When an agent is killed, its workers may be seen to end before itself.
_SETTLE_S = 0.5
_PF_EXITING = 0x4  # of Linux' task flags


def end_with(agent_pid: int) -> None:
    """From now on SIGKILL follows the end of process ``agent_pid``; at once, if it has ended.

    The kernel looks at the thread that started this process, so the agent starts its workers from
    the one that waits for them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == agent_pid:
            return
    # It has ended, a fork server stands between (or this is no Linux, and somebody has to watch).
    if not lives(agent_pid):
        os.kill(os.getpid(), signal.SIGKILL)
    name = "torchft-parent-death"
    threading.Thread(target=_watch, args=(agent_pid,), name=name, daemon=True).start()


def lives(pid: int) -> bool:
    """Whether process ``pid`` has not ended, or was not waited for yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives, as somebody else
    return True


def _watch(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        pause = threading.Event()
        while lives(pid):
            pause.wait(_POLL_S)
    else:
        select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _has_begun_to_end(pid: int) -> bool:
    """Whether the main thread of process ``pid`` is ending. The kernel ends what that has started
    at once, and the process only when all its threads have ended and its memory is freed."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *numbers = file.read().rpartition(")")[2].split()
    except OSError:
        return False  # who waits for its end knows more
    return state in "ZX" or bool(int(numbers[5]) & _PF_EXITING)


def _guard_group(agent_pid: int) -> None:
    """Let a process that is nobody's child kill the process group of this one with the agent."""
    group = os.getpid()
    if os.getpgrp() != group or not hasattr(os, "pidfd_open"):
        return
    agent, leader = os.pidfd_open(agent_pid), os.pidfd_open(group)
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        return
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # whoever reads the worker's streams would wait for this process, too
        os.dup2(null, stream)
    select.select([agent, leader], [], [])
    if _has_begun_to_end(agent_pid) or select.select([agent], [], [], _SETTLE_S)[0]:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    agent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux" and os.getppid() != agent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.platform == "linux":  # elsewhere a thread would not live on in the command
        end_with(agent_pid)
        if command[0] != sys.executable:
            _guard_group(agent_pid)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
