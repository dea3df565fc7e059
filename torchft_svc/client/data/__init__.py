"""Data of a job whose groups come and go: each sample in exactly one committed step."""

from typing import TYPE_CHECKING

from torchft_svc.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchft_svc.client.data.loader import ElasticDataLoader
    from torchft_svc.client.data.plan import EpochPosition
    from torchft_svc.client.data.sampler import DistributedSampler, ElasticSampler
    from torchft_svc.client.data.stream import ElasticStream

__all__ = [
    "DistributedSampler",
    "ElasticDataLoader",
    "ElasticSampler",
    "ElasticStream",
    "EpochPosition",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DistributedSampler": ".sampler",
        "ElasticDataLoader": ".loader",
        "ElasticSampler": ".sampler",
        "ElasticStream": ".stream",
        "EpochPosition": ".plan",
    },
)
