"""Which samples each worker uses in a step: every sample of a pass once, however many workers.

A pass has an order, which follows from the seed and the number of the pass. A step of W workers
uses the next W batches of it; the worker with rank k uses the k-th. What is left for the last step
is divided as evenly as possible; if it is fewer samples than workers, some use the same one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
)
from torch.utils.data.distributed import DistributedSampler

from torchft_svc.client.data.order import Order, StraightOrder
from torchft_svc.client.data.plan import Turn
from torchft_svc.client.data.reading import loader_like, read_samples
from torchft_svc.client.data.sampler import ElasticSampler, on_host, sampler_of
from torchft_svc.client.data.seeds import ORDER, SAMPLES, RandomStream, mix, seed_everything
from torchft_svc.errors import ConfigError


class BatchSource(Protocol):
    """The data of one pass after the other."""

    def has_more(self, epoch: int, num_samples: int) -> bool:
        """Whether pass ``epoch`` has anything left after ``num_samples``."""

    def draw(self, epoch: int, num_samples: int, turn: Turn) -> tuple[Any, int] | None:
        """The batch of one worker, and how many samples the pass has used after this step.

        None: nothing is left for this worker (``drop_last``), the pass is over.
        """


def batch_source(
    data: Any, batch_size: int | None, seed: int, *, trains: bool = True, shuffles: bool = True
) -> BatchSource:
    """The source for a Dataset, a DataLoader, or any other iterable of batches.

    Of a DataLoader everything but its sampler's position is used: dataset, batch size, order,
    ``collate_fn``, worker processes. ``batch_size`` and ``shuffles`` are for a Dataset. Where it
    ``trains``, every worker gets a batch in every step; otherwise no sample is used twice.

    Raises:
        ConfigError: it is none of these, or a batch size is missing.
    """
    if isinstance(data, DataLoader):
        if (
            isinstance(data.dataset, IterableDataset)
            or type(data.batch_sampler) is not BatchSampler
            or data.batch_size is None  # it was given
        ):
            return IteratedData(data, seed, trains)
        return IndexedData(data, _order_of(data, seed), seed, trains)
    if isinstance(data, IterableDataset):
        if batch_size is not None:
            return IteratedData(DataLoader(data, batch_size=batch_size), seed, trains)
        return IteratedData(data, seed, trains)
    if isinstance(data, Dataset):
        if batch_size is None or batch_size < 1:
            reason = "a Dataset needs one: batch_size, or batch_size in the config"
            raise ConfigError("batch_size", batch_size, reason)
        loader: DataLoader[Any] = DataLoader(data, batch_size=batch_size)
        order = ElasticSampler(len(data), shuffle=shuffles, seed=seed)  # type: ignore[arg-type]
        return IndexedData(loader, order, seed, trains)
    if isinstance(data, Iterable):
        return IteratedData(data, seed, trains)
    reason = "a Dataset, a DataLoader, or an iterable of batches is needed"
    raise ConfigError("data", type(data).__name__, reason)


class OrderSource(Protocol):
    """What gives each pass its order."""

    def order(self, epoch: int) -> Order:
        """The order of all samples in pass ``epoch``."""


def _order_of(loader: DataLoader[Any], seed: int) -> OrderSource:
    size, sampler = len(loader.dataset), loader.sampler  # type: ignore[arg-type]
    if isinstance(sampler, DistributedSampler):  # the workers of this world divide the data
        return ElasticSampler(size, shuffle=sampler.shuffle, seed=seed)
    return sampler_of(loader, seed)


# -- data with indices ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cut:
    """Samples ``first`` to ``first + count`` of a pass, and where the step ends."""

    first: int
    count: int
    end: int


def cut_for(turn: Turn, first: int, size: int, batch_size: int) -> _Cut:
    """The part of one worker in the step that begins at ``first`` of ``size`` samples."""
    taken = min(size - first, turn.size * batch_size)
    share, rest = divmod(taken, turn.size)
    if share == 0:
        return _Cut(first + turn.rank % taken, 1, first + taken)
    begin = first + turn.rank * share + min(turn.rank, rest)
    return _Cut(begin, share + (turn.rank < rest), first + taken)


class IndexedData:
    """A dataset whose samples have an index, read through a DataLoader.

    The loader runs ahead with the batches that this worker will use if it keeps its turn; it is
    started again when the turn changes, or the position.
    """

    def __init__(
        self, loader: DataLoader[Any], order: OrderSource, seed: int, trains: bool
    ) -> None:
        assert loader.batch_size is not None
        self._trains = trains
        self._loader, self._order, self._seed = loader, order, seed
        self._batch_size = loader.batch_size
        self._epoch = -1
        self._samples: Order = StraightOrder(0)
        self._batches: Iterator[Any] | None = None
        self._expected: tuple[int, int, Turn] | None = None

    def has_more(self, epoch: int, num_samples: int) -> bool:
        self._begin_pass(epoch)
        return len(self._samples) > num_samples

    def draw(self, epoch: int, num_samples: int, turn: Turn) -> tuple[Any, int] | None:
        self._begin_pass(epoch)
        end = cut_for(turn, num_samples, len(self._samples), self._batch_size).end
        num_taken = end - num_samples
        if not self._trains and turn.rank >= num_taken:
            return None
        if self._loader.drop_last and num_taken < turn.size * self._batch_size:
            if num_samples == 0 and self._trains:
                reason = f"{end} samples are no whole step of {turn.size} workers, with drop_last"
                raise ConfigError("batch_size", self._batch_size, reason)
            return None
        if self._expected != (epoch, num_samples, turn) or self._batches is None:
            self._batches = None  # ends the processes of the one before
            self._batches = _begin_loading(self._run_ahead(epoch, num_samples, turn))
        batch = next(self._batches)
        self._expected = (epoch, end, turn)
        return batch, end

    def _begin_pass(self, epoch: int) -> None:
        if self._epoch == epoch:
            return
        self._samples = self._order.order(epoch)
        if not len(self._samples):
            raise ConfigError("data", type(self._loader.dataset).__name__, "it has no sample")
        self._epoch, self._batches = epoch, None

    def _run_ahead(self, epoch: int, num_samples: int, turn: Turn) -> DataLoader[Any]:
        seed = mix(self._seed, SAMPLES, epoch)
        return loader_like(
            self._loader,
            _SeededDataset(self._loader.dataset, seed),
            _Cuts(self._samples, num_samples, turn, self._batch_size),
            torch.Generator("cpu").manual_seed(seed),
        )


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The batches of one worker until the end of a pass: where each begins, and its indices."""

    samples: Order
    first: int
    turn: Turn
    batch_size: int

    def __iter__(self) -> Iterator[list[int]]:
        first, size = self.first, len(self.samples)
        while first < size:
            cut = cut_for(self.turn, first, size, self.batch_size)
            yield [cut.first, *self.samples.indices(cut.first, cut.first + cut.count)]
            first = cut.end


