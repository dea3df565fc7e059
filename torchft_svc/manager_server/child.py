"""Starts a manager as a child process: the sidecar of a trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import subprocess
import time
from collections.abc import Callable

from torchft_svc.env import Environment
from torchft_svc.errors import DeadlineExceeded, Unreachable
from torchft_svc.host.clean_start import FAILED, ended_how
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.early import EARLY, Sidecar, WaitingManager
from torchft_svc.manager_server.parent_watch import STOP_SIGNAL

log = logging.getLogger(__name__)

# How long a manager has to leave the lighthouse after `STOP_SIGNAL` before it is killed.
STOP_TIMEOUT_S = 1.5
_READY = "manager listening on "


class ManagerProcess:
    """A child that is a manager for this process; `await_ready` waits until it serves. It is the
    process of ``waiting``, if there is one.

    It ends by itself when this process dies; leaving the block stops it. ``address`` is empty until
    it serves.
    """

    def __init__(self, config: ManagerConfig, waiting: WaitingManager = EARLY) -> None:
        self.address = ""
        self._bind = config.bind
        security, settings = config.security, _settings(config)
        sidecar = waiting.use_process(security, settings) or Sidecar.start(security, settings)
        self._process, self._signs = sidecar.process, sidecar.signs

    @classmethod
    def start(
        cls, config: ManagerConfig, timeout_s: float = 30.0, waiting: WaitingManager = EARLY
    ) -> ManagerProcess:
        """Start a manager, and wait until it serves, see `await_ready`."""
        child = cls(config, waiting)
        child.await_ready(timeout_s)
        return child

    def await_ready(self, timeout_s: float) -> None:
        """Wait until the manager serves; if it does not, it is ended.

        Raises:
            Unreachable: the child ended; with the last line of its error.
            DeadlineExceeded: it does not serve within ``timeout_s`` seconds.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            undo.callback(self._process.kill)
            self.address = _read_address(self._process, self._bind, timeout_s)
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, on_poll: Callable[[], None]) -> int:
        """Wait for the end of the process, and return its exit status.

        A process that gives no sign of life is killed. ``on_poll`` is called about once a second.
        """

        def has_ended() -> bool:
            on_poll()
            return self.poll() is not None

        if self._signs.await_silence(has_ended):
            log.error("the manager, process %d, gives no sign of life: it is killed", self.pid)
            self._process.kill()
        return self._process.wait()

    def stop(self) -> None:
        """Let the manager leave the lighthouse, and wait for its end; may be called twice."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(STOP_SIGNAL)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Stop the manager, and release everything; not while another thread is in `wait`."""
        self.stop()
        self._signs.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> ManagerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settings(config: ManagerConfig) -> dict[str, object]:
    # What it logs at "info", the trainer logs as well.
    log_level = Environment().log_level
    if log_level in (None, "info"):
        log_level = "warning"
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in ("security", "resumed", "owner_pid")
    }
    resumed = dataclasses.asdict(config.resumed) if config.resumed else None
    return {**fields, "resumed": resumed, "log_level": str(log_level)}


def _read_address(process: subprocess.Popen[bytes], bind: str, timeout_s: float) -> str:
    """The address on the child's first line, which it prints once it serves."""
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    with process.stdout as out, selectors.DefaultSelector() as selector:
        selector.register(out, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise DeadlineExceeded("starting the manager", timeout_s)
            more = os.read(out.fileno(), 4096)
            if not more:
                status = process.wait()
                raise Unreachable("manager", bind, f"at its start, its process {ended_how(status)}")
            line += more
    text = line.decode(errors="replace").strip()
    if text.startswith(FAILED):
        with contextlib.suppress(subprocess.TimeoutExpired):  # it writes the whole to stderr
            process.wait(STOP_TIMEOUT_S)
        raise Unreachable("manager", bind, f"its process failed: {text.removeprefix(FAILED)}")
    return text.removeprefix(_READY)
