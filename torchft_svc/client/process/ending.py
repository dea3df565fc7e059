"""How this process ends: on purpose, with an error, or at once when its group is killed."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading

log = logging.getLogger(__name__)

# As for an error that nobody caught: a launcher starts the group again.
KILLED_STATUS = 1
# What this process was doing is worth knowing, but a log that does not move must not save its life.
LAST_WORDS_S = 1.0
# Of an error's text; it goes into one line of the lighthouse's log.
MAX_FAILURE_LENGTH = 300


def failure() -> str:
    """The error that this program ends with, in one line; empty: it ends on purpose.

    To be called while it is handled, as in a ``finally`` block, or at exit.
    """
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # in an interactive session it is an old one
        error = getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and not error.code:
        return ""
    if not isinstance(error, Exception | SystemExit):  # an interrupt from the keyboard
        return ""
    words = " ".join(f"{type(error).__name__}: {error}"[: 4 * MAX_FAILURE_LENGTH].split())
    shown = "".join(char if char.isprintable() else "?" for char in words)
    return shown[:MAX_FAILURE_LENGTH]


def end_now(reason: str, *, hangs: bool = True) -> None:
    """Say why, to stderr, and where every thread stands if it ``hangs``; end without clean-up."""
    words = threading.Thread(
        target=_say, args=(reason, hangs), name="torchft-last-words", daemon=True
    )
    words.start()
    words.join(LAST_WORDS_S)
    os._exit(KILLED_STATUS)


def _say(reason: str, hangs: bool) -> None:
    log.critical("this process is killed: %s", reason)
    if hangs:
        faulthandler.dump_traceback(2)  # by number: the program may have put anything at sys.stderr
