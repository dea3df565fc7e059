"""Fetches from one source: a state's description, its chunks, their digests (rules H3, H4)."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchft_svc.client.checkpointing.encoding.serialization import MAX_DESCRIPTION_BYTES
from torchft_svc.client.checkpointing.http.requests import (
    BUSY,
    DESCRIPTION_SEED,
    DIGESTS_SEED,
    MAX_CLAIMED,
    MAX_FIRST_LINE_BYTES,
    MAX_WAIT_MS,
    STATE,
    TOO_EARLY,
)
from torchft_svc.client.checkpointing.http.source import OpenResponse, Refused, Source
from torchft_svc.client.checkpointing.http.wire import DIGEST_BYTES, BadHead, Corrupt
from torchft_svc.errors import (
    CheckpointError,
    DeadlineExceeded,
    PeerError,
    Unreachable,
)
from torchft_svc.rpc.security import PLAIN, Security

log = logging.getLogger(__name__)

# A chunk that arrives damaged this often is not damaged by chance.
MAX_ATTEMPTS = 3
# Below it, requests would cost more than bytes; far above it, a retry costs too much.
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 << 10, 1 << 30
# How long a refused receiver waits before it asks again.
BUSY_PAUSE_S = 0.1
# A digest takes milliseconds. A source that is silent for longer serves no chunks either.
DIGESTS_TIMEOUT_S = 5.0
# So much it reads and hashes at least, also beside a training; by that time all digests are there.
HASHED_BYTES_PER_S = 1e9
# How much later than requested a source may answer that it has nothing yet.
ANSWER_GRACE_S = 0.5
_FIRST_LINE = re.compile(r"([0-9a-f]{16}) (\d{1,12})", re.ASCII)

# Returns the address of another source of the same state; raises PeerError if that fails.
Lookup = Callable[[], str]


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """What to fetch from where; ``timeout_s`` is the longest time without a byte.

    ``extras`` are more sources of the same state, with at most ``num_connections`` each. ``part``
    is `STATE` or `DEFERRED`.
    """

    url: str
    step: int
    timeout_s: float
    num_connections: int
    extras: tuple[Lookup, ...] = ()
    security: Security = PLAIN
    part: str = STATE
    receiver: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Opening:
    """What a source sends before the first chunk: the state's description and its id."""

    state_id: str
    chunk_bytes: int
    description: bytearray

    def is_of_same_state(self, other: Opening) -> bool:
        return (self.chunk_bytes, self.description) == (other.chunk_bytes, other.description)


class Superfluous(Exception):
    """The source refused this connection, but serves the receiver over others."""


