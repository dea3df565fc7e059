"""The program of the tests' fork servers: loads torch, or the services, and forks; see
fork_server.py."""

from __future__ import annotations

import atexit
import inspect
import os
import pickle
import random
import runpy
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from support.fork_server import SERVICES, TORCH, Call, Program
from tools.chaos.forked import fork_first
from tools.demo.orphans import die_with_parent
from torchft_svc.host.fork_server import serve
from torchft_svc.host.process_end import lives

# Where this program finds its own modules; what it forks need not.
OURS = os.environ["PYTHONPATH"].split(os.pathsep)
_LOOK_S = 0.001


def load_torch() -> None:
    """All that torch loads at its first use, which takes seconds; starts no thread."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import torchft_svc.elastic.run
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
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if asked.parent_pid:
        be_adopted(asked.parent_pid)
    os.environ.clear()
    os.environ.update(asked.environment)
    os.chdir(asked.folder)
    if asked.leads_session:
        os.setsid()
    if "PYTHONUNBUFFERED" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    arguments = list(asked.arguments)
    if arguments[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        del arguments[:2]
    is_module = arguments[0] == "-m"
    sys.argv[:] = arguments[is_module:]
    first = os.getcwd() if is_module else str(Path(arguments[0]).parent.resolve())
    here = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *filter(None, here), *(each for each in sys.path[1:] if each not in OURS)]
    return arguments


def be_adopted(parent_pid: int) -> None:
    """Continue as a child of process ``parent_pid``, without an input."""
    if os.fork():
        os._exit(0)
    while os.getppid() != parent_pid:
        if not lives(parent_pid):
            os._exit(1)
        time.sleep(_LOOK_S)
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
    os._exit(status)


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
            if _asked.serves:
                fork_first(_asked.serves)
            if _asked.pace_s:
                pace(_asked.pace_s)
            try:
                if _arguments[0] == "-m":
                    runpy.run_module(_arguments[1], run_name="__main__", alter_sys=True)
                else:
                    __file__ = _arguments[0]
                    exec(compile(Path(__file__).read_bytes(), __file__, "exec"))  # noqa: S102
            except SystemExit as _error:
                if _asked.drops_memory and isinstance(_error.code, int | None):
                    leave(_error.code or 0)
                raise
            if _asked.drops_memory:
                leave(0)
