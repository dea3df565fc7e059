"""A worker's votes on one stream to its manager, which saves a call of their own in each step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from torchft_svc.errors import DeadlineExceeded
from torchft_svc.proto import torchft_pb2 as pb

# The name of the call that a vote is without a stream.
ACTION = "manager's ShouldCommit"
# How long an interrupt may stay unseen that is no signal to the waiting thread, as in a call.
NOTICE_S = 0.2


_Answer = pb.AttachDecision | pb.AttachPong | None  # None: the stream has ended


class StreamVotes:
    """Votes and pings on one stream, for any thread, one at a time.

    ``send`` queues a message, and does not wait.
    """

    def __init__(self, send: Callable[[pb.AttachRequest], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self.is_open = False  # the manager has welcomed this worker, and the stream has not ended
        self._number = 0  # of the last vote
        self._waiting: queue.SimpleQueue[_Answer] | None = None

    def cast(self, vote: pb.ShouldCommitRequest, timeout_s: float) -> pb.AttachDecision | None:
        """Wait for the decision; None: vote by a call, as the stream has ended, or another thread
        votes on it.

        Raises:
            DeadlineExceeded: there is none within ``timeout_s``.
        """
        timeout_ms = max(1, round(1000 * timeout_s))

        def message(number: int) -> pb.AttachRequest:
            cast = pb.AttachVote(vote=vote, number=number, timeout_ms=timeout_ms)
            return pb.AttachRequest(vote=cast)

        decision = self._exchange(message, timeout_s)
        return decision if isinstance(decision, pb.AttachDecision) else None

    def listen(self, timeout_s: float) -> bool:
        """Wait until all is read that the manager sent before it reads this, or the time is over.

        False: the stream is not open, or has ended meanwhile.
        """

        def message(number: int) -> pb.AttachRequest:
            return pb.AttachRequest(ping=pb.AttachPing(number=number))

        try:
            return self._exchange(message, timeout_s) is not None or self.is_open
        except DeadlineExceeded:
            return True

    def _exchange(self, message: Callable[[int], pb.AttachRequest], timeout_s: float) -> _Answer:
        """Send a message with a new number, and wait (None: the stream is not open, or in use)."""
        deadline = time.monotonic() + timeout_s
        mine: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        number, is_over = 0, False
        try:
            with self._lock:
                if not self.is_open or self._waiting is not None:
                    return None
                self._waiting = mine
                number = self._number = self._number + 1
            self._send(message(number))
            answer = _get(mine, deadline)
            is_over = True
            return answer
        except queue.Empty:
            raise DeadlineExceeded(ACTION, timeout_s) from None
        finally:
            if self._waiting is mine:
                self._end(number, is_over)

    def _end(self, number: int, is_over: bool) -> None:
        """End the exchange; withdraw it at a manager that may still wait for other votes."""
        with self._lock:
            self._waiting = None
        if not is_over:
            self._send(pb.AttachRequest(withdrawal=pb.AttachWithdrawal(number=number)))

    # -- for the thread that reads the stream ----------------------------------------------------

    def opened(self) -> None:
        """Record that the manager has welcomed this worker."""
        self.is_open = True

    def answered(self, answer: pb.AttachDecision | pb.AttachPong) -> None:
        """Deliver the answer; one that nobody waits for any more is dropped."""
        with self._lock:
            if self._waiting is not None and answer.number == self._number:
                self._waiting.put(answer)

    def closed(self) -> None:
        """Record that the stream has ended: a waiting vote is repeated as a call."""
        with self._lock:
            self.is_open = False
            if self._waiting is not None:
                self._waiting.put(None)


def _get(answers: queue.SimpleQueue[_Answer], deadline: float) -> _Answer:
    """Raises: queue.Empty: none has come by the ``deadline``."""
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            return answers.get(timeout=min(left_s, NOTICE_S))
        except queue.Empty:
            if left_s <= NOTICE_S:
                raise
