"""The states that a worker serves: first from live memory, later from copies of what is needed.

    live  --detach()-->  detached  --every chunk verified, retire()-->  retired

While it is live, chunks are read from the owner's memory. ``detach`` copies the chunks that not
every announced receiver has verified yet, and then releases the owner's memory. A chunk that is
being sent meanwhile continues from the copy: the bytes are the same. Chunks that all of
them *claim* to have at hand, with the digests of the same bytes, are not copied (rule K3).
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torchft_svc.client.checkpointing.encoding.memory import Memory
from torchft_svc.client.checkpointing.encoding.serialization import Described
from torchft_svc.client.checkpointing.http.wire import MAX_VIEWS, Reading, digest_of
from torchft_svc.client.checkpointing.transport import why_not_offered

# There are as many receivers as groups that heal at once; more names than this are ignored.
MAX_RECEIVERS = 1024

# Receivers of one state that report what they have at hand: groups that heal at once.
MAX_CLAIMS = 16

# A step of the source waits while chunks are hashed and copied; more threads than these would wait
# for the memory.
MAX_DETACHING_THREADS = 4

# A receiver contacts all of its sources as soon as it knows them.
EXTRAS_TIMEOUT_S = 5.0

# A receiver of a copy that has asked for nothing and received nothing for so long delays no other.
STANDSTILL_S = 5.0


class Gone(Exception):
    """The requested state or chunk is not served any more; the message says why."""


class NotOffered(Exception):
    """The requested step has not been offered yet."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """A state's step, its bytes, and those of a chunk."""

    step: int
    num_bytes: int
    chunk_bytes: int


