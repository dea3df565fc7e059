"""Training over slow links: groups train alone, and synchronize after every so many updates."""

from torchft_svc.client.algorithms.decoupled_diloco import DecoupledDiLoCo
from torchft_svc.client.algorithms.diloco import DiLoCo
from torchft_svc.client.algorithms.local_sgd import LocalSGD
from torchft_svc.client.algorithms.periodic_sync import PeriodicSync

__all__ = ["DecoupledDiLoCo", "DiLoCo", "LocalSGD", "PeriodicSync"]
