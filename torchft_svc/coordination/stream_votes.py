"""A worker's votes on one stream to its manager, which saves a call of their own in each step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from torchft_svc.errors import DeadlineExceeded
from torchft_svc.proto import torchft_pb2 as pb

# As the call is named, which a vote is otherwise.
ACTION = "manager's ShouldCommit"
# An interrupt that is no signal to the thread that waits is seen after so long, as in a call.
SLICE_S = 0.2


class StreamVotes:
    """For any thread: one of them votes at a time. ``send`` queues a message without waiting."""

    def __init__(self, send: Callable[[pb.AttachRequest], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self.is_open = False  # the manager takes votes, and the stream has not ended
        self._number = 0  # of the last vote
        self._waiting: queue.SimpleQueue[pb.AttachDecision | None] | None = None

    def cast(self, vote: pb.ShouldCommitRequest, timeout_s: float) -> pb.AttachDecision | None:
        """Wait for the decision; None: vote by a call, as the stream has ended, or another thread
        votes on it.

        Raises:
            DeadlineExceeded: there is none within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        mine: queue.SimpleQueue[pb.AttachDecision | None] = queue.SimpleQueue()
        number, is_over = 0, False
        try:
            with self._lock:
                if not self.is_open or self._waiting is not None:
                    return None
                self._waiting = mine
                number = self._number = self._number + 1
            timeout_ms = max(1, round(1000 * timeout_s))
            told = pb.AttachVote(vote=vote, number=number, timeout_ms=timeout_ms)
            self._send(pb.AttachRequest(vote=told))
            decision = _get(mine, deadline)
            is_over = True
            return decision
        except queue.Empty:
            raise DeadlineExceeded(ACTION, timeout_s) from None
        finally:
            if self._waiting is mine:
                self._end(number, is_over)

    def _end(self, number: int, is_over: bool) -> None:
        """The vote is over; a manager that may still wait for others with it is told so."""
        with self._lock:
            self._waiting = None
        if not is_over:
            self._send(pb.AttachRequest(withdrawal=pb.AttachWithdrawal(number=number)))

    # -- for the thread that reads the stream ----------------------------------------------------

    def opened(self) -> None:
        """The manager takes votes on this stream."""
        self.is_open = True

    def decided(self, decision: pb.AttachDecision) -> None:
        """One that nobody waits for any more is passed over."""
        with self._lock:
            if self._waiting is not None and decision.number == self._number:
                self._waiting.put(decision)

    def closed(self) -> None:
        """The stream has ended: who waits votes by a call."""
        with self._lock:
            self.is_open = False
            if self._waiting is not None:
                self._waiting.put(None)


def _get(
    answers: queue.SimpleQueue[pb.AttachDecision | None], deadline: float
) -> pb.AttachDecision | None:
    """Raises: queue.Empty: none has come by the ``deadline``."""
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            return answers.get(timeout=min(left_s, SLICE_S))
        except queue.Empty:
            if left_s <= SLICE_S:
                raise
