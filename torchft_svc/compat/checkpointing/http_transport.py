"""`torchft.checkpointing.http_transport`: the transport over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torchft_svc.client.checkpointing.http.transport import (
    DEFAULT_NUM_CONNECTIONS,
    MAX_NUM_CONNECTIONS,
)
from torchft_svc.client.checkpointing.http.transport import HTTPTransport as NativeTransport
from torchft_svc.compat.errors import public_errors

T = TypeVar("T")
# Whoever names no receiver serves whoever comes.
_ANYBODY = [0]


@dataclass(frozen=True)
class _Offer(Generic[T]):
    dst_ranks: list[int]
    state: T
    timeout: timedelta | None


class HTTPTransport(NativeTransport[T]):
    """The native transport, by the arguments of the public release.

    Args:
        timeout: the longest time without progress.
        num_chunks: how many connections a receiver uses; 0: the native default.
    """

    def __init__(self, timeout: timedelta, num_chunks: int = 0) -> None:
        connections = min(num_chunks, MAX_NUM_CONNECTIONS) or DEFAULT_NUM_CONNECTIONS
        super().__init__(timeout, connections)
        self._offer: _Offer[T] | None = None

    def address(self) -> str:
        """Return the URL at which this worker serves."""
        return self.metadata()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta | None = None
    ) -> None:
        """Serve ``state_dict`` as the state of ``step``."""
        receivers = dst_ranks or _ANYBODY
        self._offer = _Offer(receivers, state_dict, timeout)
        super().send_checkpoint(receivers, step, state_dict, timeout)

    def allow_checkpoint(self, step: int) -> None:
        """Serve the last state that was sent, as that of ``step``."""
        offer = self._offer
        if offer is not None:
            super().send_checkpoint(offer.dst_ranks, step, offer.state, offer.timeout)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch the state of ``step``.

        Raises:
            RuntimeError, TimeoutError: it is not served, or the worker does not answer.
        """
        with public_errors():
            return super().recv_checkpoint(src_rank, metadata, step, timeout)

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving and receiving."""
        self._offer = None
        super().shutdown(wait)
