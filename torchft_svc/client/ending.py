"""Ends this process when its group is killed, also if its main thread hangs."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading

log = logging.getLogger(__name__)

# As for an error that nobody caught: a launcher starts the group again.
KILLED_STATUS = 1
# What this process was doing is worth knowing, but a log that does not move must not save its life.
LAST_WORDS_S = 1.0


def end_now(reason: str) -> None:
    """Say where every thread stands, to stderr, and end; without any clean-up."""
    words = threading.Thread(target=_say, args=(reason,), name="torchft-last-words", daemon=True)
    words.start()
    words.join(LAST_WORDS_S)
    os._exit(KILLED_STATUS)


def _say(reason: str) -> None:
    log.critical("this process is killed: %s", reason)
    faulthandler.dump_traceback(2)  # by number: the program may have put anything at sys.stderr
