"""A trainer's view of the process that carries its collectives."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.reduction import send_handle

from torchft_svc.client.process_groups.isolated.messages import (
    Answer,
    Done,
    Failed,
    Request,
    Share,
)
from torchft_svc.client.process_groups.isolated.nursery import NURSERY
from torchft_svc.client.process_groups.isolated.segments import Segment
from torchft_svc.errors import QuorumFailed

log = logging.getLogger(__name__)

# A killed process is gone within milliseconds; this is for a machine that has no time.
_REAP_S = 5.0
# Its end is noticed here a moment before its status is told.
_STATUS_S = 1.0

OnEnd = Callable[[Exception | None], None]


class ChildProcess:
    """Each request with a number is answered once: by the process, or, when it ends, by its end.

    Raises:
        PeerError: no process could be started.
    """

    def __init__(self) -> None:
        self.pid, self._connection = NURSERY.bear()
        self._lock = threading.Lock()
        self._waiting: dict[int, OnEnd] = {}
        self._ended: Exception | None = None
        self._reader = threading.Thread(target=self._read, name="torchft-isolated", daemon=True)
        self._reader.start()

    @property
    def ended(self) -> Exception | None:
        """Why it cannot be used any more, or None."""
        return self._ended

    @property
    def is_busy(self) -> bool:
        """Whether there is a request that has not been answered."""
        return bool(self._waiting)

    def send(
        self, request: Request, number: int | None = None, on_end: OnEnd | None = None
    ) -> None:
        """Hand over ``request``; ``on_end`` is called when what has ``number`` is over.

        Raises:
            QuorumFailed: the process has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            if number is not None and on_end is not None:
                self._waiting[number] = on_end
            with contextlib.suppress(OSError):  # the reader finds out, and tells everybody
                self._connection.send(request)

    def share(self, segment: Segment) -> None:
        """Make ``segment`` known.

        Raises:
            QuorumFailed: the process has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            with contextlib.suppress(OSError):
                self._connection.send(Share(segment.number, segment.num_bytes))
                send_handle(self._connection, segment.descriptor, self.pid)

    def kill(self) -> None:
        """End it now, whatever it does; may be called twice."""
        self._end(QuorumFailed("the process group was left while a collective was under way"))
        with contextlib.suppress(ProcessLookupError):
            if self._reader.is_alive():  # until then its number is not given to another process
                os.kill(self.pid, signal.SIGKILL)
        if threading.current_thread() is not self._reader:
            self._reader.join(_REAP_S)

    def _read(self) -> None:
        while True:
            try:
                answer: Answer = self._connection.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                on_end = self._waiting.pop(answer.number, None)
            if on_end is not None:
                on_end(QuorumFailed(answer.error) if isinstance(answer, Failed) else None)
            assert isinstance(answer, Done | Failed)
        status = NURSERY.status_of(self.pid, _STATUS_S)
        self._end(QuorumFailed(f"the process that carries the collectives {_how(status)}"))
        with self._lock:
            self._connection.close()

    def _end(self, error: Exception) -> None:
        """Nobody waits for an answer that will not come."""
        with self._lock:
            self._ended = self._ended or error
            waiting, self._waiting = self._waiting, {}
        for on_end in waiting.values():
            on_end(error)


def _how(status: int | None) -> str:
    if status is None:
        return "has ended"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}; its own words are on stderr"
