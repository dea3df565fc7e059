"""A worker's open stream to its manager: proves that it lives, brings news, and carries votes."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from torchft_svc.coordination.outgoing import Outgoing
from torchft_svc.coordination.stream_votes import StreamVotes
from torchft_svc.core.limits import one_line
from torchft_svc.core.quorum.activity import PhaseReport
from torchft_svc.core.quorum.session_messages import Drain
from torchft_svc.core.quorum.tally import MAX_EVENTS_KEPT, GroupEvent, Tally
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import DifferenceReport
from torchft_svc.core.route import AttachEnd, AttachRetry, Reattach
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import (
    difference_to_wire,
    drain_from_wire,
    event_to_wire,
    fit_for_logs,
    term_ends_from_wire,
)

log = logging.getLogger(__name__)

# The thread ends with its stream, which ends when it is cancelled.
JOIN_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Callbacks for a worker's news, called on the thread that reads them: none may wait for long.

    ``on_loss``: a member of the last quorum is dead or has left (replica id, reason, id of that
    quorum). ``on_kill``: this worker has to end at once, ``on_drain``: when its step is finished.
    ``on_waiting``: a group waits to join the last quorum (replica id). ``on_no_quorum``: this
    worker has asked for a quorum and waits, because of that (empty: not known); called again and
    again, and of all workers of a group that wait only for the first. ``on_over``: the manager
    ends, and there will be no other (the reason). ``on_break``: the stream has ended, and is opened
    again; the group is out of its quorum, unless it is in a term that does not need its manager.
    ``on_cut``: the group is out of its quorum, because its manager did not come back in time, or
    takes this worker for gone. ``on_term``: the term of a quorum has to end.
    """

    on_loss: Callable[[str, str, int], None]
    on_kill: Callable[[str], None]
    on_drain: Callable[[Drain], None]
    on_waiting: Callable[[str], None]
    on_no_quorum: Callable[[str], None] = lambda reason: None
    on_over: Callable[[str], None] = lambda reason: None
    on_break: Callable[[], None] = lambda: None
    on_cut: Callable[[], None] = lambda: None
    on_term: Callable[[TermEnds], None] = lambda news: None

    def receive(self, news: pb.AttachNews) -> None:
        fit_for_logs(news)
        kind = news.WhichOneof("kind")
        if kind == "lost":
            self.on_loss(news.lost.replica_id, news.lost.reason, news.lost.quorum_id)
        elif kind == "kill":
            self.on_kill(news.kill.reason)
        elif kind == "drain":
            self.on_drain(drain_from_wire(news.drain))
        elif kind == "waiting":
            self.on_waiting(news.waiting.replica_id)
        elif kind == "term_ends":
            self.on_term(term_ends_from_wire(news.term_ends))
        elif kind == "no_quorum_yet":
            self.on_no_quorum(news.no_quorum_yet.reason)
        elif kind == "over":
            self.on_over(news.over.reason)