class Feed(Source):
    """A source of a fetch; blocking calls, each over a numbered connection.

    `stop` ends them from another thread.

    Raises:
        AddressError: ``url`` is not the metadata of a worker.
        Unauthorized: one of the two sides is set to TLS, the other is not.
    """

    def __init__(self, url: str, request: FetchRequest, *, is_extra: bool = False) -> None:
        super().__init__(url, request.timeout_s, request.security)
        self._request = request
        self._is_extra = is_extra
        # Separate, so that digests do not wait behind chunks.
        timeout_s = min(request.timeout_s, DIGESTS_TIMEOUT_S)
        self._digests_source = Source(url, timeout_s, request.security)
        self._opening: Opening | None = None
        self._stopped = threading.Event()

    @property
    def opening(self) -> Opening:
        """What `open` returned."""
        assert self._opening is not None
        return self._opening

    def stop(self) -> None:
        """Make every call fail at once, including later ones."""
        self._stopped.set()
        self.interrupt()
        self._digests_source.interrupt()

    def close(self) -> None:
        """Close the connections; they are not used any more."""
        super().close()
        self._digests_source.close()

    def claim(self, num_bytes: int, chunk_bytes: int, at_hand: Mapping[int, bytes]) -> None:
        """Report which chunks this worker has at hand, so that the source need not copy them."""
        entries = [f"{chunk}.{digest.hex()}" for chunk, digest in sorted(at_hand.items())]
        form = f"{self._request.part}/{self._request.step}/{num_bytes}/{chunk_bytes}"
        for at in range(0, len(entries), MAX_CLAIMED):
            digests = ",".join(entries[at : at + MAX_CLAIMED])
            path = f"claim/{form}?receiver={self._request.receiver}&digests={digests}"
            try:
                self.ask(path, 0)
            except (Refused, BadHead, OSError, PeerError) as error:
                log.debug("the source does not learn what is at hand: %s", error)
                self.drop_connection(0)
                return

    def open(self) -> Opening:
        """Wait until the source offers the step, and read the description.

        Raises:
            PeerError: the source is unreachable, refuses us, is past the step, or is malformed.
        """
        first_line, _, description = self._fetch_description().partition(b"\n")
        match = _FIRST_LINE.fullmatch(first_line.decode("latin-1"))
        chunk_bytes = int(match[2]) if match else 0
        if match is None or not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise CheckpointError(self.address, "malformed description: its first line")
        self._opening = Opening(match[1], chunk_bytes, description)
        return self._opening

    def _fetch_description(self) -> bytearray:
        until = time.monotonic() + self._request.timeout_s
        attempts = _Attempts(self.address, "the description")
        while True:
            left_s = until - time.monotonic()
            wait_ms = max(0, min(MAX_WAIT_MS, int(left_s * 1000)))
            path = f"{self._request.part}/{self._request.step}?wait_ms={wait_ms}"
            if self._is_extra:
                path += f"&extra={self._request.receiver}"
            try:
                answer = self.ask(path, 0, wait_ms / 1000 + ANSWER_GRACE_S)
                if answer.length > MAX_DESCRIPTION_BYTES + MAX_FIRST_LINE_BYTES + DIGEST_BYTES:
                    raise BadHead(f"a description of {answer.length} bytes")
                return _read(answer, DESCRIPTION_SEED)
            except Refused as refusal:
                self._wait_after(refusal, left_s, attempts)
            except Unreachable:
                raise
            except TimeoutError as error:
                raise self.too_late(f"waiting for step {self._request.step}") from error
            except (BadHead, Corrupt, OSError) as error:
                self._check()
                self.drop_connection(0)
                attempts.failed(error)

    def _wait_after(self, refusal: Refused, left_s: float, attempts: _Attempts) -> None:
        if refusal.status not in (TOO_EARLY, BUSY):
            self.drop_connection(0)
            attempts.failed(refusal)
        elif left_s <= 0:
            raise self.too_late(f"waiting for step {self._request.step}", refusal.reason)
        if refusal.status == BUSY:
            self.drop_connection(0)
            self._stopped.wait(min(BUSY_PAUSE_S, left_s))
        self._check()

    def fetch_chunk(
        self,
        connection: int,
        chunk: int,
        num_chunks: int,
        view: memoryview,
        verified: list[int],
        is_cut: Callable[[], bool],
    ) -> bytes | None:
        """Fill ``view`` with ``chunk``; returns its digest, or None if it was stopped or cut.

        ``verified``: chunks that the source need not keep; ``is_cut``: whether `cut` was meant.

        Raises:
            Superfluous: the source has enough connections, and serves over the others.
            PeerError, TimeoutError: the source is lost.
        """
        attempts = _Attempts(self.address, f"chunk {chunk} of {num_chunks}")
        path = f"chunk/{self.opening.state_id}/{chunk}{self._query(verified)}"
        busy_until = time.monotonic() + self._request.timeout_s
        while not self._stopped.is_set() and not is_cut():
            try:
                answer = self.ask(path, connection)
                if answer.length != len(view) + DIGEST_BYTES:
                    raise BadHead(f"{answer.length} bytes instead of {len(view) + DIGEST_BYTES}")
                return answer.wire.read_sealed(view, chunk)
            except Refused as refusal:
                if refusal.status == BUSY and connection > 0:
                    raise Superfluous from refusal
                self._after_refusal(refusal, attempts, busy_until)
            except (Unreachable, TimeoutError):
                raise
            except (BadHead, Corrupt, OSError) as error:
                if not self._stopped.is_set() and not is_cut():
                    self._count(attempts, error, connection)
            self.drop_connection(connection)
        return None

    def _count(self, attempts: _Attempts, error: Exception, connection: int) -> None:
        """Give up after too many attempts: the source, or only a connection that it closes.

        With TLS, closing is the only way in which a full source can refuse a connection.
        """
        try:
            attempts.failed(error)
        except CheckpointError:
            if connection > 0 and isinstance(error, ConnectionError):
                raise Superfluous from error
            raise

    def _after_refusal(self, refusal: Refused, attempts: _Attempts, busy_until: float) -> None:
        if refusal.status != BUSY:
            attempts.failed(refusal)
        elif time.monotonic() > busy_until:
            raise self.too_late("receiving a chunk", refusal.reason)
        else:
            self._stopped.wait(BUSY_PAUSE_S)

    def fetch_digests(self, num_chunks: int) -> list[bytes]:
        """The digests of all chunks.

        Raises:
            PeerError: the source is lost.
        """
        attempts = _Attempts(self.address, "fetching the digests")
        source = self._digests_source
        # A source may send a byte now and then, so that no single wait is too long.
        num_bytes = num_chunks * self.opening.chunk_bytes
        limit_s = DIGESTS_TIMEOUT_S + num_bytes / HASHED_BYTES_PER_S
        until = time.monotonic() + limit_s
        alarm = threading.Timer(limit_s, source.interrupt)
        alarm.daemon = True
        alarm.start()
        try:
            return self._ask_digests(source, num_chunks, attempts)
        except CheckpointError as error:
            if time.monotonic() < until:
                raise
            raise self._digests_too_late(limit_s) from error
        finally:
            alarm.cancel()

    def _ask_digests(self, source: Source, num_chunks: int, attempts: _Attempts) -> list[bytes]:
        while True:
            try:
                answer = source.ask(f"digests/{self.opening.state_id}", 0)
                if answer.length != (num_chunks + 1) * DIGEST_BYTES:
                    raise BadHead(f"{answer.length} bytes of digests")
                digests = bytes(_read(answer, DIGESTS_SEED))
                return [digests[8 * n : 8 * n + 8] for n in range(num_chunks)]
            except Refused as refusal:
                attempts.failed(refusal)
                self._stopped.wait(BUSY_PAUSE_S)
            except Unreachable:
                raise
            except TimeoutError as error:
                raise self._digests_too_late(DIGESTS_TIMEOUT_S) from error
            except (BadHead, Corrupt, OSError) as error:
                self._check()
                attempts.failed(error)
            source.drop_connection(0)

    def _digests_too_late(self, limit_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"receiving digests from {self.address}", limit_s)

    def report(self, connection: int, verified: list[int]) -> None:
        """Report to the source which chunks it need not keep, after the last chunk."""
        path = f"done/{self.opening.state_id}{self._query(verified)}"
        try:
            self.ask(path, connection)
        except (Refused, BadHead, OSError, PeerError) as error:
            log.debug("the source could not be informed that all data has arrived: %s", error)

    def _query(self, verified: list[int]) -> str:
        query = f"?receiver={self._request.receiver}"
        if verified:
            query += f"&verified={','.join(map(str, verified))}"
        return query

    def _check(self) -> None:
        if self._stopped.is_set():
            raise CheckpointError(self.address, "it is not needed any more")

    def too_late(self, action: str, reason: str = "") -> DeadlineExceeded:
        return DeadlineExceeded(f"{action} from {self.address}", self._request.timeout_s, reason)


def _read(answer: OpenResponse, seed: int) -> bytearray:
    payload = bytearray(max(answer.length - DIGEST_BYTES, 0))
    answer.wire.read_sealed(memoryview(payload), seed)
    return payload


class _Attempts:
    """Counts failures of one action, and raises when there are too many."""

    def __init__(self, source: str, what: str) -> None:
        self._source = source
        self._what = what
        self._num_failures = 0

    def failed(self, error: Exception) -> None:
        self._num_failures += 1
        log.warning("%s failed (%d of %d): %s", self._what, self._num_failures, MAX_ATTEMPTS, error)
        if self._num_failures >= MAX_ATTEMPTS:
            raise CheckpointError(
                self._source, f"{self._what} failed {MAX_ATTEMPTS} times, last: {error}"
            ) from error
