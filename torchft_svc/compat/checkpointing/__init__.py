"""`torchft.checkpointing`: the transports that carry the state of groups that heal."""

from torchft_svc.compat.checkpointing.http_transport import HTTPTransport
from torchft_svc.compat.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport"]
