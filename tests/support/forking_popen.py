"""Forks the Python programs that a process starts: they need not import what was imported before.

Such a program is a child of the process and runs from its arguments to its end, as if it were
started. What is no Python program, or has more streams than a fork gets, is started.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from subprocess import Popen
from typing import Any

from support.adopted import adopt
from support.fork_server import TORCH, Program
from tools.chaos.forked import fork_first
from torchft_svc.host.process_end import lives

FORK_SERVER = "support.fork_server_main"
# Descriptors get their numbers from others that are not below this.
FREE_FROM = 200
_DEFAULTS = {"gid": (None,), "gids": (None,), "uid": (None,), "umask": (-1,)}
_DEFAULTS |= {"process_group": (-1,), "preexec_fn": (None,), "shell": (False,)}


def fork_programs() -> None:
    """Fork the programs that this process, which has no other thread yet, starts from now on."""
    child_pid, owner_pid = fork_first(FORK_SERVER), os.getpid()
    start = Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(start)

    def execute_child(self: Popen[Any], *arguments: Any) -> None:
        asked = signature.bind(self, *arguments).arguments
        # The fork server is no descendant of a fork of this process, which could adopt nothing.
        program = _program(asked) if os.getpid() == owner_pid and lives(child_pid) else None
        if program is None:
            start(self, *arguments)
            return
        streams = [
            default if asked[name] == -1 else asked[name]
            for name, default in (("c2pwrite", 1), ("errwrite", 2))
        ]
        self.pid = adopt(TORCH, program, *streams, *asked["pass_fds"])
        self._child_created = True  # type: ignore[attr-defined]
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[end] for end in ends))  # type: ignore[attr-defined]

    Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _program(asked: Mapping[str, Any]) -> Program | None:
    """What a fork has to run; None: it cannot do what is ``asked`` of `Popen`."""
    words = _words(asked["args"])
    environment = dict(os.environ if asked["env"] is None else asked["env"])
    if (
        sys.platform != "linux"
        or words is None
        or asked["executable"] not in (None, sys.executable)
        or any(asked[name] not in usual for name, usual in _DEFAULTS.items() if name in asked)
        or asked["p2cwrite"] != -1
        or len(asked["pass_fds"]) > 1
        or any(number >= FREE_FROM for number in asked["pass_fds"])
        or "LD_PRELOAD" in environment  # only the start of a program looks at it
    ):
        return None
    return Program(
        words,
        environment,
        str(asked["cwd"] or os.getcwd()),
        leads_session=asked["start_new_session"],
        drops_memory=True,
        parent_pid=os.getpid(),
        passed=tuple(asked["pass_fds"]),
    )


def _words(arguments: Any) -> list[str] | None:
    """What follows the interpreter on the command line of a script or module; None: of others."""
    if isinstance(arguments, str | bytes | os.PathLike) or not isinstance(arguments, Sequence):
        return None
    interpreter, *words = map(os.fsdecode, arguments)
    if interpreter != sys.executable or not words:
        return None
    rest = words[1:] if words[0] == "-u" else words
    is_program = rest[:1] == ["-m"] or (bool(rest) and os.path.isfile(rest[0]))
    return words if is_program else None
