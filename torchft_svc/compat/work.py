"""`torchft.work`: a work that is complete."""

from torchft_svc.client.process_groups.operations import CompletedWork as _DummyWork

__all__ = ["_DummyWork"]
