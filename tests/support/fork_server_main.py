"""The program of the tests' fork servers: loads torch, or the services, and forks; see
fork_server.py."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import inspect
import os
import pickle
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from support.fork_server import SERVICES, TORCH, Call, Place, Program
from support.forking_popen import FORK_SERVER, FREE_FROM, fork_programs
from tools.chaos.forked import fork_first
from tools.demo.orphans import die_with_parent
from torchft_svc.host.fork_server import serve
from torchft_svc.host.process_end import lives

# Where this program finds its own modules; what it forks need not.
OURS = os.environ["PYTHONPATH"].split(os.pathsep)
_LOOK_S = 0.001
# Of <sched.h>.
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000


def load_torch() -> None:
    """All that torch loads at its first use, which takes seconds; starts no thread."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import torchft_svc.elastic.run
    import torchft_svc.manager_server.process
    import torchft_svc.preload  # noqa: F401

    if not torch.cuda.is_available():  # where it is, a step asks CUDA, which no fork could use then
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.zeros(1)
        torch.optim.Adam([weight]).step()
    # torch's launcher asks for its stack, and Python would look into every module for the ones that
    # these frames belong to, each time again: it takes seconds.
    inspect.modulesbyfile.update({"<frozen runpy>": "runpy", __file__: "runpy"})  # type: ignore[attr-defined]


def load_services() -> None:
    """All that a lighthouse or a manager imports; starts no thread."""
    import torchft_svc.lighthouse_server.cli
    import torchft_svc.manager_server.cli  # noqa: F401


LOADS = {TORCH: load_torch, SERVICES: load_services}


def call(asked: Call) -> None:
    """Run a call as a process like one that was started by itself."""
    import torch

    die_with_parent()
    output = os.open(asked.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target in (1, 2):
        os.dup2(output, target)
    os.environ.update(asked.variables)
    torch.set_num_threads(1)
    if asked.serves:
        fork_first(asked.serves)
    asked.run(*asked.arguments)
    leave(0)


def become(asked: Program, descriptors: Sequence[int]) -> list[str]:
    """Prepare what the interpreter would have; return the arguments, without its own."""
    take_over(descriptors, (0, 1, 2, *asked.passed) if asked.passed else range(len(descriptors)))
    if asked.parent_pid:
        leave_to(asked.parent_pid)
    if asked.place is not None:
        move_to(asked.place)
    show_command_line([sys.executable, *asked.arguments])
    os.environ.clear()
    os.environ.update(asked.environment)
    os.chdir(asked.folder)
    if asked.leads_session:
        os.setsid()
    if asked.parent_pid:
        report_id()
    arguments = list(asked.arguments)
    if arguments[0] == "-u" or "PYTHONUNBUFFERED" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if arguments[0] == "-u":
        del arguments[0]
    if arguments[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        del arguments[:2]
    is_module = arguments[0] == "-m"
    sys.argv[:] = arguments[is_module:]
    first = os.getcwd() if is_module else str(Path(arguments[0]).parent.resolve())
    here = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *filter(None, here), *(each for each in sys.path[1:] if each not in OURS)]
    return arguments


def show_command_line(words: Sequence[str]) -> None:
    """Let others see this command line, as far as it fits, instead of the fork server's."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:  # not Linux
        return
    begin, end = map(int, stat.rpartition(")")[2].split()[45:47])
    room = end - begin - 1
    line = "\0".join(words).encode()[:room]
    ctypes.memmove(begin, line.ljust(room, b"\0"), room)


def take_over(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each descriptor its number, whatever the others have."""
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, FREE_FROM) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def leave_to(parent_pid: int) -> None:
    """Continue as a child of process ``parent_pid``."""
    if os.fork():
        os._exit(0)
    while os.getppid() != parent_pid:
        if not lives(parent_pid):
            os._exit(1)
        time.sleep(_LOOK_S)


def move_to(place: Place) -> None:
    """Enter a place as `ip netns exec` and `unshare --uts` do, which start another program then."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{place.namespace}") as namespace:
        failed = libc.setns(namespace.fileno(), _CLONE_NEWNET)
    if failed or libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "no namespaces")
    subprocess.run(place.prepare, check=True)


def report_id() -> None:
    """Write the process id to the input, which is empty from now on."""
    os.write(0, b"%d" % os.getpid())
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)


def pace(seconds: float) -> None:
    """Leave the processors to others in each step of training."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: time.sleep(seconds))


def leave(status: int) -> None:
    """End as the interpreter does, up to the point where it would free what was imported."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins all threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def run(arguments: Sequence[str]) -> None:
    """Run a script or ``-m MODULE`` in this process, as its main program."""
    if arguments[0] == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        globals()["__file__"] = arguments[0]
        exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), globals())  # noqa: S102


def status_of(arguments: Sequence[str]) -> int:
    """Run a program; its exit status (negative: the signal), with the output of the interpreter."""
    try:
        run(arguments)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    LOADS[sys.argv[3]]()
    _fork = serve(*map(int, sys.argv[1:3]))
    if _fork is not None:
        for _number, _handler in _fork.handlers.items():
            signal.signal(_number, _handler)
        random.seed()
        _asked = pickle.loads(_fork.request)  # noqa: S301 - from the tests themselves
        if isinstance(_asked, Call):
            call(_asked)
        else:
            _arguments = become(_asked, _fork.descriptors)
            if _asked.forks_programs:
                # The child that forks them must not look like one of them.
                show_command_line([sys.executable, "-m", FORK_SERVER])
                fork_programs()
                show_command_line([sys.executable, *_asked.arguments])
            if _asked.serves:
                fork_first(_asked.serves)
            if _asked.pace_s:
                pace(_asked.pace_s)
            if _asked.drops_memory:
                leave(status_of(_arguments))
            run(_arguments)
