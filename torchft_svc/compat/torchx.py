"""`torchft.torchx`: the component that runs a job of several replica groups."""

from torchft_svc.torchx import hsdp

__all__ = ["hsdp"]
