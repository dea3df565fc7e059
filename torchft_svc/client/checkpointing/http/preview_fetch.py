"""Fetches what a worker shows of its state, for the heal that follows (rules K1 to K3)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torchft_svc.client.checkpointing.encoding.memory import AtHand, Filling, Staging
from torchft_svc.client.checkpointing.encoding.serialization import MAX_STATE_BYTES
from torchft_svc.client.checkpointing.http.feed import (
    BUSY_PAUSE_S,
    MAX_ATTEMPTS,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    FetchRequest,
    Superfluous,
)
from torchft_svc.client.checkpointing.http.requests import (
    BUSY,
    DEFERRED,
    NUMBER_BYTES,
    PREVIEW_SEED,
    STATE,
)
from torchft_svc.client.checkpointing.http.source import OpenResponse, Refused, Source
from torchft_svc.client.checkpointing.http.wire import DIGEST_BYTES, BadHead, Corrupt
from torchft_svc.core.quorum.worker.catch_up import CatchUp
from torchft_svc.errors import CheckpointError, DeadlineExceeded, PeerError
from torchft_svc.host.quantities import show_bytes

_T = TypeVar("_T")
log = logging.getLogger(__name__)

# How often the step of the source is asked for.
_LOOK_S = 0.25
# Half a million chunks: of 4 MiB, these are more than a worker can hold.
_MAX_DIGESTS_BYTES = 4 << 20
# A thread ends as soon as its connection is cut.
_JOIN_S = 5.0
_PARTS = (STATE, DEFERRED)


@dataclass(frozen=True, slots=True)
class _Digests:
    """What a source answers of one part: its size, that of a chunk, and the digests."""

    num_bytes: int
    chunk_bytes: int
    digests: list[bytes]

    @property
    def form(self) -> tuple[int, int]:
        return self.num_bytes, self.chunk_bytes


class PreviewFetch:
    """Fetches a preview into ``stagings``, which are by the parts; ``cancel`` ends it.

    The chunks of both parts have one numbering, those of the first one first.
    """

    def __init__(self, request: FetchRequest, stagings: dict[str, Staging]) -> None:
        self._request = request
        self._stagings = stagings
        self._source = Source(request.url, request.timeout_s, request.security)
        self._changed = threading.Condition()
        self._machine = CatchUp(())
        self._parts: list[_Part] = []
        self._error: PeerError | None = None
        self._num_workers = request.num_connections  # that fetch chunks

    def cancel(self, why: str) -> None:
        """Make `run` raise soon."""
        self._fail(CheckpointError(self._source.address, why))

    def lose_assigned(self, why: str) -> None:
        """Ignore that: this worker is in no quorum, and no source was assigned."""

    def run(self, check: Callable[[], None]) -> None:
        """Fetch until nothing more is worth fetching; ``check`` is called between chunks.

        Raises:
            PeerError: the source shows nothing, or is lost; what has arrived is kept.
        """
        began_at = time.monotonic()
        threads: list[threading.Thread] = []
        try:
            parts = self._read_all()
            self._prepare(parts)
            self._record(self._read_step(), parts)
            threads = [
                threading.Thread(
                    target=self._work, args=(n,), name=f"torchft-preview-{n}", daemon=True
                )
                for n in range(1, self._request.num_connections + 1)
            ]
            for thread in threads:
                thread.start()
            self._watch(check)
            self._log_outcome(time.monotonic() - began_at)
        finally:
            self._fail(CheckpointError(self._source.address, "it is over"))
            for thread in threads:
                thread.join(_JOIN_S)
            self._source.close()
            if not any(thread.is_alive() for thread in threads):
                self._keep()

    def _watch(self, check: Callable[[], None]) -> None:
        """Read the digests whenever they are wanted, until nothing is left to fetch."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._machine.is_idle or self._error, _LOOK_S)
                if self._error is not None:
                    raise self._error
                if self._machine.is_over and self._machine.is_idle:
                    return
                needs_step = self._machine.is_idle or self._machine.awaits_step
            check()
            if needs_step:
                step = self._read_step()
                with self._changed:
                    wanted = self._machine.wants_digests(step)
                if wanted:
                    self._record(step, self._read_all())

    def _prepare(self, parts: list[_Digests]) -> None:
        """Prepare memory for both parts, with what is at hand from an earlier attempt."""
        sizes: list[int] = []
        at_hand: dict[int, bytes] = {}
        for name, part in zip(_PARTS, parts, strict=True):
            staging = self._stagings[name]
            try:
                filling = staging.pop_filling(part.num_bytes)
            except MemoryError as error:
                raise CheckpointError(self._source.address, str(error)) from error
            first = len(sizes)
            kept = staging.pop_at_hand(*part.form)
            at_hand |= {first + chunk: digest for chunk, digest in kept.items()}
            self._parts.append(_Part(name, filling, part.form, first))
            starts = range(0, part.num_bytes, part.chunk_bytes)
            sizes += [min(part.chunk_bytes, part.num_bytes - start) for start in starts]
        self._machine = CatchUp(sizes, at_hand)

    def _record(self, step: int, parts: list[_Digests]) -> None:
        same = [part.form for part in parts] == [part.form for part in self._parts]
        digests = [digest for part in parts for digest in part.digests] if same else []
        with self._changed:
            self._machine.record_digests(step, digests)
            self._changed.notify_all()

    def _work(self, connection: int) -> None:
        """Fetch chunks over a connection until there will be no more."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._machine.has_left or self._machine.is_over or self._error
                    )
                    chunk = None if self._error else self._machine.next_chunk()
                if chunk is None:
                    return
                try:
                    self._fetch(connection, chunk)
                except Superfluous as error:
                    self._leave_to_others(chunk, str(error))
                    return
        except PeerError as error:
            self._fail(error)
        except Exception as error:
            log.exception("a fetching thread failed")
            self._fail(CheckpointError(self._source.address, f"receiving failed: {error!r}"))

    def _leave_to_others(self, chunk: int, why: str) -> None:
        """End a connection for which the source has no room; the last one ends the fetch.

        Who keeps one for the digests, and waits for another one, would keep others from it.
        """
        with self._changed:
            self._num_workers -= 1
            self._machine.put_back(chunk)
            self._changed.notify_all()
            is_last = not self._num_workers
        if is_last:
            self._fail(CheckpointError(self._source.address, why))

    def _fetch(self, connection: int, number: int) -> None:
        part = next(each for each in reversed(self._parts) if each.first <= number)
        chunk = number - part.first
        view = part.view(chunk)

        def receive(answer: OpenResponse) -> bytes | None:
            if answer.length != len(view) + DIGEST_BYTES:
                raise CheckpointError(self._source.address, "its state has another size now")
            try:
                return answer.wire.read_sealed(view, chunk)
            except Corrupt:  # an update came between two pieces of it
                return None

        digest = self._ask(f"preview/{part.name}/{chunk}", connection, receive)
        with self._changed:
            self._machine.record_chunk(number, digest)
            self._changed.notify_all()

    def _read_step(self) -> int:
        return self._ask("preview", 0, lambda answer: self._parse_number(_read(answer)))

    def _read_all(self) -> list[_Digests]:
        return [self._ask(f"preview/{name}", 0, self._parse) for name in _PARTS]

    def _parse(self, answer: OpenResponse) -> _Digests:
        body = _read(answer)
        size = self._parse_number(body[:NUMBER_BYTES])
        chunk_bytes = self._parse_number(body[NUMBER_BYTES : 2 * NUMBER_BYTES])
        rest = bytes(body[2 * NUMBER_BYTES :])
        is_sized = MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES and 0 <= size < MAX_STATE_BYTES
        if not is_sized or len(rest) != -(-size // chunk_bytes) * DIGEST_BYTES:
            raise CheckpointError(self._source.address, "malformed preview: its sizes")
        starts = range(0, len(rest), DIGEST_BYTES)
        return _Digests(size, chunk_bytes, [rest[at : at + DIGEST_BYTES] for at in starts])

    def _parse_number(self, digits: bytearray) -> int:
        try:
            return int(digits)
        except ValueError as error:
            raise CheckpointError(self._source.address, f"malformed preview: {error}") from error

    def _ask(self, path: str, connection: int, receive: Callable[[OpenResponse], _T]) -> _T:
        """Ask for ``path``, again after a failure that may be one of the line.

        Raises:
            Superfluous: it has no room for this connection beside the first one.
            PeerError: it does not answer, or refuses.
        """
        busy_until = time.monotonic() + self._request.timeout_s
        num_failures = 0
        while True:
            try:
                return receive(self._source.ask(path, connection))
            except Refused as refusal:
                self._source.drop_connection(connection)
                if refusal.status == BUSY and connection > 0:
                    raise Superfluous(str(refusal)) from refusal
                if refusal.status != BUSY or time.monotonic() > busy_until:
                    raise CheckpointError(self._source.address, str(refusal)) from refusal
                time.sleep(BUSY_PAUSE_S)
            except TimeoutError as error:
                limit_s = self._request.timeout_s
                raise DeadlineExceeded("fetching a preview", limit_s, str(error)) from error
            except (BadHead, Corrupt, OSError) as error:
                self._source.drop_connection(connection)
                if self._error is not None:
                    raise self._error from error
                num_failures += 1
                if num_failures >= MAX_ATTEMPTS:
                    raise CheckpointError(self._source.address, str(error)) from error

    def _fail(self, error: PeerError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._source.interrupt()

    def _keep(self) -> None:
        """Keep what is at hand for the heal."""
        at_hand = self._machine.at_hand
        for part in self._parts:
            part.filling.stop()
            digests = {
                chunk: at_hand[part.first + chunk]
                for chunk in range(part.num_chunks)
                if part.first + chunk in at_hand
            }
            self._stagings[part.name].keep(part.filling, AtHand(*part.form, digests))

    def _log_outcome(self, took_s: float) -> None:
        outcome = self._machine.outcome()
        if outcome.is_in_vain:
            log.info(
                "nothing is fetched in advance: %s of %s of the state change with each step, so "
                "the others wait while this group heals",
                show_bytes(outcome.changing),
                show_bytes(outcome.total),
            )
            return
        left = outcome.total - outcome.at_hand
        log.info(
            "%s of %s of the state are at hand, after %.1f s; the others wait for the other %s",
            show_bytes(outcome.at_hand),
            show_bytes(outcome.total),
            took_s,
            show_bytes(left),
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the state that is being fetched; ``first``: the number of its first chunk."""

    name: str
    filling: Filling
    form: tuple[int, int]
    first: int

    @property
    def num_chunks(self) -> int:
        num_bytes, chunk_bytes = self.form
        return -(-num_bytes // chunk_bytes)

    def view(self, chunk: int) -> memoryview:
        num_bytes, chunk_bytes = self.form
        start = chunk * chunk_bytes
        return self.filling.view(num_bytes)[start : start + chunk_bytes]


def _read(answer: OpenResponse) -> bytearray:
    if not DIGEST_BYTES <= answer.length <= _MAX_DIGESTS_BYTES:
        raise BadHead(f"a preview of {answer.length} bytes")
    payload = bytearray(answer.length - DIGEST_BYTES)
    answer.wire.read_sealed(memoryview(payload), PREVIEW_SEED)
    return payload
