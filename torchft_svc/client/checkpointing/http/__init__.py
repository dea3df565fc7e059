"""The checkpoint transport over HTTP."""

from torchft_svc.client.checkpointing.http.transport import HTTPTransport

__all__ = ["HTTPTransport"]
