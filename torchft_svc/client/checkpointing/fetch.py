"""Fetches a state: its description first, then its chunks over several connections at once."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchft_svc.client.checkpointing.requests import (
    BUSY,
    DESCRIPTION_SEED,
    GONE,
    MAX_FIRST_LINE_BYTES,
    MAX_WAIT_MS,
    TOO_EARLY,
)
from torchft_svc.client.checkpointing.serialization import MAX_DESCRIPTION_BYTES, parse
from torchft_svc.client.checkpointing.source import Answer, Refused, Source
from torchft_svc.client.checkpointing.staging import Staging
from torchft_svc.client.checkpointing.wire import DIGEST_BYTES, BadHead, Corrupt
from torchft_svc.errors import CheckpointError, DeadlineExceeded, PeerError, Unreachable
from torchft_svc.rpc.security import PLAIN, Security

log = logging.getLogger(__name__)

# A chunk that arrives damaged this often is not bad luck.
MAX_ATTEMPTS = 3
# Below it, requests would cost more than bytes; far above it, a retry costs too much.
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 << 10, 1 << 30
# How long a receiver that was turned away waits before it asks again.
BUSY_PAUSE_S = 0.1
_FIRST_LINE = re.compile(r"([0-9a-f]{16}) (\d{1,12})", re.ASCII)
# How much later than it was asked to a source may say that it has nothing yet.
ANSWER_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class Order:
    """What to fetch from where; ``timeout_s`` is the longest time without a byte."""

    url: str
    step: int
    timeout_s: float
    num_connections: int
    security: Security = PLAIN
    receiver: str = field(default_factory=lambda: secrets.token_hex(8))


class Fetch:
    """One attempt to receive a state; ``cancel`` ends it from another thread."""

    def __init__(self, order: Order, staging: Staging | None = None) -> None:
        self._order = order
        self._staging = staging or Staging()
        self._source = Source(order.url, order.timeout_s, order.security)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: PeerError | None = None
        self._left: list[int] = []

    def cancel(self, why: str) -> None:
        self._fail(CheckpointError(self._source.address, why))

    def run(self) -> Any:
        """Receive the state.

        Raises:
            Unreachable: nobody answers there.
            Unauthorized: the two sides do not trust each other; says what to set.
            DeadlineExceeded: no byte came for ``timeout_s``.
            CheckpointError: it is gone, malformed, or keeps arriving damaged.
        """
        began_at = time.monotonic()
        try:
            first_line, _, description = self._fetch_description().partition(b"\n")
            plan = parse(description, self._source.address)
            chunk_bytes, state_id = self._parse_first_line(first_line.decode("latin-1"))
            with self._memory(plan.size) as memory:
                self._fetch_chunks(_Target(memory, chunk_bytes, state_id))
        finally:
            self._source.close()
        state = plan.rebuild(memory, self._source.address)
        log.info(
            "received step %d: %.3f GB in %.3f s",
            self._order.step,
            plan.size / 1e9,
            time.monotonic() - began_at,
        )
        return state

    def _fetch_description(self) -> bytearray:
        until = time.monotonic() + self._order.timeout_s
        attempts = _Attempts(self._source.address, "the description")
        while True:
            left_s = until - time.monotonic()
            wait_ms = max(0, min(MAX_WAIT_MS, int(left_s * 1000)))
            path = f"state/{self._order.step}?wait_ms={wait_ms}"
            try:
                answer = self._source.ask(path, 0, wait_ms / 1000 + ANSWER_GRACE_S)
                if answer.length > MAX_DESCRIPTION_BYTES + MAX_FIRST_LINE_BYTES + DIGEST_BYTES:
                    raise BadHead(f"a description of {answer.length} bytes")
                return self._read(answer, DESCRIPTION_SEED)
            except Refused as refusal:
                self._wait_after(refusal, left_s, attempts)
            except Unreachable:
                raise
            except TimeoutError as error:
                raise self._too_late(f"waiting for step {self._order.step}") from error
            except (BadHead, Corrupt, OSError) as error:
                self._check()
                self._source.drop(0)
                attempts.failed(error)

    def _read(self, answer: Answer, seed: int) -> bytearray:
        payload = bytearray(max(answer.length - DIGEST_BYTES, 0))
        answer.wire.read_sealed(memoryview(payload), seed)
        return payload

    def _wait_after(self, refusal: Refused, left_s: float, attempts: _Attempts) -> None:
        if refusal.status == GONE:
            raise CheckpointError(self._source.address, refusal.reason) from refusal
        if refusal.status not in (TOO_EARLY, BUSY):
            self._source.drop(0)
            attempts.failed(refusal)
        elif left_s <= 0:
            raise self._too_late(f"waiting for step {self._order.step}", refusal.reason)
        if refusal.status == BUSY:
            self._source.drop(0)
            self._stop.wait(min(BUSY_PAUSE_S, left_s))
        self._check()

    def _parse_first_line(self, first_line: str) -> tuple[int, str]:
        match = _FIRST_LINE.fullmatch(first_line)
        chunk_bytes = int(match[2]) if match else 0
        if match is None or not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise CheckpointError(self._source.address, "malformed description: its first line")
        return chunk_bytes, match[1]

    @contextmanager
    def _memory(self, num_bytes: int) -> Iterator[memoryview]:
        """Memory to receive into; while this is open, pages are made ready ahead of bytes."""
        try:
            filling = self._staging.take(num_bytes)
        except MemoryError as error:
            raise CheckpointError(self._source.address, str(error)) from error
        try:
            yield filling.view(num_bytes)
        finally:
            filling.stop()

    def _fetch_chunks(self, target: _Target) -> None:
        self._left = list(reversed(range(target.num_chunks)))
        num_workers = max(1, min(self._order.num_connections, target.num_chunks))
        threads = [
            threading.Thread(
                target=self._work,
                args=(number, target),
                name=f"torchft-fetch-{number}",
                daemon=True,
            )
            for number in range(1, num_workers)
        ]
        for thread in threads:
            thread.start()
        self._work(0, target)
        for thread in threads:
            thread.join()
        while self._left and not self._stop.is_set():  # chunks that were given back meanwhile
            self._work(0, target)
        self._check()

    def _work(self, connection: int, target: _Target) -> None:
        """Fetch chunks over ``connection`` until there are none, or somebody failed."""
        try:
            self._fetch_all(connection, target)
        except PeerError as error:
            self._fail(error)
        except TimeoutError:
            self._fail(self._too_late("receiving a chunk"))
        except Exception as error:
            log.exception("a fetching thread failed")
            self._fail(CheckpointError(self._source.address, f"receiving failed: {error!r}"))

    def _fetch_all(self, connection: int, target: _Target) -> None:
        verified = ""
        while (chunk := self._take()) is not None:
            if not self._fetch_chunk(connection, target, chunk, verified):
                self._give_back(chunk)
                return
            verified = f"&verified={chunk}"
        if verified or not target.num_chunks:
            self._report(connection, target, verified)

    def _take(self) -> int | None:
        with self._lock:
            return self._left.pop() if self._left and not self._stop.is_set() else None

    def _give_back(self, chunk: int) -> None:
        with self._lock:
            self._left.append(chunk)

    def _fetch_chunk(self, connection: int, target: _Target, chunk: int, verified: str) -> bool:
        """True when ``chunk`` is in its place; False if this connection can not go on."""
        attempts = _Attempts(self._source.address, f"chunk {chunk} of {target.num_chunks}")
        path = f"chunk/{target.state_id}/{chunk}?receiver={self._order.receiver}{verified}"
        view = target.view(chunk)
        busy_until = time.monotonic() + self._order.timeout_s
        while not self._stop.is_set():
            try:
                answer = self._source.ask(path, connection)
                if answer.length != len(view) + DIGEST_BYTES:
                    raise BadHead(f"{answer.length} bytes instead of {len(view) + DIGEST_BYTES}")
                answer.wire.read_sealed(view, chunk)
                return True
            except Refused as refusal:
                if refusal.status == BUSY and connection > 0:
                    return False  # one connection is enough
                self._after_refusal(refusal, attempts, busy_until)
            except (Unreachable, TimeoutError):
                raise
            except (BadHead, Corrupt, OSError) as error:
                if not self._stop.is_set():
                    attempts.failed(error)
            self._source.drop(connection)
        return False

    def _after_refusal(self, refusal: Refused, attempts: _Attempts, busy_until: float) -> None:
        if refusal.status == GONE:
            raise CheckpointError(self._source.address, refusal.reason) from refusal
        if refusal.status != BUSY:
            attempts.failed(refusal)
        elif time.monotonic() > busy_until:
            raise self._too_late("receiving a chunk", refusal.reason)
        else:
            self._stop.wait(BUSY_PAUSE_S)

    def _report(self, connection: int, target: _Target, verified: str) -> None:
        """Tell the source about the last chunk, so that it can let go of it."""
        path = f"done/{target.state_id}?receiver={self._order.receiver}{verified}"
        try:
            self._source.ask(path, connection)
        except (Refused, BadHead, OSError) as error:
            log.debug("the source did not hear that all is received: %s", error)

    def _fail(self, error: PeerError) -> None:
        with self._lock:
            self._error = self._error or error
        self._stop.set()
        self._source.interrupt()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _too_late(self, action: str, reason: str = "") -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{action} from {self._source.address}", self._order.timeout_s, reason
        )


@dataclass(frozen=True, slots=True)
class _Target:
    memory: memoryview
    chunk_bytes: int
    state_id: str

    @property
    def num_chunks(self) -> int:
        return -(-len(self.memory) // self.chunk_bytes)

    def view(self, chunk: int) -> memoryview:
        return self.memory[chunk * self.chunk_bytes : (chunk + 1) * self.chunk_bytes]


class _Attempts:
    """Counts failures of one thing, and gives up when there are too many."""

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
