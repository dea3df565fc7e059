"""Fetches a state: its description first, then its chunks, from all sources that have it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchft_svc.client.checkpointing.encoding.serialization import parse
from torchft_svc.client.checkpointing.encoding.staging import Staging
from torchft_svc.client.checkpointing.http.chunks import Chunks, Way
from torchft_svc.client.checkpointing.http.feed import (
    Chunk,
    Feed,
    Lookup,
    Opening,
    Order,
    Superfluous,
)
from torchft_svc.client.checkpointing.http.requests import MAX_ALSO
from torchft_svc.errors import CheckpointError, PeerError, TorchFTError

log = logging.getLogger(__name__)

# All sources are asked at once: when the first fails at once, another's answer is on its way.
EXTRA_GRACE_S = 1.0
# After the last chunk, sources are told what they need not keep; no state waits for that longer.
REPORT_TIMEOUT_S = 0.5
# A thread ends as soon as its source is stopped, unless it is just about to connect.
STOP_TIMEOUT_S = 0.5
# Who is out of the quorum, and says nothing for longer, is not only busy.
SILENCE_S = 1.0
_PRIMARY = 0


class Fetch:
    """One attempt to receive a state; ``cancel`` ends it from another thread.

    Source 0 is the one that was assigned, the extras follow. What it says is what arrives; only
    if it is lost too early to say it, another takes its place.
    """

    def __init__(self, order: Order, staging: Staging | None = None) -> None:
        self._order = order
        self._staging = staging or Staging()
        self._primary = Feed(order.url, order)
        self._changed = threading.Condition()
        self._feeds: dict[int, Feed] = {_PRIMARY: self._primary}
        self._openings: dict[int, Opening | None] = {}  # None: it has none
        self._lost: dict[int, PeerError] = {}
        self._has_begun = False  # the assigned source has said what it sends
        self._target: _Target | None = None
        self._workers: list[tuple[int, threading.Thread]] = []  # with the source's number
        self._learner: threading.Thread | None = None
        self._error: PeerError | None = None
        self._is_over = False

    def cancel(self, why: str) -> None:
        self._fail(CheckpointError(self._primary.address, why))

    def lose_assigned(self, why: str) -> None:
        """The assigned source is out of the quorum: if it says nothing, it may never do so again.

        To be called again and again.
        """
        error = CheckpointError(self._primary.address, why)
        with self._changed:
            if _PRIMARY in self._lost or (self._has_begun and not self._is_silent()):
                return
            if not self._has_begun:
                self._lost[_PRIMARY] = error
        if self._has_begun:
            self._lose(_PRIMARY, error)
        else:
            self._primary.stop()

    def _is_silent(self) -> bool:
        """Whether the assigned source, which has begun, does not go on."""
        if self._target is None:  # it has not been asked to
            return False
        since = max(self._target.asked_at, self._primary.received_at())
        return time.monotonic() - since > SILENCE_S

    def run(self) -> Any:
        """Receive the state.

        Raises:
            Unreachable: nobody answers there.
            Unauthorized: the two sides do not trust each other; says what to set.
            DeadlineExceeded: no byte came for ``timeout_s``.
            CheckpointError: it is gone, malformed, or keeps arriving damaged.
        """
        began_at = time.monotonic()
        for number, lookup in enumerate(self._order.extras, _PRIMARY + 1):
            self._thread(f"torchft-fetch-{number}", self._join, number, lookup).start()
        try:
            lead = self._open_first()
            address = self._feeds[lead].address
            plan = parse(self._feeds[lead].opening.description, address)
            with self._memory(plan.size) as memory:
                chunks = self._fetch_chunks(lead, memory)
        finally:
            self._end()
        state = plan.rebuild(memory, address)
        log.debug(
            "received step %d: %.3f GB in %.3f s, chunks by source: %s",
            self._order.step,
            plan.size / 1e9,
            time.monotonic() - began_at,
            chunks.shares(),
        )
        return state

    def _open_first(self) -> int:
        """The source to go by: the assigned one, or one that answers in its place."""
        try:
            self._open_primary()
        except PeerError as error:
            self._check()
            with self._changed:
                why = self._lost.setdefault(_PRIMARY, error)
                self._changed.wait_for(self._has_other_opening, EXTRA_GRACE_S)
                ready = sorted(number for number, opening in self._openings.items() if opening)
            self._check()
            if not ready:
                raise why from None
            log.warning("source %s is lost, others go on: %s", self._primary.address, why)
            return ready[0]
        return _PRIMARY

    def _open_primary(self) -> None:
        self._primary.open()
        with self._changed:
            if _PRIMARY in self._lost:  # in this moment: it is stopped
                raise self._lost[_PRIMARY]
            self._has_begun = True

    def _has_other_opening(self) -> bool:
        return (
            any(self._openings.values())
            or len(self._openings) == len(self._order.extras)
            or self._is_over
        )

    @contextmanager
    def _memory(self, num_bytes: int) -> Iterator[memoryview]:
        """Memory to receive into; while this is open, pages are made ready ahead of bytes."""
        try:
            filling = self._staging.take(num_bytes)
        except MemoryError as error:
            raise CheckpointError(self._primary.address, str(error)) from error
        try:
            yield filling.view(num_bytes)
        finally:
            filling.stop()

    def _fetch_chunks(self, lead: int, memory: memoryview) -> Chunks:
        opening = self._feeds[lead].opening
        num_chunks = -(-len(memory) // opening.chunk_bytes)
        feeds = self._feeds  # not self: this must not keep the memory until the collector comes
        chunks = Chunks(num_chunks, lead, lambda way: feeds[way.source].cut(way.connection))
        target = _Target(memory, opening, chunks)
        with self._changed:
            self._target = target
            if self._error is not None:
                chunks.stop()
            self._changed.notify_all()
        self._start_workers(lead, range(max(1, min(self._order.num_connections, num_chunks))))
        chunks.wait_until_over()
        self._check()
        return chunks

    def _join(self, number: int, lookup: Lookup) -> None:
        """An extra source: let it take part if it answers in time and holds the same state."""
        address = f"number {number}"
        try:
            feed = Feed(lookup(), self._order, is_extra=True)
            address = feed.address
            with self._changed:
                if self._is_over:
                    return
                self._feeds[number] = feed
            opening = feed.open()
        except (TorchFTError, OSError) as error:
            log.info("source %s takes no part: %s", address, error)
            self._answered(number, None)
        except Exception:
            log.exception("source %s takes no part", address)
            self._answered(number, None)
        else:
            self._answered(number, opening)
            self._guarded(number, self._take_part, number)

    def _answered(self, number: int, opening: Opening | None) -> None:
        with self._changed:
            self._openings[number] = opening
            if opening is not None:
                self._workers.append((number, threading.current_thread()))
            self._changed.notify_all()

    def _take_part(self, number: int) -> None:
        feed = self._feeds[number]
        with self._changed:
            self._changed.wait_for(lambda: self._target is not None or self._is_over)
            target = self._target
        if target is None or number in target.chunks.sources:
            return  # it failed, or this one is the first
        if not feed.opening.is_of_same_state(target.opening):
            log.warning("source %s offers another state for this step: left out", feed.address)
        elif target.chunks.join(number):
            self._start_learning()
            share = -(-self._order.num_connections // (len(self._order.extras) + 1))
            self._start_workers(number, range(1, share))
            self._work(number, 0)
            return
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
        """Fetch chunks over a connection until there are none, or its source is lost."""
        feed = self._feeds[number]
        try:
            self._fetch_all(feed, Way(number, connection))
            self._report(number, connection)
        except Superfluous:
            log.debug("%s has enough connections", feed.address)
        except PeerError as error:
            self._lose(number, error)
        except TimeoutError:
            self._lose(number, feed.too_late("receiving a chunk"))

    def _fetch_all(self, feed: Feed, way: Way) -> None:
        target = self._ready_target()
        chunks = target.chunks
        while (number := chunks.take(way)) is not None:
            digest = None
            try:
                digest = feed.fetch_chunk(
                    way.connection,
                    Chunk(number, chunks.num_chunks, target.view(number)),
                    self._news_for(way.source),
                    lambda: chunks.is_slow(way.source),
                )
            finally:
                if digest is None:
                    chunks.give_back(way)
            if digest is not None and not chunks.arrived(way, digest):
                raise self._differs(feed)

    def _report(self, number: int, connection: int) -> None:
        """Tell a source what it need not keep, now that all is received."""
        chunks = self._ready_target().chunks
        if not chunks.is_complete:
            return
        feed = self._feeds[number]
        if not chunks.num_chunks and connection == 0:
            feed.report(connection, [])
        while news := self._news_for(number):
            feed.report(connection, news)

    def _news_for(self, number: int) -> list[int]:
        chunks = self._ready_target().chunks
        # An only source may be one that hears of one chunk at a time.
        return chunks.news_for(number, MAX_ALSO if self._order.extras else 1)

    def _learn_digests(self) -> None:
        """Get the digests of all chunks from the source that is believed, whoever it is then."""
        chunks = self._ready_target().chunks
        while not self._is_over and not chunks.has_law:
            lead = chunks.lead
            feed = self._feeds[lead]
            try:
                law = feed.fetch_digests(chunks.num_chunks)
            except PeerError as error:
                self._lose(lead, error)
            else:
                self._enact(lead, law)
                if law is None:
                    return

    def _enact(self, lead: int, law: list[bytes] | None) -> None:
        chunks = self._ready_target().chunks
        if law is None:
            reason = f"{self._feeds[lead].address} cannot say whether it has the same state"
            for number in chunks.go_alone():
                self._lose(number, CheckpointError(self._feeds[number].address, reason))
            return
        for number in chunks.enact(lead, law):
            self._lose(number, self._differs(self._feeds[number]))

    def _differs(self, feed: Feed) -> CheckpointError:
        return CheckpointError(feed.address, "its state is not the one that the others hold")

    def _lose(self, number: int, error: PeerError) -> None:
        """Go on without a source, or fail if it was the last one."""
        with self._changed:
            if self._is_over or number in self._lost:
                return
            self._lost[number] = error
        if self._ready_target().chunks.leave(number):
            log.warning("source %s is lost, others go on: %s", self._feeds[number].address, error)
            self._feeds[number].stop()
        else:
            self._fail(self._lost.get(_PRIMARY, error))

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

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _ready_target(self) -> _Target:
        assert self._target is not None
        return self._target

    def _end(self) -> None:
        """Let the workers tell their sources, then end them; nobody waits for who does not."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            feeds, workers, target = dict(self._feeds), list(self._workers), self._target
        is_complete = target is not None and target.chunks.is_complete
        for number, feed in feeds.items():
            if not is_complete or (number != _PRIMARY and not self._openings.get(number)):
                feed.stop()
        if target is not None and is_complete:
            slow = target.chunks.is_slow
            _join_all([thread for number, thread in workers if not slow(number)], REPORT_TIMEOUT_S)
        for feed in feeds.values():
            feed.stop()
        threads = [thread for _, thread in workers]
        _join_all([*threads, *([self._learner] if self._learner else [])], STOP_TIMEOUT_S)
        for feed in feeds.values():
            feed.close()


@dataclass(frozen=True, slots=True)
class _Target:
    memory: memoryview
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
