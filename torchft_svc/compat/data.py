"""`torchft.data`: the sampler for a fixed number of replica groups."""

from torchft_svc.client.data.sampler import DistributedSampler

__all__ = ["DistributedSampler"]
