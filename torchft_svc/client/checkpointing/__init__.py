"""Transports that carry the state of an up-to-date worker to one that heals."""

from typing import TYPE_CHECKING

from torchft_svc.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchft_svc.client.checkpointing.http.transport import HTTPTransport
    from torchft_svc.client.checkpointing.pg import PGTransport
    from torchft_svc.client.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport", "PGTransport"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CheckpointTransport": ".transport",
        "HTTPTransport": ".http.transport",
        "PGTransport": ".pg",
    },
)
