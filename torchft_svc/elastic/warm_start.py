"""Starts workers by forking a process that has imported what they need: ``--warm-start``.

`WarmStart` is the agent's side. The other side is this file as a program: it imports the modules of
the preload list and forks for each request; the fork becomes the script or module that is asked
for, with its arguments, environment, streams, folder and session, like an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import runpy
import signal
import sys
import types
import zipfile
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from torchft_svc import env
from torchft_svc.elastic.fork_check import why_not_forked
from torchft_svc.errors import ConfigError, PeerError
from torchft_svc.host.fork_server import MAX_REQUEST, ForkServer, refuse, serve
from torchft_svc.host.process_end import end_with
from torchft_svc.host.worker_process import ForkedProcess

log = logging.getLogger(__name__)

DEFAULT_PRELOAD = ("torch", "torch._dynamo")  # the first optimizer imports the second one
# Then an interpreter adds no folder to where it looks for modules (since Python 3.11).
_IS_PATH_SAFE = getattr(sys.flags, "safe_path", False)
# What a seed of numpy may be.
_SEED_BYTES = 16


def preload_list(text: str) -> tuple[str, ...]:
    """The modules of ``torch,my.module``.

    Raises:
        ConfigError: one of them is no name of a module.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError("--warm-start-preload", name, "give names of modules, with commas")
    return names


def check_command(entrypoint: object, args: Sequence[object]) -> None:
    """Raise `ConfigError` unless ``entrypoint`` runs a Python script or module in this Python."""
    if entrypoint != sys.executable or _program([str(arg) for arg in args]) is None:
        reason = "it starts Python scripts and modules only, by the Python of the launcher"
        raise ConfigError("--warm-start", entrypoint, reason)


class WarmStart:
    """The fork server of an agent; all calls come from the thread that starts its workers.

    ``command``: what the workers run; ``preload``: the modules that the server imports.
    """

    def __init__(self, command: Sequence[str], preload: Sequence[str]) -> None:
        program = _program(command[1:])
        assert program is not None, "see check_command"
        self._server = ForkServer(
            __name__,
            "warm workers",
            json.dumps([_first_path(*program[:2]), *preload]),
            environment=env.for_child({"PYTHONUNBUFFERED": "1"}),
        )
        self._server.start()
        self._is_off = False  # for good: another server would import the same modules

    def fork(
        self, command: Sequence[str], environment: dict[str, str], streams: Sequence[int]
    ) -> ForkedProcess | None:
        """Fork a process that runs ``command`` like a new one, with the three ``streams``.

        Returns None if this cannot be done now, for instance while the server still imports.
        """
        program = _program(command[1:])
        if program is None:
            return None
        is_module, name, arguments = program
        request = json.dumps(
            {
                "is_module": is_module,
                "name": name,
                "arguments": arguments,
                "command": list(command),
                "environment": environment,
                "folder": os.getcwd(),
            }
        ).encode()
        if len(request) > MAX_REQUEST:
            log.warning("no warm start: arguments and environment are too long")
            return None
        if self._is_off:
            return None
        try:
            if not self._server.is_ready(0.0):
                return None
            return ForkedProcess(self._server.fork(request, *streams), self._server)
        except PeerError as error:
            if self._server.refusal:
                self._is_off = True
                log.warning("warm start is off, workers are started cold: %s", self._server.refusal)
                return None
            log.warning("no warm start: %s", error)
            with contextlib.suppress(OSError):
                self._server.start()  # for the next worker
            return None

    def close(self) -> None:
        """End the server, also while it imports, and the workers with it."""
        self._server.close(0.0)


def _program(words: Sequence[str]) -> tuple[bool, str, list[str]] | None:
    """Whether these arguments of an interpreter name a module, its name or the script, and its own
    arguments; None: it is neither."""
    rest = list(words)
    if rest[:1] == ["-u"]:
        del rest[0]
    is_module = rest[:1] == ["-m"]
    if is_module:
        del rest[0]
    if not rest or rest[0].startswith("-"):
        return None
    name = rest.pop(0)
    # A folder or an archive is run by its __main__.py.
    is_script = os.path.isfile(name) and not zipfile.is_zipfile(name)
    return (is_module, name, rest) if is_module or is_script else None


def _first_path(is_module: bool, name: str) -> str:
    """The folder in which an interpreter looks first for modules."""
    return os.getcwd() if is_module else str(Path(name).resolve().parent)


# -- the server's side ---------------------------------------------------------------------------


def main(descriptor: str, owner_pid: str, modules: str) -> None:
    """Import, and fork; in a fork, return when its program has ended."""
    end_with(int(owner_pid))
    first_path, *preload = json.loads(modules)
    if not _IS_PATH_SAFE:
        sys.path.insert(0, first_path)
    # Modules often ask whether there is a device. torch answers that through CUDA, which would not
    # work in any fork then, unless this asks it to ask the driver's own library.
    env.set_default("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in preload:
        _load(name)
    if reason := why_not_forked():
        refuse(int(descriptor), reason)
        return
    fork = serve(int(descriptor), int(owner_pid))
    if fork is None:
        return
    fork.lead_session(signal.SIGINT, signal.SIGTERM)
    asked = json.loads(fork.request)
    for target, source in enumerate(fork.descriptors):
        os.dup2(source, target)
        os.close(source)
    env.replace(asked["environment"])
    os.chdir(asked["folder"])
    _draw_seeds()
    _run(asked)


def _load(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - the worker that imports it reports the same
        print(f"warm start: {name} cannot be preloaded: {error!r}", file=sys.stderr)


def _draw_seeds() -> None:
    """Draw the seeds of numpy and torch anew, as in new processes.

    Python's own generator does so after each fork.
    """
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy is not None:
        numpy.seed(list(os.urandom(_SEED_BYTES)))
    if torch is not None:
        torch.default_generator.seed()


def _run(asked: dict[str, Any]) -> None:
    """Run a program as ``python script`` or ``python -m module`` does."""
    name, is_module = asked["name"], asked["is_module"]
    sys.orig_argv[:] = asked["command"]
    sys.argv[:] = [name, *asked["arguments"]]
    if not _IS_PATH_SAFE:
        sys.path[0] = _first_path(is_module, name)
    main_module: Any = types.ModuleType("__main__")
    main_module.__builtins__ = __builtins__
    sys.modules["__main__"] = main_module
    if is_module:
        run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        _call(lambda: run_as_main(name))
    else:
        _call(lambda: _run_script(name, main_module))


def _run_script(name: str, main_module: Any) -> None:
    path = os.path.abspath(name)
    main_module.__file__, main_module.__cached__ = path, None
    main_module.__loader__ = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, main_module.__dict__)  # noqa: S102 - the user's program


def _call(program: Callable[[], object]) -> None:
    """Call ``program``; an exception ends the process as an interpreter does, without a line about
    this file."""
    try:
        program()
    except Exception as error:  # noqa: BLE001
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, _RUNPY):
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


_RUNPY = runpy.__spec__.origin if runpy.__spec__ is not None else ""

if __name__ == "__main__":
    main(*sys.argv[1:])
