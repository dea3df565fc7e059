"""A trainer's view of the process that carries its collectives."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from multiprocessing.reduction import send_handle

from torchft_svc.client.process_groups.isolated.messages import (
    Answer,
    Failed,
    Request,
    Share,
    ShareDevice,
    Started,
)
from torchft_svc.client.process_groups.isolated.nursery import NURSERY
from torchft_svc.errors import QuorumFailed

log = logging.getLogger(__name__)

# A killed process is gone within milliseconds; this is for a machine that has no time.
_REAP_S = 5.0
# Its end is noticed here a moment before its status is told.
_STATUS_S = 1.0
# Its connection closes before the system has taken a device's memory back from it.
_GONE_S = 30.0

OnEnd = Callable[[Exception | None], None]
OnStart = Callable[[], None]


class ChildProcess:
    """Each request with a number is answered once: by the process, or, when it ends, by its end.

    Raises:
        PeerError: no process could be started.
    """

    def __init__(self) -> None:
        self.pid, self._connection = NURSERY.bear()
        self._descriptor = _descriptor_of(self.pid)
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._waiting: dict[int, tuple[OnEnd, OnStart | None]] = {}
        self._ended: Exception | None = None
        # What has failed in a process that lives may still write.
        self.has_failed = False
        self._reader = threading.Thread(target=self._read, name="torchft-isolated", daemon=True)
        self._reader.start()

    @property
    def ended(self) -> Exception | None:
        """Why it cannot be used any more, or None."""
        return self._ended

    @property
    def is_gone(self) -> bool:
        """Whether the system has taken back everything that it had."""
        return not self._reader.is_alive()

    @property
    def is_busy(self) -> bool:
        """Whether there is a request that has not been answered."""
        return bool(self._waiting)

    def send(
        self,
        request: Request,
        number: int | None = None,
        on_end: OnEnd | None = None,
        on_start: OnStart | None = None,
    ) -> None:
        """Hand over ``request``; ``on_end`` is called when what has ``number`` is over.

        ``on_start`` may be called before, once. Neither may raise.

        Raises:
            QuorumFailed: the process has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            if number is not None and on_end is not None:
                self._waiting[number] = on_end, on_start
            with contextlib.suppress(OSError):  # the reader finds out, and tells everybody
                self._connection.send(request)

    def share(self, segment: Share | ShareDevice, descriptor: int | None) -> None:
        """Make ``segment`` known; its ``descriptor`` follows, if it has one.

        Raises:
            QuorumFailed: the process has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            with contextlib.suppress(OSError):
                self._connection.send(segment)
                if descriptor is not None:
                    send_handle(self._connection, descriptor, self.pid)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Until every request has been answered, or the time is over."""
        with self._lock:
            self._answered.wait_for(lambda: not self._waiting, timeout_s)

    def kill(self, wait_s: float = _REAP_S) -> None:
        """End it now, whatever it does, and wait ``wait_s`` for its end; may be called twice."""
        error = QuorumFailed("the process group was left while a collective was under way")
        self._ended = self._ended or error  # before the reader finds a reason of its own
        with contextlib.suppress(ProcessLookupError):
            if self._reader.is_alive():  # until then its number is not given to another process
                os.kill(self.pid, signal.SIGKILL)
        # Only now: a request that is stuck, because it does not read, holds the lock.
        self._end(error)
        if threading.current_thread() is not self._reader:
            self._reader.join(wait_s)

    def _read(self) -> None:
        while True:
            try:
                answer: Answer = self._connection.recv()
            except (EOFError, OSError):
                break
            self._hear(answer)
        status = NURSERY.status_of(self.pid, _STATUS_S)
        self._end(QuorumFailed(f"the process that carries the collectives {_how(status)}"))
        with self._lock:
            self._connection.close()
        if self._descriptor is not None:
            select.select([self._descriptor], [], [], _GONE_S)
            os.close(self._descriptor)

    def _hear(self, answer: Answer) -> None:
        with self._lock:
            on_end, on_start = self._waiting.get(answer.number, (None, None))
            if not isinstance(answer, Started):
                self._waiting.pop(answer.number, None)
                self._answered.notify_all()
        if isinstance(answer, Started):
            if on_start is not None:
                on_start()
            return
        self.has_failed = self.has_failed or isinstance(answer, Failed)
        if on_end is not None:
            on_end(QuorumFailed(answer.error) if isinstance(answer, Failed) else None)

    def _end(self, error: Exception) -> None:
        """Nobody waits for an answer that will not come."""
        with self._lock:
            self._ended = error = self._ended or error
            waiting, self._waiting = self._waiting, {}
            self._answered.notify_all()
        for on_end, _ in waiting.values():
            on_end(error)


def _descriptor_of(pid: int) -> int | None:
    """Readable once the process has ended; None: it has already, or the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _how(status: int | None) -> str:
    if status is None:
        return "has ended"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}; its own words are on stderr"