class _SeededDataset(Dataset[Any]):
    """Reads a batch with random numbers that follow from its place in the pass.

    So samples that are changed at random are the same again when training is resumed, whichever
    process reads them.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, wanted: list[int]) -> list[Any]:
        place, *indices = wanted
        seed_everything(self._seed, place)
        return read_samples(self._dataset, indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


# -- any other data ------------------------------------------------------------------------------


class IteratedData:
    """An iterable of batches, such as a DataLoader of an IterableDataset.

    Each worker goes through all of it, and uses every W-th batch: ``num_samples`` counts batches
    here. To resume, the first ones are read and dropped. It has to yield the same batches each time
    that a pass is begun, in each worker; random numbers are seeded for that, and kept apart from
    those of the steps, which differ between workers.
    """

    def __init__(self, batches: Iterable[Any], seed: int, trains: bool) -> None:
        self._source, self._seed, self._trains = batches, seed, trains
        self._epoch = -1
        self._batches: Iterator[Any] = iter(())
        self._ahead: list[Any] = []
        self._num_read = 0
        self._random = RandomStream(seed, ORDER)

    def has_more(self, epoch: int, num_samples: int) -> bool:
        self._go_to(epoch, num_samples)
        return bool(self._ahead)

    def draw(self, epoch: int, num_samples: int, turn: Turn) -> tuple[Any, int] | None:
        self._go_to(epoch, num_samples)
        with self._random.going_on():
            self._ahead += islice(self._batches, max(0, turn.size - len(self._ahead)))
        batches = self._ahead[: turn.size]
        if not self._trains and turn.rank >= len(batches):
            return None
        return batches[turn.rank % len(batches)], num_samples + len(batches)

    def _go_to(self, epoch: int, num_samples: int) -> None:
        """Make the batch after ``num_samples`` the first one of those ahead."""
        if self._epoch != epoch or self._num_read > num_samples:
            self._random = RandomStream(self._seed, ORDER, epoch)
            with self._random.going_on():
                self._batches, self._ahead = _begin_loading(_without_memory(self._source)), []
            self._epoch, self._num_read = epoch, 0
        dropped = num_samples - self._num_read
        self._num_read = num_samples
        del_ahead = min(dropped, len(self._ahead))
        del self._ahead[:del_ahead]
        if dropped > del_ahead or not self._ahead:
            with self._random.going_on():
                for _ in islice(self._batches, dropped - del_ahead):
                    pass
                if not self._ahead:
                    self._ahead += islice(self._batches, 1)
        if num_samples == 0 and not self._ahead:
            reason = "it yields no batch (an iterator can be gone through only once)"
            raise ConfigError("data", type(self._source).__name__, reason)


def _begin_loading(batches: Iterable[Any]) -> Iterator[Any]:
    """``iter(batches)``; a loader draws the seed of its processes where its generator is."""
    if not isinstance(batches, DataLoader):
        return iter(batches)
    with on_host(batches.generator):
        return iter(batches)


def _without_memory(batches: Iterable[Any]) -> Iterable[Any]:
    """A loader whose processes would keep their random numbers for the next pass starts others."""
    if not isinstance(batches, DataLoader) or not batches.persistent_workers:
        return batches
    loader = copy.copy(batches)
    vars(loader)["persistent_workers"] = False  # the loader itself refuses any change
    return loader
