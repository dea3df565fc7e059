"""Requests by a signal to drain this worker's group (rule M11)."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from torchft_svc.client.process import loaders
from torchft_svc.client.process.forks import end_children_by_term
from torchft_svc.core.quorum.session_messages import Drain
from torchft_svc.errors import PeerError

log = logging.getLogger(__name__)

# A launcher forwards SIGTERM while the system sends it to all processes: that is one request.
REPEAT_S = 1.0
_JOIN_S = 0.5
# The first process of a container: the kernel has no default actions for its signals.
_INIT_PID = 1
# What a shell, and so a container, reports for a process that was ended by a signal.
_SHELL_STATUS = 128


class TermSignal:
    """Makes SIGTERM drain the group, until `close`; a second SIGTERM ends the process as usual.

    A handler runs between any two instructions of the main thread, which may hold any lock: so it
    only puts the signal into a reentrant queue, and a thread, ``torchft-drain``, passes it on
    through ``inform``. A handler of the program is not replaced. ``grace_s`` returns how long this
    process may live from then on (None: not known).
    """

    def __init__(
        self,
        drain: Callable[[Drain], None],
        inform: Callable[[Drain], None],
        grace_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._drain = drain
        self._inform = inform
        self._grace_s = grace_s
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._first_at: float | None = None
        self._installed = threading.current_thread() is threading.main_thread() and _is_free(
            signal.getsignal(signal.SIGTERM)
        )
        if self._installed:
            end_children_by_term(_is_ours)
            loaders.follow_drain(self._reason)
            signal.signal(signal.SIGTERM, self._on_signal)
            self._thread = threading.Thread(target=self._run, name="torchft-drain", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Restore the default for SIGTERM; idempotent.

        Shortly after a SIGTERM the handler stays: this process is ending, and may get the signal
        again. A later `TermSignal` replaces it.
        """
        if not self._installed:
            return
        self._installed = False
        self._signals.put(False)
        self._thread.join(_JOIN_S)
        is_main = threading.current_thread() is threading.main_thread()
        is_ours = signal.getsignal(signal.SIGTERM) == self._on_signal
        if is_main and is_ours and not self._may_be_repeated():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or has never handled the signal."""
        return not self._installed

    def _may_be_repeated(self) -> bool:
        return self._first_at is not None and time.monotonic() - self._first_at <= REPEAT_S

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._installed and self._first_at is None:
            self._first_at = time.monotonic()
            self._signals.put(True)
        elif not self._may_be_repeated():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if os.getpid() == _INIT_PID:
                os._exit(_SHELL_STATUS + signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    def _reason(self) -> str:
        """The reason why this process drains; empty: it does not."""
        return "" if self._first_at is None else f"process {os.getpid()} got SIGTERM"

    def _run(self) -> None:
        if not self._signals.get():
            return
        command = Drain(self._reason(), self._grace_s())
        self._drain(command)
        try:
            self._inform(command)
        except PeerError as error:
            log.warning("the manager could not be informed, the next step will do it: %s", error)


def _is_ours(handler: object) -> bool:
    return isinstance(getattr(handler, "__self__", None), TermSignal)


def _is_free(handler: object) -> bool:
    """Whether nobody handles the signal; one of ours that was closed only ignores repetitions."""
    owner = getattr(handler, "__self__", None)
    return handler is signal.SIG_DFL or (isinstance(owner, TermSignal) and owner.is_closed)