class ServedState:
    """A state under its ``state_id``; thread-safe.

    ``num_receivers``: groups that will fetch it; ``num_extras``: groups that may fetch a part of
    it, and announce that soon (`admit`); ``idle_timeout_s``: how long copies are kept without
    progress; ``progress_at``: when a receiver last got or reported something.
    """

    def __init__(
        self,
        described: Described,
        *,
        step: int,
        num_receivers: int,
        chunk_bytes: int,
        idle_timeout_s: float,
        num_extras: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step = step
        self.chunk_bytes = chunk_bytes
        self.idle_timeout_s = idle_timeout_s
        self.description = described.description
        self.state_id = secrets.token_hex(8)
        self.size = described.memory.size
        self.num_chunks = -(-self.size // chunk_bytes)
        self._num_receivers = num_receivers
        self._live: Memory | None = described.memory
        self._copies: dict[int, memoryview] = {}
        self._retired = ""
        self._verified: list[set[str]] = [set() for _ in range(self.num_chunks)]
        self._receivers: set[str] = set()
        self._extras: set[str] = set()
        self._num_extras = num_extras
        self._extras_until = clock() + EXTRAS_TIMEOUT_S
        self._digests: dict[int, bytes] = {}
        self._hashing: set[int] = set()  # chunks of which a thread computes the digest
        self._claims: dict[str, Mapping[int, bytes]] = {}
        self._not_copied: set[int] = set()  # because of them; until the receivers confirm that
        self._num_reading_live = 0
        self._changed = threading.Condition()
        self._clock = clock
        self.progress_at = clock()

    @property
    def is_over(self) -> bool:
        """Whether nothing can be read any more, or all receivers have it."""
        with self._changed:
            if self._live is not None:
                return False
            if self._retired or self.num_chunks:
                return not self._copies and not self._not_copied
            return self._have_all_asked

    @property
    def is_fetched(self) -> bool:
        """Whether no receiver lacks a part of the state, or can get it any more."""
        with self._changed:
            if self._retired or self.num_chunks:
                return not any(map(self._is_wanted, range(self.num_chunks)))
            return self._have_all_asked

    @property
    def _have_all_asked(self) -> bool:
        return len(self._receivers) >= self._num_receivers + self._num_extras

    @property
    def copied_bytes(self) -> int:
        with self._changed:
            return sum(len(copy) for copy in self._copies.values())

    def is_being_fetched(self) -> bool:
        """Whether a receiver has made progress lately, and does not have everything."""
        return not self.is_over and self._clock() - self.progress_at < STANDSTILL_S

    def expires_at(self) -> float:
        """The time at which to call `expire`; progress moves it to a later time."""
        until = self.progress_at + self.idle_timeout_s
        return min(until, self._extras_until) if self._awaits_extras else until

    def expire(self) -> None:
        """Drop what is kept for receivers that did not arrive, or make no progress."""
        if not self._awaits_extras:
            self.retire(f"no receiver fetched from it for {self.idle_timeout_s:.3g} s")
            return
        with self._changed:
            self._num_extras = len(self._extras)
            for chunk in {*self._copies, *self._not_copied}:
                self._drop_unwanted(chunk)

    @property
    def _awaits_extras(self) -> bool:
        return self._num_extras > len(self._extras)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The start and the end of ``chunk`` in bytes."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.size)

    def reader(self, chunk: int) -> Reading:
        """A reader of ``chunk``; offsets count from its start.

        Raises:
            Gone: (also while reading) the chunk is not kept any more.
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
            self.progress_at = self._clock()  # the peer received or requested bytes

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
        """Keep the ``digest`` of ``chunk``; it may be requested after the chunk was dropped."""
        self._digests[chunk] = digest

    def digest(self, chunk: int) -> bytes:
        """The digest that `Wire.send_sealed` sends after ``chunk``; computed once.

        A thread that wants the same digest meanwhile waits for it.

        Raises:
            Gone: the chunk is not kept any more, and was never sent.
        """
        with self._changed:
            self._changed.wait_for(lambda: chunk not in self._hashing)
            digest = self._digests.get(chunk)
            if digest is not None:
                return digest
            self._hashing.add(chunk)
        try:
            start, stop = self.bounds(chunk)
            digest = digest_of(self.reader(chunk), stop - start, chunk)
            self.remember(chunk, digest)
            return digest
        finally:
            with self._changed:
                self._hashing.discard(chunk)
                self._changed.notify_all()

    def admit(self, receiver: str) -> None:
        """``receiver`` fetches a part of the state: keep what it has not verified.

        Ignored if it is too late: then only what other receivers need is kept.
        """
        with self._changed:
            if self._awaits_extras:
                self._extras.add(receiver)

    def verified(self, receiver: str, chunk: int | None) -> None:
        """``receiver`` has ``chunk``, which is dropped once all announced receivers have it.

        None: it has the whole of a state without tensors.
        """
        with self._changed:
            self.progress_at = self._clock()
            if len(self._receivers) < MAX_RECEIVERS:
                self._receivers.add(receiver)
            if receiver in self._receivers and chunk is not None and chunk < self.num_chunks:
                self._verified[chunk].add(receiver)
                self._drop_unwanted(chunk)

    def _drop_unwanted(self, chunk: int) -> None:
        if not self._is_wanted(chunk):
            self._copies.pop(chunk, None)
            self._not_copied.discard(chunk)

    def claim(self, receiver: str, digests: Mapping[int, bytes]) -> None:
        """``receiver`` has the chunks with these digests at hand."""
        with self._changed:
            if len(self._claims) < MAX_CLAIMS:
                self._claims[receiver] = digests

    def drop_claim(self, receiver: str) -> None:
        """``receiver`` is gone, or has nothing at hand any more: copy what others need."""
        with self._changed:
            self._claims.pop(receiver, None)

    def _is_at_hand(self, chunk: int) -> bool:
        """Whether all receivers have ``chunk``: nobody will fetch it."""
        with self._changed:
            claims = {
                receiver: digests[chunk]
                for receiver, digests in self._claims.items()
                if chunk in digests
            }
            having = set(self._verified[chunk])
            num = self._num_receivers + self._num_extras
        if not claims or len(having | claims.keys()) < num:
            return False
        with suppress(Gone):
            digest = self.digest(chunk)
            having |= {receiver for receiver, claimed in claims.items() if claimed == digest}
        if len(having) < num:
            return False
        with self._changed:
            if self._is_wanted(chunk):
                self._not_copied.add(chunk)
        return True

    def detach(self) -> None:
        """Release the owner's memory, and keep what is still needed; cheap if it was called before,
        and for what is a copy of a device's memory already."""
        if self._live is None and not self._num_reading_live:
            return
        num_threads = min(MAX_DETACHING_THREADS, os.cpu_count() or 1, self.num_chunks)
        if num_threads < 2 or not self._detach_on(num_threads):
            for chunk in range(self.num_chunks):
                self._detach_chunk(chunk)
        self._let_live_go()

    def _detach_on(self, num_threads: int) -> bool:
        """Detach all chunks on so many threads; False if that fails, as without a free thread."""
        try:
            with ThreadPoolExecutor(num_threads, "torchft-detach") as pool:
                for _ in pool.map(self._detach_chunk, range(self.num_chunks)):
                    pass  # an error is raised here
        except RuntimeError:
            return False
        return True

    def _detach_chunk(self, chunk: int) -> None:
        """Copy ``chunk`` if a receiver still needs it from here."""
        with self._changed:
            live = self._live
            wanted = self._is_wanted(chunk)
        if live is not None and wanted and not self._is_at_hand(chunk):
            self._keep_copy(chunk, live.keep(*self.bounds(chunk)))

    def _keep_copy(self, chunk: int, copy: memoryview) -> None:
        with self._changed:
            if self._is_wanted(chunk):
                self._copies[chunk] = copy

    def retire(self, why: str) -> None:
        """Drop everything; readers get ``why`` as an error."""
        with self._changed:
            self._retired = self._retired or why
            self._copies.clear()
            self._not_copied.clear()
        self._let_live_go()

    def _let_live_go(self) -> None:
        with self._changed:
            self._live = None
            # A reader holds it for one non-blocking call, never while it waits for a peer.
            self._changed.wait_for(lambda: not self._num_reading_live)

    def _is_wanted(self, chunk: int) -> bool:
        verified = self._verified[chunk]
        has_all_announced = len(verified - self._extras) >= self._num_receivers
        has_all_extras = len(verified & self._extras) >= self._num_extras
        return not (self._retired or (has_all_announced and has_all_extras))


@dataclass(frozen=True, slots=True)
class _Claim:
    """The chunks that a receiver has at hand, by their digests, while it ``is_there``."""

    digests: dict[int, bytes]
    is_there: Callable[[], bool]


class OfferSlot:
    """Holds the state that was offered last; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state: ServedState | None = None
        self._newest_step = -1
        self._refused: tuple[int, str] | None = None
        self._claims: dict[tuple[str, StateForm], _Claim] = {}
        self._closed = False

    def claim(
        self,
        receiver: str,
        form: StateForm,
        digests: Mapping[int, bytes],
        is_there: Callable[[], bool],
    ) -> None:
        """``receiver`` has chunks of such a state at hand, and may report more of them.

        A claim counts for one step, and while the receiver ``is_there``: another one may heal to
        the same step, and would not get what nobody seemed to need.
        """
        with self._changed:
            for key in [key for key in self._claims if key[1].step != form.step]:
                del self._claims[key]
            claim = self._claims.setdefault((receiver, form), _Claim({}, is_there))
            claim.digests.update(digests)
            while len(self._claims) > MAX_CLAIMS:
                del self._claims[next(iter(self._claims))]
            state = self._state
        if state is not None:
            self.pass_claims(state)

    def pass_claims(self, state: ServedState) -> None:
        """Inform ``state``, which is offered or will be, of what its receivers have at hand."""
        with self._changed:
            claims = list(self._claims.items())
        for (receiver, form), claim in claims:
            if form == StateForm(state.step, state.size, state.chunk_bytes):
                if claim.is_there():
                    state.claim(receiver, claim.digests)
                else:
                    self.drop_claims(receiver)

    def drop_claims(self, receiver: str) -> None:
        """Forget what ``receiver`` has claimed: its connection has ended."""
        with self._changed:
            for key in [key for key in self._claims if key[0] == receiver]:
                del self._claims[key]
            state = self._state
        if state is not None:
            state.drop_claim(receiver)

    @property
    def state(self) -> ServedState | None:
        return self._state

    def offer(self, state: ServedState) -> None:
        """Serve ``state`` from now on, in place of the previous one."""
        with self._changed:
            before, self._state = self._state, state
            self._newest_step = state.step
            self._refused = None
            self._changed.notify_all()
        if before is not None:
            before.retire(f"step {state.step} is served now")

    def withdraw(self, why: str) -> None:
        """Serve nothing until another state is offered, possibly of the same step."""
        with self._changed:
            state, self._refused = self._state, None
        if state is not None:
            state.retire(why)

    def refuse(self, step: int, why: str) -> None:
        """The state of ``step`` cannot be offered, unless `offer` is called for it later."""
        with self._changed:
            self._refused = step, why
            self._changed.notify_all()

    def wait_for(self, step: int, wait_s: float) -> ServedState:
        """Wait until the state of ``step`` is offered, and return it.

        A state of the newest step that is over may be offered again, because the step was
        discarded; so this waits for that, too.

        Raises:
            Gone: a newer step was offered already, or this one cannot be offered.
            NotOffered: it was not offered within ``wait_s``.
        """
        until = time.monotonic() + wait_s
        with self._changed:
            while True:
                if self._closed:
                    raise Gone("this worker is shutting down")
                if step < self._newest_step:
                    raise Gone(f"step {step} is gone, the newest is {self._newest_step}")
                state = self._state
                if state is not None and state.step == step and not state.is_over:
                    return state
                if self._refused is not None and self._refused[0] == step:
                    raise Gone(why_not_offered(*self._refused))
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise NotOffered(
                        f"step {step} is not offered, the newest was {self._newest_step}"
                    )
                self._changed.wait(left_s)

    def by_id(self, state_id: str) -> ServedState:
        """The state that is served under ``state_id``.

        Raises:
            Gone: another state is served now, or none.
        """
        state = self.state
        if state is None or state.state_id != state_id:
            raise Gone("another state is served now")
        return state

    def expire(self, now: float) -> float | None:
        """Drop a state that was kept too long without progress; return when to check again."""
        state = self.state
        if state is None or state.is_over:
            return None
        if now >= state.expires_at():
            state.expire()
        return None if state.is_over else state.expires_at()

    def close(self) -> None:
        """Drop everything; waiting receivers get an error."""
        with self._changed:
            self._closed = True
            state = self._state
            self._changed.notify_all()
        if state is not None:
            state.retire("this worker is shutting down")


class CopySlot(OfferSlot):
    """Holds the copy that was offered last, for holders that want any step above their own."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[int] = []  # the steps above which holders wait for one

    def num_waiting(self, step: int) -> int:
        """Return how many holders wait for a copy, and would fetch that of ``step``.

        While one of them still fetches the last copy, which the next one would replace: 0. So a
        slow holder gets fewer copies beside a fast one, and not none.
        """
        state = self._state
        if state is not None and state.is_being_fetched():
            return 0
        return sum(above < step for above in self._waiting)

    def wait_for(self, step: int, wait_s: float) -> ServedState:
        """Wait until a state above ``step`` is offered, and return it.

        Raises:
            Gone: this worker is shutting down.
            NotOffered: none was offered within ``wait_s``.
        """
        with self._changed:
            self._waiting.append(step)
            try:
                self._changed.wait_for(lambda: self._closed or self._newer_than(step), wait_s)
            finally:
                self._waiting.remove(step)
            if self._closed:
                raise Gone("this worker is shutting down")
            state = self._newer_than(step)
            if state is None:
                raise NotOffered(f"no copy above step {step} is offered")
            return state

    def _newer_than(self, step: int) -> ServedState | None:
        state = self._state
        return state if state is not None and state.step > step and not state.is_over else None