class Attachment:
    """Reads news on a thread of its own, ``torchft-news``; opened again when it breaks.

    ``channel`` returns the one to use, whenever the stream is opened; ``on_break`` is called on
    that thread if the manager cannot be reached. ``tally`` returns what the worker's time was spent
    on, which is sent with its phases.
    """

    def __init__(
        self,
        channel: Callable[[], grpc.Channel],
        metadata: Sequence[tuple[str, str]],
        group_rank: int,
        worker_id: str,
        listeners: Listeners,
        on_break: Callable[[], None],
        tally: Callable[[float], Tally | None] = lambda now: None,
    ) -> None:
        self._channel = channel
        self._metadata = metadata
        self._on_break = on_break
        self._hello = pb.AttachHello(rank=group_rank, worker_id=worker_id)
        self._listeners = listeners
        self._closing = threading.Event()
        self._tally = tally
        self._outgoing = Outgoing(self._hello, tally)
        self._votes = StreamVotes(self._outgoing.send)
        self._report: PhaseReport | None = None
        # The last events, and when they happened: the next manager receives them again.
        self._events: deque[tuple[GroupEvent, float]] = deque(maxlen=MAX_EVENTS_KEPT)
        self._is_over = False  # the manager has announced that it ends for good
        self._streams = threading.Condition()
        self._awaits_next = False  # `listen` waits for the next stream
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name="torchft-news", daemon=True)
        self._thread.start()

    def report_phase(self, report: PhaseReport) -> None:
        """Report to the manager what this worker does; only stores it."""
        self._report = report  # first, for a stream that is being opened
        self._outgoing.report_phase(report)

    def report_difference(self, report: DifferenceReport) -> None:
        """Report to the manager that the groups' states differ; only stores it.

        The report is lost if the stream breaks just then: other groups report it, too.
        """
        self._outgoing.send(pb.AttachRequest(difference=difference_to_wire(report)))

    def report_event(self, event: GroupEvent) -> None:
        """Report to the manager what has happened; only stores it."""
        at = time.monotonic() - event.ago_s
        self._events.append((event, at))  # first, for a stream that is being opened
        self._outgoing.send(_event_request(event, at))

    @property
    def is_open(self) -> bool:
        """Whether the manager has welcomed this worker, and the stream has not ended."""
        return self._votes.is_open

    def vote(self, vote: pb.ShouldCommitRequest, timeout_s: float) -> pb.AttachDecision | None:
        """See `StreamVotes.cast`."""
        return self._votes.cast(vote, timeout_s)

    def listen(self, timeout_s: float) -> None:
        """Wait, at most for ``timeout_s``, until all news that were sent so far are read.

        If the stream has ended, for example because this process stood still, wait for the next one
        first: once, and not if the manager ends for good.
        """
        deadline = time.monotonic() + timeout_s
        while not self._votes.listen(max(0.0, deadline - time.monotonic())):
            with self._streams:
                left_s = max(0.0, deadline - time.monotonic())
                self._streams.wait_for(lambda: self._votes.is_open or not self._awaits_next, left_s)
                if not self._votes.is_open:
                    self._awaits_next = False
                    return

    def _welcomed(self, votes: StreamVotes) -> None:
        with self._streams:
            self._awaits_next = True
            votes.opened()
            self._streams.notify_all()

    def _stop_awaiting(self) -> None:
        """Stop waiting for the replacement stream."""
        with self._streams:
            self._awaits_next = False
            self._streams.notify_all()

    def close(self, failure: str = "") -> None:
        """Detach, on purpose or with the error ``failure``; may be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._stop_awaiting()
        self._outgoing.end(pb.AttachDetach(failure=failure))
        self._thread.join(JOIN_TIMEOUT_S)
        stream = self._stream
        if stream is not None and self._thread.is_alive():
            stream.cancel()
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._keep_open()
        finally:
            self._stop_awaiting()

    def _keep_open(self) -> None:
        retry = AttachRetry(random.SystemRandom().random)
        while True:
            outgoing = self._outgoing = Outgoing(self._hello, self._tally)
            votes = self._votes = StreamVotes(outgoing.send)
            if self._closing.is_set():  # not before there is an `Outgoing` that `close` ends
                return
            for event, at in list(self._events):
                outgoing.send(_event_request(event, at))
            sent = None
            while (report := self._report) is not sent:  # another thread may report the next one
                assert report is not None
                outgoing.report_phase(report)
                sent = report
            how, reason = AttachEnd.CLOSED, ""
            try:
                self._read(outgoing, votes, retry)
            except grpc.RpcError as error:
                reason = one_line(error.details() or "")
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    log.error("the manager does not trust this worker: %s", reason)
                    return  # asking again would not help
                is_refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT
                how = AttachEnd.REFUSED if is_refused else AttachEnd.BROKEN
            except ValueError:  # the channel was closed
                how = AttachEnd.MOVED
            following = retry.ended(how, time.monotonic())
            if not self._closing.is_set():
                self._react(following, reason)
            self._closing.wait(following.pause_s)

    def _react(self, following: Reattach, reason: str) -> None:
        """Inform the listeners of the end of a stream; ``reason``: why, if not in good order."""
        if following.is_broken:
            if reason:
                level = logging.DEBUG if self._is_over else logging.WARNING
                log.log(level, "no stream to the manager: %s", reason)
            self._listeners.on_break()
        if following.is_cut:
            self._listeners.on_cut()
        if following.is_lost:
            self._on_break()

    def _read(self, outgoing: Outgoing, votes: StreamVotes, retry: AttachRetry) -> None:
        """Read one stream, from hello to its end."""
        attach: Any = self._channel().stream_stream(
            "/torchft.ManagerService/Attach",
            request_serializer=pb.AttachRequest.SerializeToString,
            response_deserializer=pb.AttachNews.FromString,
        )
        self._stream = attach(outgoing.messages(), metadata=self._metadata)
        try:
            for news in self._stream:
                retry.received()
                kind = news.WhichOneof("kind")
                if kind == "decision":
                    votes.answered(fit_for_logs(news).decision)
                    continue
                if kind == "pong":
                    votes.answered(news.pong)
                    continue
                if kind == "welcome":
                    self._welcomed(votes)
                self._is_over = kind == "over"
                if self._is_over:
                    self._stop_awaiting()
                self._listeners.receive(news)
        finally:
            outgoing.end()  # or the thread that sends would wait for more
            votes.closed()


def _event_request(event: GroupEvent, at: float) -> pb.AttachRequest:
    """The message with an event that happened ``at`` then."""
    aged = replace(event, ago_s=max(0.0, time.monotonic() - at))
    return pb.AttachRequest(event=event_to_wire(aged))
