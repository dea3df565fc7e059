"""Deals out a state's chunks to the sources that have it, and decides which of them are good.

All sources say that they hold the same state. One of them, the *lead*, is believed: its chunks are
good, and so are those of others that have the digest that it tells for them. Once it has told all
digests, they are the law, whoever comes or goes. Until then another lead can only begin anew with
what it tells, so nobody but the lead hears what has arrived, and everything is still kept by all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# A chunk is asked from another source, when there is nothing else to do, if it has been under way
# for so many times the time that the other source took for one, and for longer than a hiccup.
SLOWER_BY = 2.0
SLOW_S = 0.5


@dataclass(frozen=True, slots=True)
class Way:
    """A connection to a source, both by number."""

    source: int
    connection: int


@dataclass(slots=True)
class _Underway:
    chunk: int
    began_at: float


class Chunks:
    """The chunks of one state, from one or more sources; safe to use from many threads.

    ``cut`` is called to end a transfer that takes too long; its owner then gives the chunk back.
    """

    def __init__(
        self,
        num_chunks: int,
        lead: int,
        cut: Callable[[Way], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_chunks = num_chunks
        self._cut = cut
        self._clock = clock
        self._changed = threading.Condition()
        self._left = list(reversed(range(num_chunks)))
        self._underway: dict[Way, _Underway] = {}
        self._arrived: dict[int, tuple[int, bytes]] = {}  # by chunk: its source, its digest
        self._sources = [lead]
        self._lead = lead
        self._law: list[bytes] | None = None
        self._told: dict[int, set[int]] = {}
        self._pace_s: dict[int, float] = {}
        self._slow: set[int] = set()
        self._is_stopped = False
        self._is_closed = False

    @property
    def lead(self) -> int:
        """The source that is believed; the last one, if all are gone."""
        return self._lead

    @property
    def has_law(self) -> bool:
        return self._law is not None

    @property
    def is_complete(self) -> bool:
        """Every chunk has arrived and is good."""
        with self._changed:
            return self._is_complete()

    @property
    def sources(self) -> list[int]:
        """Those that serve at present."""
        with self._changed:
            return list(self._sources)

    def shares(self) -> dict[int, int]:
        """How many chunks came from each source."""
        with self._changed:
            givers = [source for source, _ in self._arrived.values()]
        return {source: givers.count(source) for source in sorted(set(givers))}

    def join(self, source: int) -> bool:
        """``source`` serves, too; False if it comes too late."""
        with self._changed:
            if self._is_over() or self._is_closed or not self._sources:
                return False
            self._sources.append(source)
            return True

    def leave(self, source: int) -> bool:
        """``source`` does not serve any more; False if it was the last one."""
        with self._changed:
            if self._is_closed:  # what it sent cannot be checked
                sent = [chunk for chunk, (giver, _) in self._arrived.items() if giver == source]
                self._left += [chunk for chunk in sent if self._arrived.pop(chunk)]
            if source in self._sources:
                self._sources.remove(source)
            if self._slow.issuperset(self._sources):
                self._slow.clear()  # slow is better than nobody
            if self._sources and self._lead == source:
                self._lead = self._sources[0]
            self._changed.notify_all()
            return bool(self._sources)

    def go_alone(self) -> list[int]:
        """The lead tells no digests, so nobody else is believed; returns who has to leave.

        What others have sent, also those that have left since, is fetched again.
        """
        with self._changed:
            self._is_closed = True
            others = [chunk for chunk, (giver, _) in self._arrived.items() if giver != self._lead]
            self._left += [chunk for chunk in others if self._arrived.pop(chunk)]
            self._changed.notify_all()
            return [source for source in self._sources if source != self._lead]

    def stop(self) -> None:
        """Nobody fetches any more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def wait_until_over(self) -> None:
        """Wait until it is complete or stopped."""
        with self._changed:
            self._changed.wait_for(self._is_over)

    def take(self, way: Way) -> int | None:
        """The next chunk to fetch over ``way``, as soon as there is one; None: it is over.

        While nothing is left, others may still fail, or be too slow.
        """
        while True:
            with self._changed:
                if self._is_over() or way.source not in self._sources:
                    return None
                if self._left and way.source not in self._slow:
                    chunk = self._left.pop()
                    self._underway[way] = _Underway(chunk, self._clock())
                    return chunk
                slow, wait_s = self._slowest(way.source)
                if slow is None:
                    self._changed.wait(wait_s)
                    continue
                self._slow.add(slow)
                ways = [other for other in self._underway if other.source == slow]
            for other in ways:
                self._cut(other)

    def is_slow(self, source: int) -> bool:
        """Its chunks are asked from others."""
        with self._changed:
            return source in self._slow

    def give_back(self, way: Way) -> None:
        """What was taken over ``way`` has not arrived."""
        with self._changed:
            self._left.append(self._underway.pop(way).chunk)
            self._changed.notify_all()

    def arrived(self, way: Way, digest: bytes) -> bool:
        """What was taken over ``way`` is in its place; False: it differs, and is fetched again."""
        with self._changed:
            under = self._underway.pop(way)
            if self._law is None:  # if it stays so, whoever has to leave may have sent its last
                is_good = not self._is_closed or way.source == self._lead
            else:
                is_good = self._law[under.chunk] == digest
            if is_good:
                self._arrived[under.chunk] = (way.source, digest)
                self._pace_s[way.source] = self._clock() - under.began_at
            else:
                self._left.append(under.chunk)
            self._changed.notify_all()
            return is_good

    def enact(self, source: int, law: list[bytes]) -> set[int]:
        """``source`` tells the digests of all chunks; returns who has sent something else.

        No news if it is not the lead any more.
        """
        with self._changed:
            if source != self._lead or self._law is not None:
                return set()
            self._law = law
            wrong = [chunk for chunk, (_, seen) in self._arrived.items() if seen != law[chunk]]
            liars = {self._arrived.pop(chunk)[0] for chunk in wrong}
            self._left += wrong
            self._changed.notify_all()
            return liars

    def news_for(self, source: int, limit: int) -> list[int]:
        """Chunks that ``source`` need not keep any more, and was not told so; now it is."""
        with self._changed:
            if self._law is not None or self._is_complete():
                good = set(self._arrived)
            elif source == self._lead:
                good = {chunk for chunk, (giver, _) in self._arrived.items() if giver == source}
            else:
                return []
            told = self._told.setdefault(source, set())
            news = sorted(good - told)[:limit]
            told.update(news)
            return news

    def _is_over(self) -> bool:
        return self._is_stopped or self._is_complete()

    def _is_complete(self) -> bool:
        if len(self._arrived) < self.num_chunks:
            return False
        return self._law is not None or all(
            giver == self._lead for giver, _ in self._arrived.values()
        )

    def _slowest(self, source: int) -> tuple[int | None, float | None]:
        """A source that ``source`` would overtake; or in how many seconds to look again."""
        pace_s = self._pace_s.get(source)
        if pace_s is None or source in self._slow or self._law is None:
            return None, None
        others = [
            (under.began_at, way.source)
            for way, under in self._underway.items()
            if way.source != source and way.source not in self._slow
        ]
        if not others:
            return None, None
        began_at, slowest = min(others)
        left_s = began_at + max(SLOWER_BY * pace_s, SLOW_S) - self._clock()
        return (slowest, None) if left_s <= 0 else (None, left_s)
