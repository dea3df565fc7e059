"""Samplers: the order of all samples of an epoch, or a fixed part of them for each group."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    distributed,
)

from torchft_svc.client.data.order import BLOCK, ListedOrder, Order, ShuffledOrder, StraightOrder
from torchft_svc.client.data.seeds import ORDER, host_states_kept, mix, seed_everything
from torchft_svc.errors import ConfigError


class ElasticSampler(Sampler[int]):
    """The order of an epoch's samples, for the loader that an `ElasticDataLoader` reads.

    It is the same in all groups, which divide it from step to step. Iterated alone, it yields all
    samples of the epoch of `set_epoch`.

    Args:
        data_source: the data set, or its length.
        shuffle: in another order in each epoch, without a list of all indices.
        seed: of these orders; the same in all groups.

    Raises:
        ConfigError: the data set has no length, or no sample.
    """

    def __init__(self, data_source: Sized | int, *, shuffle: bool = True, seed: int = 0) -> None:
        size = data_source if isinstance(data_source, int) else _length(data_source)
        if size < 1:
            raise ConfigError("data_source", f"{size} samples", "an epoch needs one or more")
        self.size, self.shuffle, self.seed = size, shuffle, seed
        self.epoch = 0
        self.reader: object = None  # the loader that reads by it

    def set_epoch(self, epoch: int) -> None:
        """Iterate epoch ``epoch`` from now on; an `ElasticDataLoader` knows its epoch itself."""
        self.epoch = epoch

    def order(self, epoch: int) -> Order:
        """The order of all samples in ``epoch``."""
        if self.shuffle:
            return ShuffledOrder(self.size, self.seed, epoch)
        return StraightOrder(self.size)

    def describe(self) -> str:
        """The order, in words."""
        how = f"shuffled with seed {self.seed}" if self.shuffle else "in their order"
        return f"{self.size} samples {how}"

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.epoch)
        for begin in range(0, self.size, BLOCK):
            yield from order.indices(begin, min(begin + BLOCK, self.size))


class DrawnSampler:
    """The order that a sampler of the program draws, from random numbers of the epoch.

    All of it is drawn when the epoch begins. That of the first epoch shows whether all groups draw
    the same.
    """

    shuffle = True

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler, self.seed = sampler, seed
        self.reader: object = None

    @functools.cached_property
    def size(self) -> int:
        """How many samples it draws in an epoch."""
        return self._first[0]

    @functools.cached_property
    def _first(self) -> tuple[int, str]:
        """The length and a digest of the first epoch's order."""
        drawn = self._draw(0)
        text = ",".join(map(str, drawn)).encode()
        return len(drawn), hashlib.blake2b(text, digest_size=4).hexdigest()

    def _draw(self, epoch: int) -> list[int]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        drawn = draw_order(self._sampler, mix(self.seed, ORDER, epoch))
        if drawn and isinstance(drawn[0], (list, tuple)):
            reason = "it draws lists: give the DataLoader a sampler that draws one index at a time"
            raise ConfigError("sampler", type(self._sampler).__name__, reason)
        return drawn

    def order(self, epoch: int) -> Order:
        """The order of all samples in ``epoch``."""
        return ListedOrder(self._draw(epoch))

    def describe(self) -> str:
        """The order, in words, with a digest of the first epoch's."""
        how = f"drawn by {type(self._sampler).__name__} with seed {self.seed}"
        return f"{self.size} samples {how} ({self._first[1]})"


def draw_order(sampler: Any, seed: int) -> list[int]:
    """The indices that ``sampler`` draws with the random numbers of ``seed``."""
    with host_states_kept():
        seed_everything(seed)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        is_torchs = type(sampler).__module__.startswith("torch.utils.data.")
        with on_host(generator) if is_torchs else contextlib.nullcontext():
            return list(sampler)


def on_host(generator: torch.Generator | None) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which torch makes tensors on the host, whatever the default device is.

    Torch's samplers and loaders draw their numbers into a tensor of the default device, with a
    generator of the host unless the program gives one; that fails if these differ.
    """
    if generator is not None and generator.device.type != "cpu":
        return contextlib.nullcontext()
    return torch.device("cpu")


def sampler_of(loader: DataLoader[Any], seed: int) -> ElasticSampler | DrawnSampler:
    """The order in which ``loader`` would go through its data set.

    Raises:
        ConfigError: it has none that all groups could share.
    """
    sampler = given_sampler(loader)
    if isinstance(sampler, ElasticSampler):
        size = _length(loader.dataset)
        if sampler.size != size:
            reason = f"the data set of the loader has {size} samples: make the sampler for it"
            raise ConfigError("sampler", f"of {sampler.size} samples", reason)
        return sampler
    if isinstance(sampler, SequentialSampler):
        return ElasticSampler(loader.dataset, shuffle=False)  # type: ignore[arg-type]
    if type(sampler) is RandomSampler and not sampler.replacement:
        size = _length(loader.dataset)
        if sampler.num_samples == size:
            return ElasticSampler(size, seed=seed)
    if reads_part(sampler):
        reason = "it reads a part of the data only: use ElasticSampler(dataset, seed=...)"
        raise ConfigError("sampler", type(sampler).__name__, reason)
    return DrawnSampler(sampler, seed)


def given_sampler(loader: DataLoader[Any]) -> Any:
    """The sampler of ``loader``, also if the program gave it in a `BatchSampler`."""
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else loader.sampler


def reads_part(sampler: Any) -> bool:
    """Whether ``sampler`` leaves some of the samples to the samplers of other workers.

    Those that are not torch's own follow its names.
    """
    if isinstance(sampler, distributed.DistributedSampler):
        return True
    num = getattr(sampler, "num_replicas", 1)
    return isinstance(num, int) and num > 1 and hasattr(sampler, "rank")


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        reason = "a data set with a length is needed; for a stream use ElasticStream"
        raise ConfigError("loader", type(data).__name__, reason) from None


class DistributedSampler(distributed.DistributedSampler[Any]):
    """Gives each worker of each replica group its own part of ``dataset``.

    The parts are fixed: while a group is absent, no other group gets its part.

    Args:
        replica_rank: this group's index among ``num_replica_groups``; it must stay the same when
            the group is restarted.
        group_rank, num_replicas: this worker in its group of ``num_replicas`` workers (default:
            from torch's initialized process group, else one worker).
        kwargs: passed to torch's class: ``shuffle``, ``seed``, ``drop_last``.

    Raises:
        ConfigError: a rank is out of range.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        if group_rank is None:
            group_rank = dist.get_rank() if initialized else 0
        if num_replicas is None:
            num_replicas = dist.get_world_size() if initialized else 1
        _check_rank("replica_rank", replica_rank, "num_replica_groups", num_replica_groups)
        _check_rank("group_rank", group_rank, "num_replicas", num_replicas)
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(
            dataset, rank=self.global_rank, num_replicas=self.global_world_size, **kwargs
        )

    def __iter__(self) -> Iterator[Any]:
        with torch.device("cpu"):  # torch's class shuffles with a generator of the host
            return super().__iter__()


def _check_rank(name: str, value: int, size_name: str, size: int) -> None:
    if size < 1:
        raise ConfigError(size_name, size, "use 1 or more")
    if not 0 <= value < size:
        raise ConfigError(name, value, f"it must be 0 to {size - 1} with {size_name}={size}")
