"""The checkpoint transport over HTTP: serves this worker's state, and fetches another worker's."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar, TypeVar, cast

from torchft_svc.client.checkpointing.encoding.memory import Staging
from torchft_svc.client.checkpointing.encoding.serialization import (
    check_state,
    describe,
    estimate_bytes,
)
from torchft_svc.client.checkpointing.http.feed import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    FetchRequest,
    Lookup,
)
from torchft_svc.client.checkpointing.http.fetch import Fetch
from torchft_svc.client.checkpointing.http.preview import Preview
from torchft_svc.client.checkpointing.http.preview_fetch import PreviewFetch
from torchft_svc.client.checkpointing.http.requests import COPY, DEFERRED, STATE
from torchft_svc.client.checkpointing.http.served import CopySlot, OfferSlot, ServedState
from torchft_svc.client.checkpointing.http.server import CheckpointServer
from torchft_svc.client.checkpointing.transport import CheckpointTransport, StateViewer
from torchft_svc.core.limits import check_not_empty
from torchft_svc.errors import ConfigError
from torchft_svc.host.address import HostPort, resolvable_host
from torchft_svc.rpc.security import Security, security_or_environment
from torchft_svc.settings import positive_s

T = TypeVar("T")
log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(seconds=60)
# With this many chunks, all connections end at about the same time; with more, requests cost more
# than they save (single runs, 2 GB: chunks of 32 MiB were a little faster than 8).
_CHUNKS_AIMED_AT = 64
_USUAL_CHUNK_BYTES = (4 << 20, 32 << 20)
# More connections than cores only take turns; a single one cannot saturate a long link.
DEFAULT_NUM_CONNECTIONS = max(2, min(4, os.cpu_count() or 2))
MAX_NUM_CONNECTIONS = 32


class HTTPTransport(CheckpointTransport[T]):
    """Heals over HTTP; the state is any nesting of containers, plain values and tensors.

    ``send_checkpoint`` returns at once: receivers fetch in the background, first from the live
    tensors, and after ``disallow_checkpoint`` from a copy of what they still need. Timeouts are
    idle timeouts, so a large state over a slow link heals.

    Args:
        timeout: for sending, if ``send_checkpoint`` gets none.
        num_connections: how many connections a receiver uses; with several sources, that many to
            the first of them, and as many in total to the others.
        hostname: the host to advertise (default: the name of this machine).
        bind_host: the address to listen at (default: all interfaces).
        port: the port to listen at; 0: any free one.
        chunk_bytes: the unit of transfer, checks and retries (default: depends on the size).
        security: TLS files and token, for both directions (default: the environment's).

    Raises:
        ConfigError: an invalid number, file or token.
        AddressError: the port cannot be bound.
    """

    can_stripe: ClassVar[bool] = True
    can_defer: ClassVar[bool] = True
    can_preview: ClassVar[bool] = True
    can_copy: ClassVar[bool] = True

    def __init__(
        self,
        timeout: timedelta = DEFAULT_TIMEOUT,
        num_connections: int = DEFAULT_NUM_CONNECTIONS,
        hostname: str | None = None,
        *,
        bind_host: str = "",
        port: int = 0,
        chunk_bytes: int | None = None,
        security: Security | None = None,
    ) -> None:
        _check("num_connections", num_connections, 1, MAX_NUM_CONNECTIONS)
        if chunk_bytes is not None:
            _check("chunk_bytes", chunk_bytes, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
        check_not_empty("hostname", hostname)
        self._timeout_s = positive_s("timeout", timeout)
        self._num_connections = num_connections
        self._chunk_bytes = chunk_bytes
        self._current, self._deferred, self._copy = OfferSlot(), OfferSlot(), CopySlot()
        self._security = security_or_environment(security)
        self._preview = Preview(self._chunk_bytes_of)
        self._server = CheckpointServer(
            {STATE: self._current, DEFERRED: self._deferred, COPY: self._copy},
            self._preview,
            bind_host,
            port,
            self._security,
        )
        self._host = hostname or bind_host or resolvable_host()
        self._lock = threading.Lock()
        self._fetches: set[Fetch | PreviewFetch] = set()
        self._staging, self._deferred_staging = Staging(), Staging()
        self._is_shut_down = False

    def metadata(self) -> str:
        """The URL at which this worker serves; with it the state can be read."""
        scheme = "https" if self._security.serves_tls else "http"
        return f"{scheme}://{HostPort(self._host, self._server.port)}/{self._server.secret}"

    def check_state(self, state: object) -> None:
        check_state(state)

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta | None = None
    ) -> None:
        """See `CheckpointTransport`; ``timeout``: how long to serve without progress."""
        self.send_striped(dst_ranks, [], step, state_dict, timeout)

    def send_striped(
        self,
        dst_ranks: list[int],
        extra_dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: timedelta | None = None,
    ) -> None:
        state = self._to_serve(dst_ranks, extra_dst_ranks, step, state_dict, timeout)
        if state is not None:
            self._deferred.withdraw("the step has begun anew")
            self._current.pass_claims(state)
            self._server.offer(STATE, state)

    def send_deferred(
        self,
        dst_ranks: list[int],
        extra_dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: timedelta | None = None,
    ) -> None:
        state = self._to_serve(dst_ranks, extra_dst_ranks, step, state_dict, timeout)
        if state is not None:
            self._deferred.pass_claims(state)
            state.detach()
            self._server.offer(DEFERRED, state)

    def _to_serve(
        self,
        dst_ranks: list[int],
        extra_dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: timedelta | None,
    ) -> ServedState | None:
        """``state_dict`` as it is served; None if there is no receiver."""
        described = describe(state_dict)
        size = described.memory.size
        chunk_bytes = self._chunk_bytes_of(size)
        if not dst_ranks and not extra_dst_ranks:
            return None
        log.debug(
            "offering step %d (%d bytes) to %s, a part to %s",
            step,
            size,
            dst_ranks,
            extra_dst_ranks,
        )
        return ServedState(
            described,
            step=step,
            num_receivers=len(dst_ranks),
            num_extras=len(extra_dst_ranks),
            chunk_bytes=chunk_bytes,
            idle_timeout_s=self._timeout_s if timeout is None else positive_s("timeout", timeout),
        )

    def disallow_checkpoint(self) -> None:
        for slot in (self._current, self._copy):
            if slot.state is not None:
                slot.state.detach()

    def retract_checkpoint(self) -> None:
        for slot in (self._current, self._deferred, self._copy):
            slot.withdraw("this worker has healed since")

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, why: str) -> None:
        for slot in (self._current, self._deferred):
            slot.refuse(step, why)

    def last_sent_at(self) -> float | None:
        offered = [slot.state for slot in (self._current, self._deferred)]
        states = [state for state in offered if state is not None]
        if all(state.is_fetched for state in states):
            return None
        return max(state.progress_at for state in states)

    def show_preview(self, viewer: StateViewer) -> None:
        self._preview.show(viewer)

    def recv_preview(self, metadata: str, timeout: timedelta, check: Callable[[], None]) -> None:
        request = self._request(STATE, metadata, (), 0, timeout)
        stagings = {STATE: self._staging, DEFERRED: self._deferred_staging}
        fetch = PreviewFetch(request, stagings)
        with self._fetching(fetch):
            fetch.run(check)

    def num_awaiting_copy(self, step: int) -> int:
        return self._copy.num_waiting(step)

    def offer_copy(self, step: int, state_dict: T) -> None:
        receivers = list(range(self._copy.num_waiting(step)))
        state = self._to_serve(receivers, [], step, state_dict, None)
        if state is not None:
            self._server.offer(COPY, state)

    def recv_copy(
        self,
        metadata: str,
        above: int,
        timeout: timedelta,
        on_offer: Callable[[], object] = lambda: None,
    ) -> T:
        request = self._request(COPY, metadata, (), above, timeout)
        return self._fetch(request, Staging(), on_offer)

    def expect_checkpoint(self, like: T | None) -> None:
        with self._lock:
            if like is None:
                self._deferred_staging.expect(0)
            if not self._is_shut_down:
                self._staging.expect(0 if like is None else estimate_bytes(like))

    def wait_until_prepared(self, timeout: timedelta) -> bool:
        """Wait for the memory that `expect_checkpoint` requested; False if it takes too long."""
        return self._staging.wait(positive_s("timeout", timeout))

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        return self.recv_striped(src_rank, metadata, (), step, timeout)

    def recv_striped(
        self,
        src_rank: int,
        metadata: str,
        extras: Sequence[Lookup],
        step: int,
        timeout: timedelta,
    ) -> T:
        log.debug("fetching step %d from group %d and %d more", step, src_rank, len(extras))
        request = self._request(STATE, metadata, extras, step, timeout)
        return self._fetch(request, self._staging)

    def recv_deferred(
        self,
        src_rank: int,
        metadata: str,
        extras: Sequence[Lookup],
        step: int,
        timeout: timedelta,
    ) -> T:
        request = self._request(DEFERRED, metadata, extras, step, timeout)
        return self._fetch(request, self._deferred_staging)

    def _request(
        self,
        part: str,
        metadata: str,
        extras: Sequence[Lookup],
        step: int,
        timeout: timedelta,
    ) -> FetchRequest:
        return FetchRequest(
            metadata,
            step,
            positive_s("timeout", timeout),
            self._num_connections,
            extras=tuple(extras),
            security=self._security,
            part=part,
        )

    def _fetch(
        self,
        request: FetchRequest,
        staging: Staging,
        on_offer: Callable[[], object] = lambda: None,
    ) -> T:
        fetch = Fetch(request, staging, on_offer)
        with self._fetching(fetch):
            return cast(T, fetch.run())

    @contextmanager
    def _fetching(self, fetch: Fetch | PreviewFetch) -> Iterator[None]:
        """Let `interrupt_receive` end ``fetch`` inside the block."""
        with self._lock:
            if self._is_shut_down:
                raise ConfigError("transport", "shut down", "a transport is used after shutdown()")
            self._fetches.add(fetch)
        try:
            yield
        finally:
            with self._lock:
                self._fetches.discard(fetch)
                if self._is_shut_down:  # what has arrived was kept for a heal
                    self._free_memory()

    def interrupt_receive(self, why: str) -> None:
        with self._lock:
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.cancel(why)

    def lose_source(self, why: str) -> None:
        with self._lock:
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.lose_assigned(why)

    def progress(self) -> tuple[int, int]:
        with self._lock:
            heals = [fetch for fetch in self._fetches if isinstance(fetch, Fetch)]
            found = [fetch.progress() for fetch in heals]
        return sum(received for received, _ in found), sum(size for _, size in found)

    def shutdown(self, wait: bool = True) -> None:
        with self._lock:
            self._is_shut_down = True
        self.interrupt_receive("this worker is shutting down")
        self._free_memory()
        self._server.close(wait)

    def _free_memory(self) -> None:
        """Free what was prepared, or kept, for states that are to arrive."""
        for staging in (self._staging, self._deferred_staging):
            staging.expect(0)

    def _chunk_bytes_of(self, num_bytes: int) -> int:
        return self._chunk_bytes or _usual_chunk_bytes(num_bytes)

    @property
    def copied_bytes(self) -> int:
        """Memory held at present for receivers that have not fetched everything."""
        states = [self._current.state, self._deferred.state, self._copy.state]
        return sum(state.copied_bytes for state in states if state is not None)

    def __enter__(self) -> HTTPTransport[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _usual_chunk_bytes(size: int) -> int:
    low, high = _USUAL_CHUNK_BYTES
    return max(low, min(high, size // _CHUNKS_AIMED_AT))


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(name, value, f"it must be from {low} to {high}")
