"""Collectives in a process of their own, which can be killed at any moment."""

from torchft_svc.client.process_groups.isolated.group import ProcessGroupBabyGloo

__all__ = ["ProcessGroupBabyGloo"]
