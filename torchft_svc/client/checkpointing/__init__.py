"""Transports that carry the state of an up-to-date worker to one that heals."""

from torchft_svc.client.checkpointing.http.transport import HTTPTransport
from torchft_svc.client.checkpointing.pg import PGTransport
from torchft_svc.client.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport", "PGTransport"]
