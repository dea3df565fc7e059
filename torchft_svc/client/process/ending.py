"""Ends this process at once when its group is killed, and describes the error that ends it."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading

from torchft_svc.errors import Drained
from torchft_svc.host.line_writer import flush_lines

log = logging.getLogger(__name__)

# The status of an uncaught error: a launcher restarts the group.
KILLED_STATUS = 1
# Time to log what this process was doing; a blocked log must not keep the process alive.
LAST_WORDS_S = 1.0
# The longest text of an error; it is part of one line in the lighthouse's log.
MAX_FAILURE_LENGTH = 300


def failure() -> str:
    """The error that ends this program, in one line; empty: it ends intentionally.

    Call it while the error is handled, as in a ``finally`` block, or at exit.
    """
    error = _ending_error()
    if isinstance(error, SystemExit) and not error.code:
        return ""
    if not isinstance(error, Exception | SystemExit):  # an interrupt from the keyboard
        return ""
    words = " ".join(f"{type(error).__name__}: {error}"[: 4 * MAX_FAILURE_LENGTH].split())
    shown = "".join(char if char.isprintable() else "?" for char in words)
    return shown[:MAX_FAILURE_LENGTH]


def ends_on_purpose() -> bool:
    """Whether neither an error nor an interrupt from the keyboard ends this program.

    Call it as `failure`.
    """
    error = _ending_error()
    return (
        error is None
        or isinstance(error, Drained)
        or (isinstance(error, SystemExit) and not error.code)
    )


def _ending_error() -> BaseException | None:
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # in an interactive session that is an old error
        error = getattr(sys, "last_value", None)
    return error


def end_now(reason: str, *, hangs: bool = True) -> None:
    """Log ``reason``, and all tracebacks if the process ``hangs``; exit without clean-up."""
    words = threading.Thread(
        target=_log_end, args=(reason, hangs), name="torchft-last-words", daemon=True
    )
    words.start()
    words.join(LAST_WORDS_S)
    os._exit(KILLED_STATUS)


def _log_end(reason: str, hangs: bool) -> None:
    log.critical("this process is killed: %s", reason)
    flush_lines()
    if hangs:
        faulthandler.dump_traceback(2)  # by number: the program may have replaced sys.stderr
