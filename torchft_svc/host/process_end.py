"""The end of another process: how to notice it, and how to end together with it.

As a program (``python -I -S process_end.py <pid of the parent> command ...``) this file becomes a
command that ends with its parent: the kernel keeps the request over ``exec``, and so the process
id, too. It imports nothing of this package, because it runs once for each command that is started.

Of a Python command only itself is ended: what it has started (DataLoader workers) watches it.
Another command, such as a shell script around the program, is ended with its process group.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
# How often a process is looked at where the system (Linux before 5.3, macOS) has no descriptors.
POLL_S = 0.1
# When a parent is killed, its children may be seen to end before itself.
_SETTLE_S = 0.5
_PF_EXITING = 0x4  # of Linux' task flags


def lives(pid: int) -> bool:
    """Whether process ``pid`` has not ended, or was not waited for yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives, as somebody else
    return True


class ProcessEnd:
    """Notices the end of process ``pid``, which need not be a child.

    ``descriptor`` is readable once the process has ended. If it is None, the process has ended
    already, or the system has no such descriptors: call `has_ended` every `POLL_S` seconds.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self.descriptor = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Whether the process has ended, also if nobody has waited for it yet."""
        return self.wait(0.0)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait up to ``timeout_s`` for the end of the process; return whether it has ended."""
        if self.descriptor is not None:
            poll = select.poll()  # `select` refuses descriptors above 1023, which trainers have
            poll.register(self.descriptor, select.POLLIN)
            is_limited = timeout_s < math.inf
            return bool(poll.poll(math.ceil(1000 * timeout_s) if is_limited else None))
        deadline = time.monotonic() + timeout_s
        while lives(self.pid):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(left_s, POLL_S))
        return True

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def end_with(parent_pid: int) -> None:
    """Kill this process when process ``parent_pid`` ends, or now if it has ended.

    The kernel watches the thread that started this process, so a parent starts its children from
    the thread that waits for them.
    """
    if sys.platform == "linux":
        import ctypes  # late: most users of this module start faster without it

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent_pid:
            return
    # It has ended, a fork server stands between (or this is no Linux, and somebody has to watch).
    if not lives(parent_pid):
        os.kill(os.getpid(), signal.SIGKILL)
    name = "torchft-parent-death"
    threading.Thread(target=_die_after, args=(parent_pid,), name=name, daemon=True).start()


def _die_after(pid: int) -> None:
    ProcessEnd(pid).wait()
    os.kill(os.getpid(), signal.SIGKILL)


# -- the program -----------------------------------------------------------------------------------


def _has_begun_to_end(pid: int) -> bool:
    """Whether the main thread of process ``pid`` is ending. The kernel ends what that has started
    at once, and the process only when all its threads have ended and its memory is freed."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *numbers = file.read().rpartition(")")[2].split()
    except OSError:
        return False  # who waits for its end knows more
    return state in "ZX" or bool(int(numbers[5]) & _PF_EXITING)


def _guard_group(parent_pid: int) -> None:
    """Fork a process, nobody's child, that kills the process group of this one with the parent."""
    group = os.getpid()
    if os.getpgrp() != group or not hasattr(os, "pidfd_open"):
        return
    parent, leader = os.pidfd_open(parent_pid), os.pidfd_open(group)
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        return
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # whoever reads the command's streams would wait for this process, too
        os.dup2(null, stream)
    select.select([parent, leader], [], [])
    if _has_begun_to_end(parent_pid) or select.select([parent], [], [], _SETTLE_S)[0]:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux" and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.platform == "linux":  # elsewhere a thread would not live on in the command
        end_with(parent_pid)
        if command[0] != sys.executable:
            _guard_group(parent_pid)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
