"""Fetches a state: its description first, then its chunks, from all sources that have it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchft_svc.client.checkpointing.encoding.memory import AtHand, Filling, Staging
from torchft_svc.client.checkpointing.encoding.serialization import parse
from torchft_svc.client.checkpointing.http.chunks import Chunks, ConnectionId
from torchft_svc.client.checkpointing.http.feed import (
    Feed,
    FetchRequest,
    Lookup,
    Opening,
    Superfluous,
)
from torchft_svc.client.checkpointing.http.requests import MAX_VERIFIED
from torchft_svc.errors import CheckpointError, PeerError, TorchFTError

log = logging.getLogger(__name__)

# All sources are asked at the same time; when the first one fails, another answer is on its way.
EXTRA_GRACE_S = 1.0
# All sources describe the state at about the same time. One that is so much later than another may
# be cut off, or send a byte now and then.
LATER_BY_S = 2.0
# After the last chunk, sources receive the numbers of chunks that they need not keep; this bounds
# that wait.
REPORT_TIMEOUT_S = 0.5
# A thread ends as soon as its source is stopped, unless it is just connecting.
STOP_TIMEOUT_S = 0.5
# A source that is out of the quorum, and silent for longer, is not just busy.
SILENCE_S = 1.0
_PRIMARY = 0


class Fetch:
    """An attempt to receive a state; ``cancel`` ends it from another thread.

    Source 0 is the assigned one, the extras follow. Its description and its chunks define the
    state; another source takes its place only if it is lost, or far later than the others, before
    it has sent the description.
    """

    def __init__(
        self,
        request: FetchRequest,
        staging: Staging | None = None,
        on_offer: Callable[[], object] = lambda: None,
    ) -> None:
        """``on_offer`` is called when a source offers the state, before its bytes are fetched."""
        self._request = request
        self._staging = staging or Staging()
        self._on_offer = on_offer
        self._primary = Feed(request.url, request)
        self._changed = threading.Condition()
        self._feeds: dict[int, Feed] = {_PRIMARY: self._primary}
        self._openings: dict[int, Opening | None] = {}  # None: it does not serve this state
        self._undecided = set(range(_PRIMARY + 1, len(request.extras) + 1))  # may still take part
        self._lost: dict[int, PeerError] = {}
        self._has_begun = False  # the assigned source has sent the description
        self._target: _Target | None = None
        self._workers: list[tuple[int, threading.Thread]] = []  # with the source's number
        self._joining: list[tuple[int, threading.Thread]] = []  # one for each extra source
        self._learner: threading.Thread | None = None
        self._error: PeerError | None = None
        self._is_over = False
        self._filling: Filling | None = None
        self._had_some = False  # chunks were at hand

    def cancel(self, why: str) -> None:
        self._fail(CheckpointError(self._primary.address, why))

    def lose_assigned(self, why: str) -> None:
        """Give up the assigned source, which is out of the quorum, if it stays silent.

        Called repeatedly.
        """
        error = CheckpointError(self._primary.address, why)
        if self._replace_undescribed(error):
            return
        with self._changed:
            if _PRIMARY in self._lost or not self._is_silent():
                return
        self._lose(_PRIMARY, error)

    def _replace_undescribed(self, error: PeerError) -> bool:
        """Give the assigned source up, unless it has sent the description."""
        with self._changed:
            if self._has_begun:
                return False
            self._lost.setdefault(_PRIMARY, error)
        self._primary.stop()
        return True

    def _is_silent(self) -> bool:
        """Whether the assigned source, which has sent the description, has stopped sending."""
        if self._target is None:  # nothing was requested yet
            return False
        since = max(self._target.asked_at, self._primary.received_at())
        return time.monotonic() - since > SILENCE_S

    def progress(self) -> tuple[int, int]:
        """How many bytes have arrived, and how many there are (0: not known yet)."""
        target = self._target
        if target is None:
            return 0, 0
        arrived = target.chunks.num_arrived * target.opening.chunk_bytes
        return min(arrived, target.num_bytes), target.num_bytes

    def run(self) -> Any:
        """Receive the state.

        Raises:
            Unreachable: no source answers.
            Unauthorized: authentication failed; the message says what to set.
            DeadlineExceeded: no byte arrived for ``timeout_s``.
            CheckpointError: the state is gone, malformed, or repeatedly damaged.
        """
        began_at = time.monotonic()
        for number, lookup in enumerate(self._request.extras, _PRIMARY + 1):
            thread = self._thread(f"torchft-fetch-{number}", self._join, number, lookup)
            self._joining.append((number, thread))
            thread.start()
        try:
            lead = self._open_first()
            self._on_offer()
            address = self._feeds[lead].address
            plan = parse(self._feeds[lead].opening.description, address)
            with self._memory(plan.size) as memory:
                chunks = self._fetch_chunks(lead, memory)
        except BaseException:
            self._end()
            self._keep_arrived()
            raise
        self._end()
        state = plan.rebuild(memory, address)
        log.debug(
            "received step %d: %.3f GB in %.3f s, chunks by source: %s, %d of them at hand before",
            self._request.step,
            plan.size / 1e9,
            time.monotonic() - began_at,
            chunks.shares(),
            chunks.num_reused,
        )
        return state

    def _open_first(self) -> int:
        """The lead: the assigned source, or one that answers in its place."""
        try:
            self._claim(self._primary)
            self._primary.open()
            with self._changed:
                if _PRIMARY in self._lost:  # it was lost meanwhile, and is stopped
                    raise self._lost[_PRIMARY]
                self._has_begun = True
        except PeerError as error:
            self._check()
            with self._changed:
                why = self._lost.setdefault(_PRIMARY, error)
                self._changed.wait_for(self._has_other_opening, EXTRA_GRACE_S)
                ready = sorted(number for number, opening in self._openings.items() if opening)
            self._check()
            if not ready:
                raise why from None
            log.warning("source %s is lost, others continue: %s", self._primary.address, why)
            return ready[0]
        return _PRIMARY

    def _claim(self, feed: Feed) -> None:
        """Report to a source what is at hand, before it offers its state."""
        at_hand = self._staging.at_hand
        if at_hand is not None:
            feed.claim(at_hand.num_bytes, at_hand.chunk_bytes, at_hand.digests)

    def _is_described(self) -> bool:
        """Whether the assigned source has sent the description, or is not waited for."""
        return self._has_begun or _PRIMARY in self._lost or self._is_over

    def _has_other_opening(self) -> bool:
        return (
            any(self._openings.values())
            or len(self._openings) == len(self._request.extras)
            or self._is_over
        )

    @contextmanager
    def _memory(self, num_bytes: int) -> Iterator[memoryview]:
        """Memory to receive into; inside this block, pages are prepared ahead of the bytes."""
        try:
            filling = self._staging.pop_filling(num_bytes)
        except MemoryError as error:
            raise CheckpointError(self._primary.address, str(error)) from error
        try:
            self._filling = filling
            yield filling.view(num_bytes)
        finally:
            filling.stop()

    def _fetch_chunks(self, lead: int, memory: memoryview) -> Chunks:
        opening = self._feeds[lead].opening
        num_chunks = -(-len(memory) // opening.chunk_bytes)
        feeds = self._feeds  # not self: a cycle would keep the memory for long
        at_hand = self._staging.pop_at_hand(len(memory), opening.chunk_bytes)
        self._had_some = bool(at_hand)
        chunks = Chunks(
            num_chunks,
            lead,
            lambda conn: feeds[conn.source].cut(conn.connection),
            at_hand=at_hand,
        )
        target = _Target(memory, len(memory), opening, chunks)
        with self._changed:
            self._target = target
            if self._error is not None:
                chunks.stop()
            self._changed.notify_all()
        if at_hand:
            self._start_learning()
        self._start_workers(lead, range(max(1, min(self._request.num_connections, num_chunks))))
        chunks.wait_until_over()
        self._check()
        return chunks

    def _join(self, number: int, lookup: Lookup) -> None:
        """Open an extra source; use it if it answers in time and holds the same state."""
        address = f"number {number}"
        try:
            feed = Feed(lookup(), self._request, is_extra=True)
            address = feed.address
            with self._changed:
                if self._is_over:
                    return
                self._feeds[number] = feed
            self._claim(feed)
            opening = feed.open()
        except Exception as error:
            if isinstance(error, TorchFTError | OSError):
                log.info("source %s takes no part: %s", address, error)
            else:
                log.exception("source %s takes no part", address)
            self._answered(number, None)
        else:
            self._answered(number, opening)
            self._guarded(number, self._take_part, number)
        finally:
            self._decided(number)

    def _decided(self, number: int) -> None:
        """An extra source takes part now, or never will."""
        with self._changed:
            self._undecided.discard(number)
            self._changed.notify_all()

    def _answered(self, number: int, opening: Opening | None) -> None:
        with self._changed:
            self._openings[number] = opening
            if opening is not None:
                self._workers.append((number, threading.current_thread()))
            self._changed.notify_all()

    def _take_part(self, number: int) -> None:
        feed = self._feeds[number]
        with self._changed:
            described = self._changed.wait_for(self._is_described, LATER_BY_S)
        if not described:
            why = f"{feed.address} described the state {LATER_BY_S:g} s ago, this source did not"
            self._replace_undescribed(CheckpointError(self._primary.address, why))
        with self._changed:
            self._changed.wait_for(lambda: self._target is not None or self._is_over)
            target = self._target
        if target is None or number in target.chunks.sources:
            return  # the fetch failed, or this source is the lead
        if not feed.opening.is_of_same_state(target.opening):
            log.warning("source %s offers another state for this step: left out", feed.address)
        elif target.chunks.add_source(number):
            self._decided(number)
            self._start_learning()
            share = -(-self._request.num_connections // (len(self._request.extras) + 1))
            self._start_workers(number, range(1, share))
            self._work(number, 0)
            return
        self._decided(number)
        target.chunks.wait_until_over()
        self._report(number, 0)

    def _start_workers(self, number: int, connections: range) -> None:
        threads = [
            self._thread(
                f"torchft-fetch-{number}-{connection}",
                self._guarded, number, self._work, number, connection,
            )
            for connection in connections
        ]  # fmt: skip
        with self._changed:
            self._workers += [(number, thread) for thread in threads]
        for thread in threads:
            thread.start()

    def _start_learning(self) -> None:
        with self._changed:
            if self._learner is not None or self._is_over:
                return
            self._learner = self._thread(
                "torchft-fetch-digests", self._guarded, _PRIMARY, self._learn_digests
            )
        self._learner.start()

    def _thread(self, name: str, target: Any, *args: Any) -> threading.Thread:
        return threading.Thread(target=target, args=args, name=name, daemon=True)

    def _guarded(self, number: int, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except Exception as error:
            log.exception("a fetching thread failed")
            address = self._feeds[number].address
            self._fail(CheckpointError(address, f"receiving failed: {error!r}"))

    def _work(self, number: int, connection: int) -> None:
        """Fetch chunks over a connection until none is left, or its source is lost."""
        feed = self._feeds[number]
        try:
            self._fetch_all(feed, ConnectionId(number, connection))
            self._report(number, connection)
        except Superfluous:
            log.debug("%s has enough connections", feed.address)
        except PeerError as error:
            self._lose(number, error)
        except TimeoutError as error:
            self._lose(number, feed.too_late("receiving a chunk", str(error)))

    def _fetch_all(self, feed: Feed, conn: ConnectionId) -> None:
        target = self._ready_target()
        chunks = target.chunks
        while (number := chunks.next_chunk(conn)) is not None:
            digest = None
            try:
                digest = feed.fetch_chunk(
                    conn.connection,
                    number,
                    chunks.num_chunks,
                    target.view(number),
                    self._unreported(conn.source),
                    lambda: chunks.is_slow(conn.source),
                )
            finally:
                if digest is None:
                    chunks.give_back(conn)
            if digest is not None and not chunks.arrived(conn, digest):
                raise self._differs(feed)

    def _report(self, number: int, connection: int) -> None:
        """Report to a source which chunks it need not keep, after the last chunk has arrived."""
        chunks = self._ready_target().chunks
        if not chunks.is_complete:
            return
        feed = self._feeds[number]
        if not chunks.num_chunks and connection == 0:
            feed.report(connection, [])
        while verified := self._unreported(number):
            feed.report(connection, verified)

    def _unreported(self, number: int) -> list[int]:
        return self._ready_target().chunks.unreported(number, MAX_VERIFIED)

    def _learn_digests(self) -> None:
        """Fetch the digests of all chunks from the lead, also if that changes meanwhile."""
        chunks = self._ready_target().chunks
        while not self._is_over and not chunks.has_digests:
            lead = chunks.lead
            feed = self._feeds[lead]
            try:
                digests = feed.fetch_digests(chunks.num_chunks)
            except PeerError as error:
                chunks.drop_at_hand()
                if chunks.sources == [lead]:
                    return  # its own chunks need no digests
                self._lose(lead, error)
            else:
                for number in chunks.apply_digests(lead, digests):
                    self._lose(number, self._differs(self._feeds[number]))

    def _differs(self, feed: Feed) -> CheckpointError:
        return CheckpointError(feed.address, "its state is not the one that the others hold")

    def _lose(self, number: int, error: PeerError) -> None:
        """Continue without a source, or fail if it was the last one."""
        chunks = self._ready_target().chunks
        with self._changed:
            if self._is_over or number in self._lost or chunks.is_complete:
                return
            self._lost[number] = error
        if chunks.remove_source(number) or self._has_successor(chunks):
            log.warning(
                "source %s is lost, others continue: %s", self._feeds[number].address, error
            )
            self._feeds[number].stop()
        else:
            self._fail(self._lost.get(_PRIMARY, error))

    def _has_successor(self, chunks: Chunks) -> bool:
        """Whether an extra source that is just being opened takes the place of the last one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or chunks.sources or not self._undecided, EXTRA_GRACE_S
            )
            return bool(chunks.sources)

    def _fail(self, error: PeerError) -> None:
        with self._changed:
            if self._is_over:
                return
            self._error = self._error or error
            target = self._target
            feeds = list(self._feeds.values())
        if target is not None:
            target.chunks.stop()
        for feed in feeds:
            feed.stop()

    def _keep_arrived(self) -> None:
        """Keep what has arrived for the next attempt, if this one began with chunks at hand, and
        nobody writes into its memory any more."""
        target, threads = self._target, [thread for _, thread in self._workers]
        if not self._had_some or target is None or any(thread.is_alive() for thread in threads):
            return
        assert self._filling is not None
        chunk_bytes, digests = target.opening.chunk_bytes, target.chunks.in_memory()
        at_hand = AtHand(target.num_bytes, chunk_bytes, digests)
        self._staging.keep(self._filling, at_hand)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _ready_target(self) -> _Target:
        assert self._target is not None
        return self._target

    def _end(self) -> None:
        """Let the workers send their reports, for a limited time, and end them. So do sources that
        are just being opened: what they were asked for, they would keep for long."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            feeds, workers, target = dict(self._feeds), list(self._workers), self._target
        is_complete = target is not None and target.chunks.is_complete
        for feed in () if is_complete else feeds.values():
            feed.stop()
        if target is not None and is_complete:
            slow = target.chunks.is_slow
            reporting = [*workers, *self._joining]
            _join_all([each for number, each in reporting if not slow(number)], REPORT_TIMEOUT_S)
        for feed in feeds.values():
            feed.stop()
        threads = [thread for _, thread in workers]
        _join_all([*threads, *([self._learner] if self._learner else [])], STOP_TIMEOUT_S)
        for feed in feeds.values():
            feed.close()


@dataclass(frozen=True, slots=True)
class _Target:
    memory: memoryview
    num_bytes: int
    opening: Opening
    chunks: Chunks
    asked_at: float = field(default_factory=time.monotonic)

    def view(self, chunk: int) -> memoryview:
        size = self.opening.chunk_bytes
        return self.memory[chunk * size : (chunk + 1) * size]


def _join_all(threads: list[threading.Thread], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
