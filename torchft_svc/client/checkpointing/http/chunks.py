"""Distributes a state's chunks over the sources that hold it, and decides which chunks are valid.

All sources claim to hold the same state. One of them, the *lead*, is trusted: its chunks are valid,
and so are those of other sources that match its digests. Once the lead has sent all digests, they
are final, even if it fails later. Until then, a failure of the lead makes another source the lead,
and only that one's digests count. So before the digests are known, only the lead receives which of
its chunks have arrived, and every source keeps all chunks.

Chunks that are *at hand*, because this worker has fetched them before, wait for the lead's digests:
those that match them need not be fetched (rule K3).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# A chunk under way is fetched from an idle source as well, if it has taken this many times as long
# as the idle source needs for a chunk, and at least SLOW_S.
SLOWER_BY = 2.0
SLOW_S = 0.5
# The same for an idle source that has had no chunk yet: nothing may be left but one chunk, from a
# source that is cut off, or sends a byte now and then.
SLOW_WITHOUT_PACE_S = 10.0


@dataclass(frozen=True, slots=True)
class ConnectionId:
    """A connection to a source; both are numbers."""

    source: int
    connection: int


class Chunks:
    """The chunks of one state, from one or more sources; thread-safe.

    ``cut`` is called to end a transfer that takes too long; its thread then calls `give_back`.
    ``at_hand``: the digests of chunks that are in memory already. ``num_reused``: how many of these
    are valid.
    """

    def __init__(
        self,
        num_chunks: int,
        lead: int,
        cut: Callable[[ConnectionId], None],
        clock: Callable[[], float] = time.monotonic,
        at_hand: Mapping[int, bytes] | None = None,
    ) -> None:
        self.num_chunks = num_chunks
        self.num_reused = 0
        self._cut = cut
        self._clock = clock
        self._changed = threading.Condition()
        self._at_hand = dict(at_hand or {})  # until they are compared
        self._left = [n for n in reversed(range(num_chunks)) if n not in self._at_hand]
        self._underway: dict[ConnectionId, tuple[int, float]] = {}  # the chunk, since when
        self._arrived: dict[int, tuple[int, bytes]] = {}  # by chunk: its source, its digest
        self._sources = [lead]
        self._lead = lead
        self._digests: list[bytes] | None = None
        self._reported: dict[int, set[int]] = {}
        self._pace_s: dict[int, float] = {}
        self._slow: set[int] = set()
        self._is_stopped = False
        self._was_complete = False

    @property
    def lead(self) -> int:
        """The trusted source; the last one, if all are lost."""
        return self._lead

    @property
    def has_digests(self) -> bool:
        return self._digests is not None

    @property
    def is_complete(self) -> bool:
        """Whether every chunk has arrived and is valid."""
        with self._changed:
            return self._is_complete()

    @property
    def num_arrived(self) -> int:
        """How many chunks have arrived; an invalid one may be fetched again."""
        return len(self._arrived)

    @property
    def sources(self) -> list[int]:
        """The sources that serve at present."""
        with self._changed:
            return list(self._sources)

    def shares(self) -> dict[int, int]:
        """How many chunks came from each source."""
        with self._changed:
            givers = [source for source, _ in self._arrived.values()]
        return {source: givers.count(source) for source in sorted(set(givers))}

    def add_source(self, source: int) -> bool:
        """Add ``source``, as the lead if all others are lost; False if it is too late."""
        with self._changed:
            if self._is_over():
                return False
            if not self._sources:
                self._lead = source
            self._sources.append(source)
            self._changed.notify_all()
            return True

    def remove_source(self, source: int) -> bool:
        """Remove ``source``; False if it was the last one."""
        with self._changed:
            if source in self._sources:
                self._sources.remove(source)
            if self._slow.issuperset(self._sources):
                self._slow.clear()  # a slow source is better than none
            if self._sources and self._lead == source:
                self._lead = self._sources[0]
            self._changed.notify_all()
            return bool(self._sources)

    def stop(self) -> None:
        """Make every `next_chunk` return None."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def wait_until_over(self) -> None:
        """Wait until it is complete or stopped."""
        with self._changed:
            self._changed.wait_for(self._is_over)

    def next_chunk(self, conn: ConnectionId) -> int | None:
        """Wait for a chunk to fetch over ``conn``; None if there will be no more.

        While no chunk is left, another source may still fail, or be too slow.
        """
        while True:
            with self._changed:
                if self._is_over() or conn.source not in self._sources:
                    return None
                if self._left and conn.source not in self._slow:
                    chunk = self._left.pop()
                    self._underway[conn] = chunk, self._clock()
                    return chunk
                slow, wait_s = self._slowest(conn.source)
                if slow is None:
                    self._changed.wait(wait_s)
                    continue
                self._slow.add(slow)
                conns = [other for other in self._underway if other.source == slow]
            for other in conns:
                self._cut(other)

    def is_slow(self, source: int) -> bool:
        """Whether its chunks are fetched from other sources instead."""
        with self._changed:
            return source in self._slow

    def give_back(self, conn: ConnectionId) -> None:
        """The chunk that was taken over ``conn`` has not arrived."""
        with self._changed:
            self._left.append(self._underway.pop(conn)[0])
            self._changed.notify_all()

    def arrived(self, conn: ConnectionId, digest: bytes) -> bool:
        """The chunk taken over ``conn`` has arrived; False: invalid, it is fetched again."""
        with self._changed:
            chunk, began_at = self._underway.pop(conn)
            is_good = self._digests is None or self._digests[chunk] == digest
            if is_good:
                self._arrived[chunk] = (conn.source, digest)
                self._pace_s[conn.source] = self._clock() - began_at
                self._is_complete()  # and stays so, even if the lead is lost next
            else:
                self._left.append(chunk)
            self._changed.notify_all()
            return is_good

    def apply_digests(self, source: int, digests: list[bytes]) -> set[int]:
        """``source`` has sent the digests of all chunks; returns the sources of invalid chunks.

        Ignored if ``source`` is not the lead any more.
        """
        with self._changed:
            if source != self._lead or self._digests is not None:
                return set()
            self._digests = digests
            wrong = [chunk for chunk, (_, seen) in self._arrived.items() if seen != digests[chunk]]
            wrong_sources = {self._arrived.pop(chunk)[0] for chunk in wrong}
            self._left += wrong
            at_hand, self._at_hand = self._at_hand, {}
            for chunk, digest in at_hand.items():
                if digests[chunk] == digest:
                    self._arrived[chunk] = (source, digest)
                    self.num_reused += 1
                else:
                    self._left.append(chunk)
            self._is_complete()
            self._changed.notify_all()
            return wrong_sources

    def drop_at_hand(self) -> None:
        """Fetch chunks that are at hand, and were not compared, like all others."""
        with self._changed:
            self._left += self._at_hand
            self._at_hand = {}
            self._changed.notify_all()

    def in_memory(self) -> dict[int, bytes]:
        """The digests of all chunks whose bytes are in memory now, valid or not."""
        with self._changed:
            return self._at_hand | {n: digest for n, (_, digest) in self._arrived.items()}

    def unreported(self, source: int, limit: int) -> list[int]:
        """Return chunks that ``source`` need not keep and has no report of; marks them reported."""
        with self._changed:
            if self._digests is not None or self._is_complete():
                good = set(self._arrived)
            elif source == self._lead:
                good = {chunk for chunk, (giver, _) in self._arrived.items() if giver == source}
            else:
                return []
            reported = self._reported.setdefault(source, set())
            verified = sorted(good - reported)[:limit]
            reported.update(verified)
            return verified

    def _is_over(self) -> bool:
        return self._is_stopped or self._is_complete()

    def _is_complete(self) -> bool:
        """Whether all have arrived, and the lead of that moment vouched for them."""
        if not self._was_complete and len(self._arrived) >= self.num_chunks:
            givers = {giver for giver, _ in self._arrived.values()}
            self._was_complete = self._digests is not None or givers <= {self._lead}
        return self._was_complete

    def _slowest(self, source: int) -> tuple[int | None, float | None]:
        """A source that ``source`` would overtake; or in how many seconds to check again."""
        if source in self._slow or self._digests is None:
            return None, None
        pace_s = self._pace_s.get(source)
        others = [
            (began_at, conn.source)
            for conn, (_, began_at) in self._underway.items()
            if conn.source != source and conn.source not in self._slow
        ]
        if not others:
            return None, None
        began_at, slowest = min(others)
        slow_s = SLOW_WITHOUT_PACE_S if pace_s is None else max(SLOWER_BY * pace_s, SLOW_S)
        left_s = began_at + slow_s - self._clock()
        return (slowest, None) if left_s <= 0 else (None, left_s)
