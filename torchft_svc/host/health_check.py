"""Runs a command that has to succeed before a group or a node joins a job.

The command is the user's: one that looks at a GPU, a network card or a file system, whose faults
would otherwise cost all groups time. It runs in a session of its own, so that a command that hangs
is killed with all that it has started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable

from torchft_svc.core.limits import one_line
from torchft_svc.errors import ConfigError, HealthCheckFailed
from torchft_svc.host.process_end import ProcessEnd

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 60.0
# The end of what the command has printed, in the log.
MAX_OUTPUT_BYTES = 16_384
MAX_LINES = 50
_MAX_LINE_LENGTH = 300
# How often a caller may want to give up.
_SLICE_S = 0.2


def check_health(
    command: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    gives_up: Callable[[], bool] = lambda: False,
) -> None:
    """Run ``command``, whose words are split as by a shell; its output goes to the log.

    ``gives_up``: asked while it runs, whether the caller no longer wants it; it is killed then.

    Raises:
        HealthCheckFailed: it ended with another status than 0, or not within ``timeout_s``.
        ConfigError: it cannot be started.
    """
    words = _split(command)
    began_at = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            reason = f"it cannot be started: {error.strerror}"
            raise ConfigError("health check", command, reason) from None
        try:
            is_over = _wait(process.pid, began_at + timeout_s, gives_up)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has left behind
            status = process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
        lines = output.read().decode(errors="replace").splitlines()
    shown = [one_line(line, _MAX_LINE_LENGTH) for line in lines[-MAX_LINES:] if line.strip()]
    for line in shown:
        log.info("health check: %s", line)
    last = shown[-1] if shown else ""
    if not is_over:
        raise HealthCheckFailed(command, f"did not end within {timeout_s:g} s", last)
    if status != 0:
        raise HealthCheckFailed(command, _describe(status), last)
    log.info("health check passed in %.1f s: %s", time.monotonic() - began_at, command)


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError("health check", command, str(error)) from None
    if not words:
        raise ConfigError("health check", command, "it is empty: give a command")
    return words


def _wait(pid: int, deadline: float, gives_up: Callable[[], bool]) -> bool:
    """Whether the process ends before ``deadline``, while the caller waits for it."""
    end = ProcessEnd(pid)
    try:
        while (left_s := deadline - time.monotonic()) > 0 and not gives_up():
            if end.wait(min(left_s, _SLICE_S)):
                return True
        return end.has_ended()
    finally:
        end.close()


def _describe(status: int) -> str:
    return f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
