"""One state while it is being served: live first, from a copy of what is still wanted later.

    live  --detach()-->  detached  --every chunk verified, retire()-->  retired

While it is live, chunks are read from the owner's memory. ``detach`` copies the chunks that not
every announced receiver has verified yet, and then lets go of the owner's memory. A chunk that is
being sent meanwhile simply goes on from the copy: the bytes are the same, so nothing is ever torn.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchft_svc.client.checkpointing.encoding.memory import Memory
from torchft_svc.client.checkpointing.http.wire import MAX_VIEWS, Reading, digest_of

# Receivers come in the number of groups that heal at once; more names than this are not counted.
MAX_RECEIVERS = 1024

# A receiver asks all of its sources as soon as it knows them.
EXTRAS_PATIENCE_S = 5.0


class Gone(Exception):
    """What was asked for was served once, and is not any more; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the owner of a state decides about serving it.

    ``num_receivers``: groups announced to fetch it; ``num_extras``: groups that may fetch a part of
    it, who say so soon if they do (`ServedState.admit`); ``patience_s``: how long the copies are
    kept while nobody makes progress.
    """

    step: int
    num_receivers: int
    chunk_bytes: int
    patience_s: float
    num_extras: int = 0


class ServedState:
    """A state under its ``state_id``; safe to use from many threads."""

    def __init__(
        self,
        offer: Offer,
        description: bytes,
        memory: Memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.offer = offer
        self.description = description
        self.state_id = secrets.token_hex(8)
        self.size = memory.size
        self.num_chunks = -(-memory.size // offer.chunk_bytes)
        self._live: Memory | None = memory
        self._copies: dict[int, memoryview] = {}
        self._retired = ""
        self._verified: list[set[str]] = [set() for _ in range(self.num_chunks)]
        self._receivers: set[str] = set()
        self._extras: set[str] = set()
        self._num_extras = offer.num_extras
        self._extras_until = clock() + EXTRAS_PATIENCE_S
        self._digests: dict[int, bytes] = {}
        self._num_reading_live = 0
        self._changed = threading.Condition()
        self._clock = clock
        self._progress_at = clock()

    @property
    def is_over(self) -> bool:
        """Nothing can be read any more, or everybody announced has it."""
        with self._changed:
            if self._live is not None:
                return False
            if self._retired or self.num_chunks:
                return not self._copies
            return len(self._receivers) >= self.offer.num_receivers

    @property
    def copied_bytes(self) -> int:
        with self._changed:
            return sum(len(copy) for copy in self._copies.values())

    def expires_at(self) -> float:
        """When to call `expire`; later if there is progress until then."""
        until = self._progress_at + self.offer.patience_s
        return min(until, self._extras_until) if self._awaits_extras else until

    def expire(self) -> None:
        """Keep nothing any more for those who did not come, or make no progress."""
        if not self._awaits_extras:
            self.retire(f"no receiver fetched from it for {self.offer.patience_s:.3g} s")
            return
        with self._changed:
            self._num_extras = len(self._extras)
            for chunk in [chunk for chunk in self._copies if not self._is_wanted(chunk)]:
                del self._copies[chunk]

    @property
    def _awaits_extras(self) -> bool:
        return self._num_extras > len(self._extras)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """First byte of ``chunk``, and the one behind its last."""
        start = chunk * self.offer.chunk_bytes
        return start, min(start + self.offer.chunk_bytes, self.size)

    def reader(self, chunk: int) -> Reading:
        """To read ``chunk``: places count from its start.

        Raises:
            Gone: (also while reading) the chunk is not held any more.
        """
        first, _ = self.bounds(chunk)

        @contextmanager
        def reading(start: int, stop: int) -> Iterator[list[memoryview]]:
            memory = self._enter(chunk)
            if isinstance(memory, memoryview):
                yield [memory[start:stop]]
            else:
                try:
                    yield memory.views(first + start, first + stop, MAX_VIEWS)
                finally:
                    self._leave_live()
            self._progress_at = self._clock()  # the peer took bytes, or asked for them

        return reading

    def _enter(self, chunk: int) -> Memory | memoryview:
        with self._changed:
            if self._live is not None:
                self._num_reading_live += 1
                return self._live
            copy = self._copies.get(chunk)
            if copy is None:
                raise Gone(self._retired or f"chunk {chunk} was fetched by all that were announced")
            return copy

    def _leave_live(self) -> None:
        with self._changed:
            self._num_reading_live -= 1
            if not self._num_reading_live:
                self._changed.notify_all()

    def remember(self, chunk: int, digest: bytes) -> None:
        """``digest`` stands behind ``chunk``; it is asked for even when the chunk is let go."""
        self._digests[chunk] = digest

    def digest(self, chunk: int) -> bytes:
        """What `Wire.read_sealed` finds behind ``chunk``; computed once.

        Raises:
            Gone: the chunk is not held any more, and was sent to nobody.
        """
        digest = self._digests.get(chunk)
        if digest is None:
            start, stop = self.bounds(chunk)
            digest = digest_of(self.reader(chunk), stop - start, chunk)
            self.remember(chunk, digest)
        return digest

    def admit(self, receiver: str) -> None:
        """``receiver`` takes a part of the state, so what it has not verified is kept for it.

        Comes too late when nobody is awaited any more: then there is what others wanted kept.
        """
        with self._changed:
            if self._awaits_extras:
                self._extras.add(receiver)

    def verified(self, receiver: str, chunk: int | None) -> None:
        """``receiver`` has ``chunk`` whole; it is let go when all announced receivers do.

        None: it has all there is of a state without tensors.
        """
        with self._changed:
            self._progress_at = self._clock()
            if len(self._receivers) < MAX_RECEIVERS:
                self._receivers.add(receiver)
            if receiver in self._receivers and chunk is not None and chunk < self.num_chunks:
                self._verified[chunk].add(receiver)
                if not self._is_wanted(chunk):
                    self._copies.pop(chunk, None)

    def detach(self) -> None:
        """Let go of the owner's memory, keeping a copy of what is still wanted."""
        for chunk in range(self.num_chunks):
            with self._changed:
                live = self._live
                wanted = self._is_wanted(chunk)
            if live is None:
                break
            if wanted:
                self._keep(chunk, live.copy(*self.bounds(chunk)))
        self._let_live_go()

    def _keep(self, chunk: int, copy: memoryview) -> None:
        with self._changed:
            if self._is_wanted(chunk):
                self._copies[chunk] = copy

    def retire(self, why: str) -> None:
        """Let go of everything; whoever reads is told ``why``."""
        with self._changed:
            self._retired = self._retired or why
            self._copies.clear()
        self._let_live_go()

    def _let_live_go(self) -> None:
        with self._changed:
            self._live = None
            # Readers hold it for one non-blocking call, never while they wait for a peer.
            self._changed.wait_for(lambda: not self._num_reading_live)

    def _is_wanted(self, chunk: int) -> bool:
        verified = self._verified[chunk]
        has_all_announced = len(verified - self._extras) >= self.offer.num_receivers
        has_all_extras = len(verified & self._extras) >= self._num_extras
        return not (self._retired or (has_all_announced and has_all_extras))
