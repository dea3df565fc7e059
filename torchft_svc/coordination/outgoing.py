"""What a worker sends on its stream to the manager."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

from torchft_svc.core.quorum.activity import PhaseReport
from torchft_svc.core.quorum.tally import Tally
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import report_to_wire

# How often a worker's phase is sent at most: it is for people and for hang timeouts of seconds, and
# a fast trainer would otherwise spend its time with it.
PHASE_INTERVAL_S = 0.1


class Outgoing:
    """One stream's messages, for the thread that sends them: hello, phases, votes, maybe a goodbye.

    The other methods may be called on any thread, and only store something.
    """

    def __init__(
        self, hello: pb.AttachHello, tally: Callable[[float], Tally | None] = lambda now: None
    ) -> None:
        """``tally`` returns what the worker's time was spent on (None: not known)."""
        self._hello = hello
        self._tally = tally
        self._report: PhaseReport | None = None
        self._has_new_phase = False
        self._over = threading.Event()
        self._goodbye: pb.AttachDetach | None = None
        # Votes, of which a worker has one under way, and their withdrawals; None: look at the rest.
        self._queue: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()

    def report_phase(self, report: PhaseReport) -> None:
        """Send ``report`` soon; only the latest one counts."""
        self._report = report
        if not self._has_new_phase:
            self._has_new_phase = True
            self._queue.put(None)

    def send(self, message: pb.AttachRequest) -> None:
        """Send ``message`` at once."""
        self._queue.put(message)

    def end(self, goodbye: pb.AttachDetach | None = None) -> None:
        """End the messages, with ``goodbye`` if given; the first of several calls counts."""
        if not self._over.is_set():
            self._goodbye = goodbye
            self._over.set()
        self._queue.put(None)

    def messages(self) -> Iterator[pb.AttachRequest]:
        """The messages to send; read them once."""
        yield pb.AttachRequest(hello=self._hello)
        next_phase_at = 0.0
        while not self._over.is_set():
            left_s = max(0.0, next_phase_at - time.monotonic()) if self._has_new_phase else None
            try:
                message = self._queue.get(timeout=left_s)
            except queue.Empty:
                self._has_new_phase = False  # before the look at the phase
                assert self._report is not None
                report = report_to_wire(self._report, self._tally(time.monotonic()))
                yield pb.AttachRequest(phase=report)
                next_phase_at = time.monotonic() + PHASE_INTERVAL_S
            else:
                if message is not None and not self._over.is_set():
                    yield message
        if self._goodbye is not None:
            yield pb.AttachRequest(detach=self._goodbye)
