"""Collectives in a process of their own, which can be killed at any moment."""

from torchft_svc.client.process_groups.isolated.backends import (
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
)

__all__ = ["ProcessGroupBabyGloo", "ProcessGroupBabyNCCL"]
