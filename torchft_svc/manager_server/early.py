"""Starts the process of a trainer's manager, also before its settings are known (rule M1)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from torchft_svc.env import Environment, for_child
from torchft_svc.host.clean_start import module_command
from torchft_svc.manager_server.liveness_pipe import LivenessPipe
from torchft_svc.rpc.security import Security, resolve_security

log = logging.getLogger(__name__)

# The program; see there for its arguments.
SIDECAR = "torchft_svc.manager_server.sidecar"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A process of `SIDECAR`, and the pipe on which it shows that it runs."""

    process: subprocess.Popen[bytes]
    signs: LivenessPipe

    @classmethod
    def start(cls, security: Security, settings: Mapping[str, object] | None) -> Sidecar:
        """Start the process; ``settings``: see `SIDECAR`; None: they come with `send_settings`."""
        argument = json.dumps({"owner_pid": os.getpid(), **(settings or {})})
        reading, writing = os.pipe()
        with contextlib.ExitStack() as undo:
            signs = undo.enter_context(contextlib.closing(LivenessPipe(reading)))
            try:
                process = subprocess.Popen(
                    module_command(SIDECAR, 1, argument, str(writing)),
                    stdin=subprocess.PIPE if settings is None else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    pass_fds=(writing,),
                    # Everybody can read a command line; an environment, only its user.
                    env=for_child(security.variables()),
                )
            finally:
                os.close(writing)
            undo.pop_all()
        return cls(process, signs)

    def send_settings(self, settings: Mapping[str, object]) -> bool:
        """Send the settings that the process waits for; False: it has ended."""
        assert self.process.stdin is not None
        try:
            with self.process.stdin as pipe:
                pipe.write(json.dumps(settings).encode() + b"\n")
        except BrokenPipeError:
            return False
        return True

    def kill(self) -> None:
        """Kill the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        self.signs.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sidecar without settings; only the process ``owner_pid`` may use it, not a fork of that."""

    sidecar: Sidecar
    security: Security
    owner_pid: int


class WaitingManager:
    """At most one process that waits for its settings. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: _Waiting | None = None

    def start(self, security: Security) -> None:
        """Start a process that waits, unless there is one."""
        with self._lock:
            if self._waiting is None or self._waiting.owner_pid != os.getpid():
                self._waiting = _Waiting(Sidecar.start(security, None), security, os.getpid())

    @property
    def is_there(self) -> bool:
        """Whether a process waits; one that has ended is removed."""
        with self._lock:
            waiting = self._waiting
        if waiting is None or waiting.owner_pid != os.getpid():
            return False
        if waiting.sidecar.process.poll() is None:
            return True
        self.kill_process()
        return False

    def kill_process(self) -> None:
        """Kill the process that waits, if there is one."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.owner_pid == os.getpid():
            waiting.sidecar.kill()

    def use_process(self, security: Security, settings: Mapping[str, object]) -> Sidecar | None:
        """Send ``settings`` to the process that waits, and return it; None: none can be used."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is None or waiting.owner_pid != os.getpid():
            return None
        if waiting.security == security and waiting.sidecar.send_settings(settings):
            return waiting.sidecar
        log.debug("the manager that waits cannot be used, another one is started")
        waiting.sidecar.kill()
        return None


# The manager that this process has started early.
EARLY = WaitingManager()


def start_manager_early() -> None:
    """Start the process of this trainer's manager now; the first `Manager` uses it.

    Call it before ``import torch``: the process needs 0.2 s to import what it needs, and does so
    while torch is imported. It takes its environment, and whether TLS and a token are set, from the
    environment of this moment; a `Manager` with another ``security`` does not use it. It ends with
    this process. Does nothing on workers that start no manager: those whose ``RANK`` is not 0, and
    where ``TORCHFT_MANAGER_ADDR`` is set.

    Raises:
        ConfigError: a variable is invalid.
    """
    environment = Environment()
    if environment.manager_address is None and environment.group_rank in (None, 0):
        EARLY.start(resolve_security(environment))
