"""`torchft.checkpointing.transport`: the interface of transports, also for a program's own."""

from torchft_svc.client.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport"]
