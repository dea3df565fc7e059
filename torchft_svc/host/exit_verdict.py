"""The exit status by which a scheduler knows whether a restart may help.

A program ends with `DO_NOT_REQUEUE` (NVIDIA's NVRx uses the same number), or with what the
environment names instead, because of an uncaught error that a restart cannot mend: one that is
``is_final`` (see `torchft_svc.errors`), or the same error at the same place and step as before the
last restart.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torchft_svc import env
from torchft_svc.errors import CheckpointError, ConfigError, PeerError, WorkerFailed
from torchft_svc.host.progress_file import ProgressFile, open_progress

DO_NOT_REQUEUE = 93
# torch has no class of its own for what gloo reports.
_COLLECTIVE = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def do_not_requeue_exit_code() -> int:
    """Return the status that the environment names, or the default.

    Raises:
        ConfigError: what it names is no exit status of an error.
    """
    return env.Environment().do_not_requeue_exit_code or DO_NOT_REQUEUE


def final_exit_code() -> int:
    """Return `do_not_requeue_exit_code`; the default, too, if the variable itself cannot work."""
    try:
        return do_not_requeue_exit_code()
    except ConfigError:
        return DO_NOT_REQUEUE


def is_final(error: BaseException) -> bool:
    """Whether a restart of the program that ends with ``error`` cannot mend it.

    An error of the program itself may say so, too, by an attribute ``is_final``.
    """
    cause = error.__cause__
    if isinstance(cause, WorkerFailed) and cause.is_final:  # `Trainer` raises the user's error
        return True
    return bool(getattr(error, "is_final", False))


def is_peers_error(error: BaseException) -> bool:
    """Whether a peer may have caused ``error``, so that the program that raises it may be sound."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, getattr(distributed, "DistError", ())):
        return True
    if isinstance(error, PeerError):
        return not isinstance(error, CheckpointError)
    message: Any = error.args[0] if error.args else ""
    return type(error) is RuntimeError and _COLLECTIVE.search(str(message)) is not None


def give_verdicts() -> None:
    """Let uncaught errors of this program decide its exit status, if the environment asks for that.

    It does with ``TORCHFT_DO_NOT_REQUEUE_EXIT_CODE``, which `torchft-run` sets for its workers.
    Then `sys.excepthook` prints the error as before, and a final one ends the program with that
    status, after its clean-up. Nothing else changes: an error that the program catches, and an
    exit status that it chooses itself, stay as they are.

    Raises:
        ConfigError: a variable cannot work.
    """
    environment = env.Environment()
    progress = open_progress(environment.progress_file)
    code = environment.do_not_requeue_exit_code
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    if code is not None and not is_interactive and not isinstance(sys.excepthook, _VerdictHook):
        sys.excepthook = _VerdictHook(sys.excepthook, code, progress)


class _VerdictHook:
    """Calls the hook ``before``, and raises `SystemExit` with ``code`` where a restart is vain."""

    def __init__(self, before: Hook, code: int, progress: ProgressFile) -> None:
        self._before = before
        self._code = code
        self._progress = progress
        self._pid = os.getpid()

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._before(kind, error, trace)
        if os.getpid() != self._pid or not isinstance(error, Exception):
            return
        if is_final(error):
            sentence = "a restart cannot mend this error"
        elif self._has_recurred(error, trace):
            sentence = f"the same error ended it at step {self._progress.step} before the restart"
        else:
            return
        print(f"torchft: {sentence}: exit status {self._code}", file=sys.stderr)
        raise SystemExit(self._code)

    def _has_recurred(self, error: BaseException, trace: TracebackType | None) -> bool:
        if is_peers_error(error) or isinstance(error, ConnectionError | TimeoutError):
            return False  # another process, or the network, has caused it
        return self._progress.record_failure(place_of(error, trace))


def place_of(error: BaseException, trace: TracebackType | None) -> str:
    """Return the class of ``error``, and the place in the code that has raised it."""
    kind = type(error)
    frames = traceback.extract_tb(trace)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{kind.__module__}.{kind.__qualname__}{at}"
